"""Results of a run: results.json, names of metrics, metrics.jsonl, and the arrays of evaluations. Needs no torch."""

from __future__ import annotations

import platform
import shlex
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipzoo import io
from clipzoo.config.groups import own_folder
from clipzoo.config.schema import kinds_of
from clipzoo.errors import masked

if TYPE_CHECKING:
    import numpy as np

FILE = "results.json"
ENDED_EARLY = "ended_early"
"""Key of the costs of a training: the reason why it ended before its last step."""
REMEDY = "remove it and run the training command again, which writes it from the newest checkpoint"
FIELDS = {
    "experiment": "str", "row": "str", "overrides": "list[str]", "config_dir": "str", "seed": "int",
    "versions": "dict[str, str | None]", "revision": "str", "training": "dict[str, AnyNumber | str]",
    "protocol": "dict[str, dict]", "metrics": "dict", "not_converged": "list[str]",
    "published": "dict[str, dict]", "precision": "dict[str, str]",
}  # fmt: skip
"""Annotations of the values in results.json; all but the metrics may be absent."""
KINDS = kinds_of(FIELDS)
PUBLISHED = {**dict.fromkeys(("value", "difference", "low", "high"), "AnyNumber"), "source": "str"}
"""Annotations of a comparison with a published number, see `compare_with_published`."""
OPTIONAL = ("config_dir", "not_converged", "published", "precision")
"""Keys that results.json leaves out if they are empty."""
PACKAGES = ("clipzoo", "torch", "torchvision", "open_clip_torch", "timm", "webdataset", "numpy")
LOG_BYTES = 64 * io.MB
"""Largest size of metrics.jsonl."""
ARRAYS_REMEDY = "remove the dataset's files from the folder and evaluate the run again"

PAIRED = "_paired"
DEVIATION = "_std"
VALIDATION = "validation"
"""Task of the loss on held-out pairs, and their name as a dataset of retrieval."""
AVERAGE = "average"
"""First segment of the metrics of averaged weights, "average/zero_shot/cifar10/top1"."""
PAPER_TASKS = ("zero_shot", "linear_probe", "retrieval")
"""Tasks of the papers' tables."""
Setting = str | int | float | bool | None
SETTINGS = {
    "zero_shot": ("prompts", "interpolation", "resize_mode"),
    "linear_probe": ("interpolation", "resize_mode", "probe_resize", "probe_validation"),
    "retrieval": ("interpolation", "resize_mode"),
    "knn": ("interpolation", "resize_mode", "probe_resize", "neighbours"),
    "few_shot": ("interpolation", "resize_mode", "probe_resize", "shot_seeds", "prompts"),
    "choice": ("interpolation", "resize_mode"),
    "diagnosis": ("interpolation", "resize_mode"),
}
"""By task, the settings of `eval` that change a dataset's numbers: its protocol."""
TASKS = tuple(SETTINGS)
"""Tasks of an evaluation; lists of datasets in the node `eval` have these names."""
TWO_LISTS = (
    "imagenet", "imagenet_v2", "imagenet_v2_matched", "imagenet_r", "imagenet_a", "imagenet_o", "imagenet_sketch",
    "imagenet_real", "objectnet",
)  # fmt: skip
"""Datasets for which eval.prompts=slip and eval.prompts=clip select different prompts."""


@dataclass(frozen=True)
class MetricKey:
    """Name of one number in results.json, written as "zero_shot/cifar10/top1".

    task: "zero_shot", "linear_probe", "retrieval", "validation", "training", or the name of a custom evaluator.
    dataset: name of the evaluation dataset; empty for "training" and "validation".
    protocol: "before" or "after" (projection) for linear probes; "image_to_text", "text_to_image" or
        "paired_image_to_text" for retrieval; a category of examples for choices; empty otherwise.
    metric: "top1", "recall_at_5", in percent; "loss" of "validation"; the deviation over draws of random features
        ends in "_std".

    `parse(str(key)) == key`, and `str(parse(text)) == text` for every text without empty segments.
    """

    task: str
    dataset: str
    protocol: str
    metric: str

    @classmethod
    def parse(cls, text: str) -> MetricKey:
        """Parse the written form: 1 segment is a metric, 2 are task and metric, 3 have a dataset, 4 a protocol."""
        *places, metric = text.split("/")
        task, dataset, protocol = places[:1], places[1:2], places[2:]
        if task == ["retrieval"] and protocol and dataset[0].endswith(PAIRED):
            dataset, protocol = [dataset[0].removesuffix(PAIRED)], [f"paired_{protocol[0]}", *protocol[1:]]
        return cls("".join(task), "".join(dataset), "/".join(protocol), metric)

    def __str__(self) -> str:
        dataset, protocol = self.dataset, self.protocol
        if self.paired:
            dataset, protocol = f"{dataset}{PAIRED}", protocol.removeprefix("paired_")
        return "/".join(segment for segment in (self.task, dataset, protocol, self.metric) if segment)

    @property
    def paired(self) -> bool:
        """True for retrieval with one caption per image in the gallery at a time."""
        return self.task == "retrieval" and self.protocol.startswith("paired_")

    @property
    def lower_is_better(self) -> bool:
        return self.metric in ("loss", "ece", "fitted_ece", "gap", "group_gap")

    @property
    def is_ranked(self) -> bool:
        """False if neither higher nor lower values are better, as for a description of an embedding."""
        return self.task != "diagnosis" and self.metric not in ("temperature", "gap")

    @property
    def decimals(self) -> int:
        return 4 if self.metric == "loss" or self.task == "diagnosis" else 2

    def is_better(self, value: float, other: float) -> bool:
        return value < other if self.lower_is_better else value > other

    @property
    def deviation(self) -> MetricKey:
        """Key of this metric's standard deviation over draws."""
        return replace(self, metric=f"{self.metric}{DEVIATION}")


VALIDATION_LOSS = MetricKey(VALIDATION, "", "", "loss")


def parsed(metrics: Mapping[str, float]) -> dict[MetricKey, float]:
    """Return metrics by parsed key, in the same order."""
    return {MetricKey.parse(text): value for text, value in metrics.items()}


def written(metrics: Mapping[MetricKey, float]) -> dict[str, float]:
    """Return metrics by written key, in the same order: the inverse of `parsed`."""
    return {str(key): value for key, value in metrics.items()}


def of_average(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by metric by the written keys of averaged weights."""
    return {f"{AVERAGE}/{text}": value for text, value in metrics.items()}


def split(metrics: Mapping[MetricKey, float]) -> tuple[dict[MetricKey, float], dict[MetricKey, float]]:
    """Return the metrics of the weights and, by the same keys, those of averaged weights."""
    average = {str(key).removeprefix(f"{AVERAGE}/"): value for key, value in metrics.items() if key.task == AVERAGE}
    return {key: value for key, value in metrics.items() if key.task != AVERAGE}, parsed(average)


def protocol_settings(evaluation: Mapping[str, Setting], task: str, dataset: str) -> dict[str, Setting]:
    """Return the settings of `eval` that affect the numbers of one task on one dataset."""
    values = {name: evaluation[name] for name in SETTINGS.get(task, ()) if name in evaluation}
    if values.get("resize_mode") == "shortest":  # the default is not recorded
        del values["resize_mode"]
    if values.get("prompts") == "clip" and dataset not in TWO_LISTS:
        values["prompts"] = "slip"
    return values


@dataclass(frozen=True)
class RunRecord:
    """Content of results.json, which is written last: a run directory that has the file is finished.

    experiment: name of the experiment, as in `experiment=`; None without one.
    row: row of a paper's table, "<paper>/<pretraining dataset>/<model>".
    overrides: the command line. config_dir: the folder of `--config-dir`, relative to the working directory if it
        is inside.
    versions: versions of Python and the main packages, by name.
    revision: git revision of the code; see `revision`.
    training: steps, seconds, samples per second and other costs of the training, by name.
    protocol: evaluation settings of the metrics, by task and dataset ("zero_shot/imagenet").
    metrics: results of the evaluation, in percent but for losses.
    not_converged: linear probes whose final fit did not converge ("linear_probe/cifar10/before").
    published: by written metric, the published number and the comparison with it: see PUBLISHED.
    precision: of an evaluation: of the stored "weights" and of the "encoders", such as "float16" and "bf16".
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
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    precision: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Read the record of a finished run. Raises DamagedFileError."""
        io.require_no_links(folder)
        path = folder / FILE
        content = io.read_json(path, 16 * io.MB, REMEDY)
        values = {name: content[name] for name in FIELDS if content.get(name) is not None}
        io.require_fields(path, values, {name: KINDS[name] for name in {**values, "metrics": 0}}, REMEDY)
        io.require_fields(path, values["metrics"], dict.fromkeys(values["metrics"], io.NUMBER), REMEDY)
        for comparison in values.get("published", {}).values():
            io.require_fields(path, comparison, kinds_of(PUBLISHED), REMEDY)
        for name in ("overrides", "not_converged"):
            values[name] = tuple(masked(values.get(name, [])))
        values["metrics"] = parsed(values["metrics"])
        return cls(**values)

    def write(self, folder: Path) -> None:
        content = {**self.__dict__, "overrides": list(self.overrides), "metrics": written(self.metrics)}
        io.write_json(folder / FILE, {name: value for name, value in content.items() if value or name not in OPTIONAL})

    @property
    def command(self) -> str:
        """The command of the run, or of the evaluation if nothing was trained, quoted for a shell."""
        name = "evaluate" if self.training.get("steps") == 0 else "train"
        options = ["--config-dir", self.config_dir] if self.config_dir else []
        return shlex.join(["clipzoo", name, *options, *self.overrides])

    def resolved(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return a run's configuration with the precision that was chosen for trainer.precision=auto."""
        if config["trainer"].get("precision") != "auto" or "precision" not in self.training:
            return config
        return {**config, "trainer": {**config["trainer"], "precision": self.training["precision"]}}

    def evaluated(
        self, evaluation: Mapping[str, Setting], metrics: Mapping[MetricKey, float], folder: Path
    ) -> RunRecord:
        """Return the record with metrics and their settings of `eval` in place of earlier ones. folder: of the run."""
        # Averaged weights are evaluated with the settings of the weights.
        places = dict.fromkeys((key.task, key.dataset) for key in metrics if key.task != AVERAGE)
        settings = {f"{task}/{dataset}": protocol_settings(evaluation, task, dataset) for task, dataset in places}
        damage, probes = io.DamageLog(), []
        for path in sorted((folder / "evaluation" / "linear_probe").glob("*.search.json")):
            fits: dict[str, Any] = damage.read(partial(io.read_json, path, io.MB), {})
            for projection, fit in fits.items():
                if isinstance(fit, Mapping) and fit.get("converged") is False:
                    probes.append(f"linear_probe/{path.name.removesuffix('.search.json')}/{projection}")
        return replace(
            self,
            metrics={**self.metrics, **metrics},
            protocol={**self.protocol, **{place: values for place, values in settings.items() if values}},
            not_converged=tuple(probes),
            published={name: part for name, part in self.published.items() if MetricKey.parse(name) not in metrics},
        )


def results(
    folder: Path,
    plain: Mapping[str, Any],
    experiment: str | None,
    overrides: Sequence[str],
    training: Mapping[str, float | str],
    metrics: Mapping[str, float],
) -> RunRecord:
    """Return the record of an ended run. plain: configuration. training: costs by name. metrics: by written key."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    config_dir = own_folder()
    if config_dir is not None and config_dir.is_relative_to(Path.cwd()):
        config_dir = config_dir.relative_to(Path.cwd())
    record = RunRecord(
        experiment, plain["row"], tuple(masked(list(overrides))), None if config_dir is None else str(config_dir),
        plain["seed"], versions, revision(), dict(training),
    )  # fmt: skip
    return record.evaluated(plain["eval"], parsed(metrics), folder)


def summary(folder: Path) -> str:
    """Describe a finished run for the terminal: its steps, its metrics, its report."""
    record = RunRecord.read(folder)
    lines = [f"{folder} is finished after {record.training.get('steps', 'all')} steps; pass name=NEW to train again."]
    lines += [f"  {key!s:<52} {value:8.{key.decimals}f}" for key, value in record.metrics.items()]
    page = folder / "report.md"
    lines.append(f"report: {page}" if page.exists() else f"report: none; clipzoo report {folder} writes it")
    return "\n".join(lines)


def revision() -> str | None:
    """Return the git revision of the code, followed by "+" if files differ from it; None outside a checkout."""
    base, name = Path(__file__).parent, Path(__file__).name

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=base, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # An installed package may be in the checkout of another project, which does not track its files.
        git("ls-files", "--error-unmatch", name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


Line = dict[str, float | str]


@dataclass(frozen=True)
class TrainingLog:
    """Lines of metrics.jsonl: values logged during training, and evaluations by written metric key."""

    training: tuple[Line, ...] = ()
    evaluations: tuple[Line, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> TrainingLog:
        """Read the log of a run directory; it is empty without one. Damaged lines and values are left out."""
        io.require_no_links(folder)
        training: list[Line] = []
        evaluations: list[Line] = []
        for row in io.read_json_lines(folder / "metrics.jsonl", LOG_BYTES):
            line: Line = {name: value for name, value in row.items() if isinstance(value, int | float)}
            if "step" not in line:
                continue
            if row.get("event") == "evaluation":
                evaluations.append({**line, "event": "evaluation"})
            elif "event" not in row:
                training.append(line)
        return cls(tuple(training), tuple(evaluations))

    @property
    def last_loss(self) -> float | None:
        """The last training loss; None if no line has one."""
        return next((float(line["loss"]) for line in reversed(self.training) if "loss" in line), None)


# Wall time of a run: starts.jsonl has a line for every process that has trained it, also for those that were killed.

STARTS = "starts.jsonl"
PRODUCTIVE = ("forward", "backward", "optimizer")
PHASES = ("data", *PRODUCTIVE, "evaluation", "checkpoint")
"""Parts of the wall time that a training measures; see `clipzoo.training.throughput`."""
WALL_PHASES = ("start", *PHASES, "other", "lost", "stopped")


def record_start(folder: Path, began: float, step: int, spent: Mapping[str, float]) -> None:
    """Add a line for a process that continues at `step`, before the logger removes later steps, which are lost.

    began: time in seconds since the epoch. spent: seconds of the run up to `step`, in all and by phase.
    """
    lines = TrainingLog.read(folder).training if (folder / STARTS).exists() else ()
    last = lines[-1] if lines else {}
    lost = {"lost_steps": max(0, int(last.get("step", 0)) - step),
            "lost": max(0.0, float(last.get("seconds", 0.0)) - spent["seconds"])}  # fmt: skip
    file = io.JsonLines(folder / STARTS)
    file.append({"began": began, "start": time.time() - began, "step": step, "spent": dict(spent), **lost})
    file.close()


def goodput(folder: Path, spent: Mapping[str, float]) -> dict[str, float]:
    """Return the wall time of a run since its first start, in seconds and by phase, and its goodput.

    spent: as in `record_start`, at the end. stopped: no process ran, or one was killed before it logged a step.
    goodput: share of the wall time in forward and backward passes and updates of steps that were kept.
    """
    needed = {"began", "start", "lost", "lost_steps", "spent"}
    starts = [line for line in io.read_json_lines(folder / STARTS, 16 * io.MB) if needed <= line.keys()]
    # A run that continues another run has the seconds of that run in its checkpoint.
    before, sums = starts[0]["spent"], {name: sum(line[name] for line in starts) for name in ("start", "lost")}
    own = {name: spent.get(name, 0.0) - before.get(name, 0.0) for name in ("seconds", "start", *PHASES)}
    inside = own["seconds"] - own["start"] + own["evaluation"]
    wall = time.time() - starts[0]["began"]
    rest = wall - inside - sum(sums.values())
    own |= {"other": inside - sum(own[name] for name in PHASES), "stopped": 0.0, **sums}
    own["stopped" if len(starts) > 1 else "other"] += rest
    return {
        "wall_seconds": wall, **{f"{name}_seconds": own.get(name, 0.0) for name in WALL_PHASES},
        "restarts": len(starts) - 1, "lost_steps": sum(line["lost_steps"] for line in starts),
        "goodput": sum(own[name] for name in PRODUCTIVE) / wall,
    }  # fmt: skip


def stored_arrays(
    folder: Path, task: str, names: Iterable[str], damage: io.DamageLog
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield the datasets of a task that a run was evaluated on, with their arrays; see `read_arrays`."""
    for path in sorted(io.below(folder, f"evaluation/{task}", links=True).glob("*.npz")):
        if arrays := damage.read(partial(read_arrays, path, names), dict[str, "np.ndarray"]()):
            yield path.stem, arrays


def read_arrays(path: Path, names: Iterable[str] = (), most: int = 512 * io.MB) -> dict[str, np.ndarray]:
    """Return arrays of an .npz file of an evaluation by name, all of them by default.

    most: largest size in bytes of the file, and of all its arrays together, which may be compressed. Raises
    DamagedFileError if the file or an array is missing, damaged or too large.
    """
    import numpy as np

    with io.readable(path, most, ARRAYS_REMEDY) as file:
        try:
            with np.load(file) as content:
                total = sum(entry.file_size for entry in content.zip.infolist())
                if total > most:
                    raise ValueError(f"{total:,} bytes of arrays, more than {most:,}")
                return {name: content[name] for name in names or content.files}
        # Damaged bytes raise OSError, ValueError, EOFError, BadZipFile, zlib.error, KeyError, SyntaxError and more. The
        # memory for an array that states more bytes than its file has is never written to.
        except Exception as error:
            raise io.DamagedFileError(path, f"is not an intact .npz file ({error})", ARRAYS_REMEDY) from None
