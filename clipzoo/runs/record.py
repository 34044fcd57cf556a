"""Results of a run: the typed content of results.json. Needs no torch."""

from __future__ import annotations

import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.config.groups import own_folder
from clipzoo.errors import masked
from clipzoo.runs.metric_key import MetricKey, parsed, written
from clipzoo.runs.protocol import Setting, protocol

FILE = "results.json"
ENDED_EARLY = "ended_early"
"""Name, among the costs of a training, of the sentence why it ended before its last step."""
REMEDY = "remove it and run the training command again, which writes it from the newest checkpoint"
FIELDS = {
    "experiment": str, "row": str, "overrides": list, "config_dir": str, "seed": int, "versions": dict, "revision": str,
    "training": dict, "protocol": dict, "metrics": dict, "not_converged": list,
}  # fmt: skip
"""Types of the values in results.json; all but the metrics may be absent."""
OPTIONAL = ("config_dir", "not_converged")
"""Keys that results.json has only if they say something."""
PACKAGES = ("clipzoo", "torch", "torchvision", "open_clip_torch", "timm", "webdataset", "numpy")


@dataclass(frozen=True)
class RunRecord:
    """Content of results.json, which is written last: a run directory that has the file is finished.

    Args:
        experiment: name of the experiment, as in `experiment=`; None without one.
        row: row of a paper's table, "<paper>/<pretraining dataset>/<model>".
        overrides: the command line. config_dir: the folder of `--config-dir`, relative to the working directory if it
            lies in it. The file has this key only if there was one.
        versions: of Python and the main packages, by name.
        revision: git revision of the code; see `revision`.
        training: steps, seconds, samples per second and other costs of the training, by name.
        protocol: evaluation settings behind the metrics, by task and dataset ("zero_shot/imagenet").
        metrics: results of the evaluation, in percent but for losses.
        not_converged: linear probes whose final fit did not converge ("linear_probe/cifar10/before"). The file has
            this key only if there are any.

    Files of earlier versions may lack fields; these are empty.
    """

    experiment: str | None = None
    row: str | None = None
    overrides: tuple[str, ...] = ()
    config_dir: str | None = None
    seed: int | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    revision: str | None = None
    training: Mapping[str, float | str] = field(default_factory=dict)
    protocol: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)
    metrics: Mapping[MetricKey, float] = field(default_factory=dict)
    not_converged: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Read the record of a finished run. Raises DamagedFileError."""
        io.require_no_links(folder)
        path = folder / FILE
        content = io.read_json(path, 16 * io.MB, REMEDY)
        known = {name: content[name] for name in FIELDS if content.get(name) is not None}
        io.require_fields(path, known, {name: FIELDS[name] for name in {**known, "metrics": 0}}, REMEDY)
        io.require_numbers(path, known["metrics"], REMEDY)
        io.require_fields(path, known.get("protocol", {}), dict.fromkeys(known.get("protocol", {}), dict), REMEDY)
        for name in ("overrides", "not_converged"):
            known[name] = tuple(masked(list(known.get(name, ()))))
        known["metrics"] = parsed(known["metrics"])
        return cls(**known)

    @property
    def command(self) -> str:
        """The command of the run, or of the evaluation if nothing was trained, quoted for a shell."""
        name = "evaluate" if self.training.get("steps") == 0 else "train"
        options = ["--config-dir", self.config_dir] if self.config_dir else []
        return shlex.join(["clipzoo", name, *options, *self.overrides])

    def write(self, folder: Path) -> None:
        """Write results.json, all at once."""
        content = {**self.__dict__, "overrides": list(self.overrides), "metrics": written(self.metrics)}
        content = {name: value for name, value in content.items() if value or name not in OPTIONAL}
        io.write_json(folder / FILE, content)

    def resolved(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return a run's configuration with the precision that trainer.precision=auto stood for."""
        if config["trainer"].get("precision") != "auto" or "precision" not in self.training:
            return config
        return {**config, "trainer": {**config["trainer"], "precision": self.training["precision"]}}

    def evaluated(
        self, evaluation: Mapping[str, Setting], metrics: Mapping[MetricKey, float], folder: Path
    ) -> RunRecord:
        """Add metrics, and the settings of `eval` they were measured with, in place of earlier values.

        folder: the run directory, in which the evaluation names the probes that did not converge.
        """
        settings = {**self.protocol, **protocol(evaluation, metrics)}
        return replace(
            self,
            metrics={**self.metrics, **metrics},
            protocol=settings,
            not_converged=tuple(probes_not_converged(folder)),
        )


def probes_not_converged(folder: Path) -> list[str]:
    """Return the linear probes of a run whose final fit did not converge, as "linear_probe/cifar10/before"."""
    damage = io.DamageLog()
    names = []
    for path in sorted((folder / "evaluation" / "linear_probe").glob("*.search.json")):
        fits: dict[str, Any] = damage.read(partial(io.read_json, path, io.MB), {})
        place = f"linear_probe/{path.name.removesuffix('.search.json')}"
        names += [
            f"{place}/{projection}"
            for projection, fit in fits.items()
            if isinstance(fit, Mapping) and fit.get("converged") is False
        ]
    return names


def results(
    folder: Path,
    plain: Mapping[str, Any],
    experiment: str | None,
    overrides: Sequence[str],
    training: Mapping[str, float | str],
    metrics: Mapping[str, float],
) -> RunRecord:
    """Return the record of a run that has ended.

    Args:
        folder: the run directory.
        plain: the configuration; its `row`, `seed` and `eval` are recorded.
        training: costs of the training by name.
        metrics: results of the evaluation by written key ("zero_shot/cifar10/top1").
    """
    versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    record = RunRecord(
        experiment, plain["row"], tuple(masked(list(overrides))), _config_dir(), plain["seed"], versions, revision(),
        dict(training),
    )  # fmt: skip
    return record.evaluated(plain["eval"], parsed(metrics), folder)


def _config_dir() -> str | None:
    folder = own_folder()
    if folder is None:
        return None
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def summary(folder: Path) -> str:
    """Describe a finished run for the terminal: its steps, its metrics, its report."""
    record = RunRecord.read(folder)
    lines = [f"{folder} is finished after {record.training.get('steps', 'all')} steps; pass name=NEW to train again."]
    lines += [f"  {key!s:<52} {value:8.{key.decimals}f}" for key, value in record.metrics.items()]
    page = folder / "report.md"
    lines.append(f"report: {page}" if page.exists() else f"report: none; clipzoo report {folder} writes it")
    return "\n".join(lines)


def revision() -> str | None:
    """The git revision of the code, followed by "+" if files differ from it; None outside a checkout."""
    where, name = Path(__file__).parent, Path(__file__).name

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # An installed package may lie in the checkout of another project, which does not track its files.
        git("ls-files", "--error-unmatch", name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
