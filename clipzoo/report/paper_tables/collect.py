"""Finished runs, and the rows of the papers' tables that they reproduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.config.groups import options
from clipzoo.errors import ConfigError
from clipzoo.report.paper_tables.experiments import (
    Differences,
    axes,
    differences,
    expected_pairs,
    experiments,
    protocol_differences,
)
from clipzoo.report.paper_tables.published import Metrics, search_of
from clipzoo.runs.directory import config_of, is_finished
from clipzoo.runs.identity import flat
from clipzoo.runs.metric_key import MetricKey
from clipzoo.runs.record import RunRecord
from clipzoo.runs.training_log import TrainingLog

PAPER = "paper"
"""The scale of the papers' own size."""


@dataclass(frozen=True)
class Run:
    """A finished run directory, its configuration and its record. damage: names the files that cannot be read."""

    folder: Path
    plain: Mapping[str, Any]
    record: RunRecord
    damage: io.DamageLog = field(default_factory=io.DamageLog, compare=False)

    @cached_property
    def log(self) -> TrainingLog:
        """The training log; empty if it cannot be read."""
        return self.damage.read(partial(TrainingLog.read, self.folder), TrainingLog((), ()))

    @property
    def row(self) -> str | None:
        return self.plain.get("row")

    @property
    def seed(self) -> int:
        return self.plain["seed"]

    @cached_property
    def metrics(self) -> Metrics:
        """Results of the evaluation, and costs of the training under the task "training"."""
        costs = {name: value for name, value in self.record.training.items() if isinstance(value, int | float)}
        epochs = self.plain.get("trainer", {}).get("epochs")
        if epochs and "seconds" in costs:
            costs["seconds_per_epoch"] = costs["seconds"] / epochs
        return {**self.record.metrics, **{MetricKey("training", "", "", name): value for name, value in costs.items()}}

    @property
    def scale(self) -> str:
        """The scale of the command line; PAPER without one, or with one that does not exist."""
        chosen = [text.split("=", 1)[1] for text in self.record.overrides if text.startswith("scale=")]
        return chosen[-1] if chosen and chosen[-1] in options("scale") else PAPER

    @property
    def pairs(self) -> int | None:
        """Number of training pairs, from steps, global batch size and epochs."""
        trainer, steps = self.plain["trainer"], self.record.training.get("steps")
        if steps is None or trainer.get("epochs") is None:
            return None
        return round(float(steps) * trainer["global_batch"] / trainer["epochs"])


@dataclass(frozen=True)
class Match:
    """A run compared with a row's experiment.

    scale: of the experiment. differences: settings of the run that are neither the experiment's nor searched by the
    paper. point: the searched settings of the run; moved: those of them that differ from the experiment's.
    """

    run: Run
    row: str
    scale: str
    differences: Differences
    point: Mapping[str, Any]
    moved: Mapping[str, Any]

    @property
    def is_row(self) -> bool:
        """True if the run may stand for the row; any other run is a variant."""
        return self.scale == PAPER and not self.differences

    def describe(self, most: int = 4) -> str:
        """Settings that distinguish the run from its row. most: number of differences that are written out."""
        parts = [] if self.scale == PAPER else [f"scale={self.scale}"]
        parts += [f"{key}={shortened(value)}" for key, value in self.moved.items()]
        pairs = list(self.differences.items())
        parts += [f"{key} {shortened(seen)} for {shortened(expected)}" for key, (expected, seen) in pairs[:most]]
        if len(pairs) > most:
            parts.append(f"{len(pairs) - most} more")
        return ", ".join(parts)


def collect(root: Path, damage: io.DamageLog) -> tuple[list[Run], list[Path]]:
    """Return the finished runs below a folder, and the directories of unfinished ones.

    root: a run directory represents its run alone, without the shorter runs that it went on from.

    A run whose configuration or results are damaged is left out and named in `damage`, to which its runs add other
    files that they cannot read.
    """
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}")
    is_run = (root / "config.yaml").exists()
    folders = [root] if is_run else [path.parent for path in sorted(root.rglob("config.yaml"))]

    def read(folder: Path) -> Run:
        record = RunRecord.read(folder)
        return Run(folder, record.resolved(config_of(folder)), record, damage)

    finished = [damage.read(partial(read, folder), None) for folder in folders if is_finished(folder)]
    unfinished = [folder for folder in folders if not is_finished(folder)]
    return [run for run in finished if run is not None], unfinished


def matches(runs: Sequence[Run], row: str) -> list[Match]:
    """Match the runs that name this row, and runs of other rows whose configuration is the same."""
    experiment = experiments().get(row)
    if experiment is None:
        return []
    matched = []
    for run in runs:
        if run.row == row:
            matched.append(_match(run, row, experiment.name, run.scale))
        # Composing an experiment is slow: only rows of the same pretraining dataset can be equal.
        elif run.row is not None and run.scale == PAPER and run.row.split("/")[1:2] == row.split("/")[1:2]:
            other = _match(run, row, experiment.name, PAPER)
            if other.is_row:
                matched.append(other)
    return matched


def shortened(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _match(run: Run, row: str, experiment: str, scale: str) -> Match:
    different = differences(run.plain, experiment, scale)
    search = search_of(row)
    searched = axes(search.name) if search else {}
    values = flat(run.plain)
    point = {key: values.get(key) for key in searched}
    moved = {key: seen for key, (_, seen) in different.items() if seen in searched.get(key, ())}
    remaining = {key: pair for key, pair in different.items() if key not in moved}
    remaining |= protocol_differences(run.record.protocol, experiment, scale)
    low, high = expected_pairs(row)
    if scale == PAPER and run.pairs is not None and not low <= run.pairs <= high:
        remaining["training pairs"] = (f"{low:,} to {high:,}", f"{run.pairs:,}")
    return Match(run, row, scale, remaining, point, moved)
