"""Finished runs, and which row of the papers each of them is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipzoo.errors import ConfigError
from clipzoo.report.paper_tables.experiments import axes, differences, experiments, judged_otherwise, pairs_expected
from clipzoo.report.paper_tables.published import search_of
from clipzoo.runs.directory import config_of

PAPER = "paper"


@dataclass(frozen=True)
class Run:
    """A folder with config.yaml and results.json. metrics: of the evaluation, and of training as training/<name>."""

    folder: Path
    plain: Mapping[str, Any]
    results: Mapping[str, Any]
    metrics: Mapping[str, float]

    @property
    def row(self) -> str | None:
        return self.plain.get("row")

    @property
    def seed(self) -> int:
        return self.plain["seed"]

    @property
    def scale(self) -> str:
        chosen = [each.split("=", 1)[1] for each in self.results.get("overrides", []) if each.startswith("scale=")]
        return chosen[-1] if chosen else PAPER

    @property
    def pairs(self) -> int | None:
        """How many pairs it was trained on, as steps, batch and epochs tell."""
        trainer, steps = self.plain["trainer"], self.results.get("training", {}).get("steps")
        if steps is None or trainer.get("epochs") is None:
            return None
        return round(steps * trainer["global_batch"] / trainer["epochs"])


@dataclass(frozen=True)
class Match:
    """A run beside a row. scale: of the experiment it is compared with. differences: (expected, seen) by key.

    point: the values of the keys that the paper searched, for rows that are the best of several; moved: those of them
    that are not the experiment's.
    """

    run: Run
    row: str
    scale: str
    differences: Mapping[str, tuple[Any, Any]]
    point: Mapping[str, Any]
    moved: Mapping[str, Any]

    @property
    def is_row(self) -> bool:
        """Whether the run may stand for the row; any other is a variant."""
        return self.scale == PAPER and not self.differences


def collect(root: Path) -> tuple[list[Run], list[Path]]:
    """The finished runs below a folder, and the folders of unfinished ones."""
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}")
    finished, unfinished = [], []
    for path in sorted(root.rglob("config.yaml")):
        if (path.parent / "results.json").exists():
            finished.append(read(path.parent))
        else:
            unfinished.append(path.parent)
    return finished, unfinished


def read(folder: Path) -> Run:
    plain = config_of(folder)
    results = json.loads((folder / "results.json").read_text())
    training = {key: value for key, value in results.get("training", {}).items() if isinstance(value, int | float)}
    epochs = plain.get("trainer", {}).get("epochs")
    if epochs and "seconds" in training:
        training["seconds_per_epoch"] = training["seconds"] / epochs
    metrics = {**results.get("metrics", {}), **{f"training/{key}": value for key, value in training.items()}}
    return Run(folder, plain, results, metrics)


def matches(runs: Sequence[Run], row: str) -> list[Match]:
    """Every run that says it is this row, and every other whose configuration is the row's all the same."""
    experiment = experiments().get(row)
    if experiment is None:
        return []
    found = []
    for run in runs:
        if run.row == row:
            found.append(_match(run, row, experiment.name, run.scale))
        elif run.row is not None and run.scale == PAPER and _may_be(run, row):
            other = _match(run, row, experiment.name, PAPER)
            if other.is_row:
                found.append(other)
    return found


def _match(run: Run, row: str, experiment: str, scale: str) -> Match:
    different = differences(run.plain, experiment, scale)
    search = search_of(row)
    allowed = axes(search.name) if search else {}
    point = {key: _at(run.plain, key) for key in allowed}
    moved = {key: seen for key, (_, seen) in different.items() if seen in allowed.get(key, [])}
    kept = {key: pair for key, pair in different.items() if key not in moved}
    kept |= judged_otherwise(run.results.get("protocol", {}), experiment, scale)
    low, high = pairs_expected(row)
    if scale == PAPER and run.pairs is not None and not low <= run.pairs <= high:
        kept["training pairs"] = (f"{low:,} to {high:,}", f"{run.pairs:,}")
    return Match(run, row, scale, kept, point, moved)


def _may_be(run: Run, row: str) -> bool:
    """Rows of other papers and of other sets need not be composed to be refused."""
    assert run.row is not None
    return run.row.split("/")[1] == row.split("/")[1]


def _at(plain: Mapping[str, Any], key: str) -> Any:
    value: Any = plain
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
