"""Programs and the library of one checkout, run in a working directory; what they compute as plain values."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.unchanged import library, processes, results
from tests.unchanged.cases import EVALUATED, Case
from tests.unchanged.changed import translated

KILL_AFTER = 8
"""The step after which a resumed run is killed."""
ATTEMPTS = 10
"""To kill a run before it is finished."""


class Checkout:
    """path: the repository. work: the working directory of its programs, which holds the inputs and the runs."""

    def __init__(self, path: Path, work: Path) -> None:
        self.path, self.work = path, work
        self.keys = configuration_keys(path)

    def command(self, name: str, *arguments: str, key: str) -> processes.Program:
        """Start `clipzoo NAME ARGUMENTS`; overrides may have the reference's keys. key: of the case."""
        own = [translated(argument, self.keys) for argument in arguments]
        return processes.start(self.path, "clipzoo", [name, *own], self.work, self.work / "logs" / key)

    def train(self, case: Case) -> dict[str, Any]:
        """One training: command, exit codes, error message and results. A run that exists is continued."""
        if case.first and self.start(Case(case.key, case.first)).wait() != [0]:
            raise RuntimeError(f"the first run of {case.key} failed")
        program = self.start(case)
        codes = program.wait()
        record: dict[str, Any] = {"command": " ".join(case.overrides), "exit": codes}
        if codes != [0] * case.ranks:
            record["message"] = error_message(program.output)
        return {**record, "runs": [results.read(run) for run in self.runs(case)]}

    def start(self, case: Case) -> processes.Program:
        """Start train.py on a case."""
        overrides = [*(translated(line, self.keys) for line in case.overrides), f"runs=runs/{case.key}"]
        log = self.work / "logs" / case.key
        return processes.start(self.path, "train.py", overrides, self.work, log, case.ranks)

    def kill(self, case: Case) -> None:
        """Start a case and kill it once step KILL_AFTER is logged; again when it was finished before the signal.

        Raises:
            RuntimeError: it was always finished before.
        """
        for _ in range(ATTEMPTS):
            self.remove(case)
            program = self.start(case)
            while program.running:
                if any(results.last_step(run) >= KILL_AFTER for run in self.runs(case)):
                    program.kill()
                time.sleep(0.002)
            if program.wait() != [0] * case.ranks:
                return
        raise RuntimeError(f"{case.key} could not be killed before its end in {ATTEMPTS} attempts")

    def evaluate(self, run: Path) -> dict[str, Any]:
        """`clipzoo evaluate` on a run, with other settings than the training's own evaluation."""
        settings = [*EVALUATED, "eval.interpolation=bilinear", "eval.probe_validation=0.3", "device=cpu"]
        overrides = [f"run={run.relative_to(self.work)}", "eval=none", *settings]
        program = self.command("evaluate", *overrides, key=f"evaluate/{run.name}")
        result: dict[str, Any] = {"exit": program.wait()}
        if result["exit"] != [0]:
            result["message"] = error_message(program.output)
        return {**result, **results.metrics(run), "evaluation": results.evaluation(run / "evaluation")}

    def load(self, run: Path) -> dict[str, Any]:
        """Outputs of the model that clipzoo.load returns for a run."""
        return self.call(library.outputs, str(run))

    def call(self, function: Any, *arguments: Any) -> Any:
        """`function(*arguments)` in a process where `import clipzoo` imports this checkout."""
        return processes.call(self.path, function, *arguments, answer=self.work / f"answer.{os.getpid()}.json")

    def study(self, name: str, settings: str) -> dict[str, Any]:
        """The numbers of a study's result.json, its tables and the page."""
        folder = self.work / "studies" / name
        program = self.command(
            "studies", f"study={name}", f"folder=studies/{name}", *settings.split(), key=f"studies/{name}"
        )
        result = {"exit": program.wait(), "numbers": results.numbers(folder / name / "result.json")}
        if not result["numbers"]:
            return {**result, "message": error_message(program.output)}
        pages = results.pages(folder, leave_out={"result.json"})
        return {**result, "pages": {path: results.without_timings(page) for path, page in pages.items()}}

    def demo(self) -> dict[str, Any]:
        """The demo's results on two threads, by the commands of `make demo`."""
        environment = {**os.environ, "PYTHONPATH": str(self.path), "OMP_NUM_THREADS": "2"}
        for arguments in (["world"], ["train", "experiment=demo/clip"]):
            subprocess.run(
                [sys.executable, "-m", "clipzoo.cli", *arguments], cwd=self.work, env=environment, check=True
            )
        return results.read(self.work / "runs" / "demo")

    def runs(self, case: Case) -> list[Path]:
        """The run directories of a case: one, or none when it did not start."""
        return sorted(path.parent for path in (self.work / "runs" / case.key).glob("**/config.yaml"))

    def remove(self, case: Case) -> None:
        shutil.rmtree(self.work / "runs" / case.key, ignore_errors=True)


def configuration_keys(checkout: Path) -> set[str]:
    """The dotted keys of all options, without composing them."""
    keys = set()
    for option in (checkout / "conf").rglob("*.yaml"):
        parts = option.relative_to(checkout / "conf").parts
        group = "" if len(parts) == 1 else ".".join(parts[:-1]) + "."
        keys |= {group + key for key, _ in results.leaves(yaml.load(option.read_text(), yaml.CSafeLoader) or {})}
    return keys


def error_message(output: str) -> str:
    """The program's error message, or the last lines of its output."""
    lines = output.splitlines()
    first = next((index for index, line in enumerate(lines) if re.match(r"clipzoo: ", line)), max(0, len(lines) - 5))
    return "\n".join(lines[first:])
