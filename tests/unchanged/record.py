"""Record what the code of a checkout computes, to be compared with another checkout by compare.py.

python tests/unchanged/record.py CHECKOUT OUTPUT_FOLDER --stored STORED_FOLDER     everything but the demo
python tests/unchanged/record.py CHECKOUT OUTPUT_FOLDER --parts runs,ranks
python tests/unchanged/record.py CHECKOUT OUTPUT_FOLDER --only '(runs|ranks)/clip/'

Only the command line of the checkout is used, so the same program records checkouts of different layouts. Results go to
OUTPUT_FOLDER/PART.json after each case; a killed recording continues, and a record of other code is started anew. The
parts `pages` and `lines` read STORED_FOLDER, which stored.py makes once with the reference checkout. Several processes
may record different parts into the same folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.unchanged import cases, commands, inputs, results
from tests.unchanged.cases import Case
from tests.unchanged.changed import translated
from tests.unchanged.checkout import Checkout

PARTS = (
    "listing", "plan", "lines", "pages", "runs", "ranks", "variants", "exports", "configs", "studies", "resume",
    "micro", "encoders",
)  # fmt: skip
"""The parts of a full recording, the cheapest and most telling first."""
OPTIONAL = ("demo",)


def main() -> int:
    options = _options()
    for part in options.parts:
        begin = time.monotonic()
        recorder = Recorder(part, options.checkout.resolve(), options.output.resolve(), options.stored)
        recorder.record(re.compile(options.only))
        print(f"{part}: {recorder.made} cases in {time.monotonic() - begin:.0f} s", flush=True)
        print(recorder.path)
    return 0


class Recorder:
    """Records the cases of a part into <folder>/<part>.json; inputs and runs are in <folder>/work."""

    def __init__(self, part: str, checkout: Path, folder: Path, stored: Path | None = None) -> None:
        self.part, self.path, self.work, self.stored = part, folder / f"{part}.json", folder / "work", stored
        self.checkout = Checkout(checkout, self.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.made = 0
        inputs.write(self.work)
        facts = {"code": code_digest(checkout), "inputs": inputs.digest(self.work), "environment": environment()}
        self.content = json.loads(self.path.read_text()) if self.path.exists() else {}
        changed = [name for name, value in facts.items() if self.content.get(name) != value]
        if changed:
            if self.content:
                print(f"{self.path.name} is started anew: its {' and '.join(changed)} differ", flush=True)
            self.content = {**facts, "cases": {}}

    def record(self, only: re.Pattern[str]) -> None:
        """Record the cases whose keys match `only` and that have no record yet."""
        for key, make in self._cases():
            if only.search(key) and key not in self.content["cases"]:
                begin = time.monotonic()
                self.content["cases"][key] = self._without_folder(make())
                self.made += 1
                temporary = self.path.with_suffix(".partial")
                temporary.write_text(json.dumps(self.content))
                os.replace(temporary, self.path)
                print(f"  {key} ({time.monotonic() - begin:.1f} s)", flush=True)

    def train(self, case: Case) -> dict[str, Any]:
        """The record of one training, and of what is done with its run directory afterwards."""
        self.checkout.remove(case)
        if case.resumed:
            self.checkout.kill(case)
        record = self.checkout.train(case)
        if case.used:
            run = self.checkout.runs(case)[0]
            record |= {"loaded": self.checkout.load(run), "evaluated": self.checkout.evaluate(run)}
        self.checkout.remove(case)
        return record

    def _cases(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Key and function of every case of the part."""
        path = self.checkout.path
        if self.part == "configs":
            for name, overrides in cases.configurations(path):
                own = tuple(translated(line, self.checkout.keys) for line in overrides)
                yield f"configs/{' '.join([name, *overrides])}", partial(flat_configuration, path, name, own)
        elif self.part == "studies":
            for name, settings in cases.STUDIES.items():
                yield f"studies/{name}", partial(self.checkout.study, name, settings)
        elif self.part in commands.PARTS:
            yield from commands.cases(self.part, self.checkout, self.stored)
        elif self.part == "demo":
            yield "demo", self.checkout.demo
        else:
            for case in cases.trainings(path, self.part, self._incompatible()):
                yield case.key, partial(self.train, case)

    def _incompatible(self) -> set[str]:
        """Pairs that the part `runs` has recorded as refused: the other modes do not try them again."""
        path = self.path.with_name("runs.json")
        recorded = json.loads(path.read_text())["cases"] if path.exists() and self.part != "runs" else {}
        return {key.removeprefix("runs/") for key, case in recorded.items() if case["exit"] != [0]}

    def _without_folder(self, record: dict[str, Any]) -> dict[str, Any]:
        """Paths of shards in messages and lists of bad samples must not depend on the output folder."""
        return json.loads(json.dumps(record).replace(str(self.work), "WORK"))


def code_digest(checkout: Path) -> str:
    """A digest of all files that a run may read: the package, conf/, scripts/ and train.py."""
    digest = hashlib.sha256()
    files = [
        checkout / "train.py",
        *(path for name in ("clipzoo", "conf", "scripts") for path in (checkout / name).rglob("*")),
    ]
    for path in sorted(files):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(checkout)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def environment() -> dict[str, str]:
    """What besides the code decides the last bits: the processor and the versions of packages."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = {"processor": f"{model[1] if model else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"}
    for package in ("torch", "torchvision", "numpy", "pillow", "simplejpeg", "timm", "open_clip_torch"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def flat_configuration(checkout: Path, name: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """The resolved configuration and the axes of a search by dotted keys, composed by Hydra from conf/ alone."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import InterpolationToMissingValueError

    with initialize_config_dir(str(checkout / "conf"), version_base="1.3"):
        config = compose(name, list(overrides), return_hydra_config=True)
    axes = OmegaConf.to_container(config.hydra.sweeper).get("params")
    with open_dict(config):
        del config.hydra
    try:
        plain = OmegaConf.to_container(config, resolve=True)
    except InterpolationToMissingValueError:  # the name of a model that the user must give
        plain = OmegaConf.to_container(config)
    return dict(results.leaves({**plain, "sweep": axes}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the repository whose code is recorded")
    parser.add_argument("output", type=Path, help="folder of record.json")
    parser.add_argument("--stored", type=Path, help="the folder that stored.py made")
    parser.add_argument("--only", default="", help="regular expression searched in the keys of cases")
    parts = f"comma-separated, of {', '.join((*PARTS, *OPTIONAL))}"
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS, help=parts)
    options = parser.parse_args()
    if unknown := set(options.parts) - {*PARTS, *OPTIONAL}:
        parser.error(f"--parts has no {', '.join(sorted(unknown))}: choose of {', '.join((*PARTS, *OPTIONAL))}")
    if set(options.parts) & {"pages", "lines"} and options.stored is None:
        parser.error("the parts pages and lines need --stored")
    return options


if __name__ == "__main__":
    sys.exit(main())
