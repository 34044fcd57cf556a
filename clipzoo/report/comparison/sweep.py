"""Results of a sweep: seeds averaged, the best point, a table and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from clipzoo import io
from clipzoo.errors import ConfigError
from clipzoo.io.text import save_figure
from clipzoo.report.table import Cell, Heading, Row, Table
from clipzoo.runs.directory import is_finished
from clipzoo.runs.metric_key import written
from clipzoo.runs.record import RunRecord
from clipzoo.runs.sweep import Point
from clipzoo.runs.training_log import TrainingLog

LOSS = "loss"
"""Name of the last training loss among the metrics, for runs without evaluation."""


@dataclass(frozen=True)
class SweepRow:
    """Points that differ in their seed alone.

    swept: values of the swept keys. values: the metric of the finished points. points: number of points, finished or
    not.
    """

    swept: Mapping[str, str]
    values: tuple[float, ...]
    points: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation over seeds; 0 for a single seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def text(self) -> str:
        if not self.values:
            return "-"
        return f"{self.mean:.4g}" + (f" ± {self.deviation:.2g}" if len(self.values) > 1 else "")


def sweep_rows(points: Sequence[Point], metric: str) -> list[SweepRow]:
    """The metric of each combination of swept values, in the order of the command line."""
    values: dict[tuple[tuple[str, str], ...], list[float | None]] = {}
    for point in points:
        swept = tuple((key, value) for key, value in point.swept.items() if key != "seed")
        values.setdefault(swept, []).append(_value(point.folder, metric))
    return [
        SweepRow(dict(swept), tuple(value for value in results if value is not None), len(results))
        for swept, results in values.items()
    ]


def best(rows: Sequence[SweepRow], lowest: bool = False) -> SweepRow:
    """The row with the highest (or lowest) mean among those with a finished point."""
    finished = [row for row in rows if row.values]
    if not finished:
        raise ConfigError("no point of the sweep is finished")
    return (min if lowest else max)(finished, key=lambda row: row.mean)


def sweep_table(rows: Sequence[SweepRow], metric: str, lowest: bool = False) -> Table:
    """Swept values and the metric, the best row in bold."""
    keys, best_row = list(rows[0].swept), best(rows, lowest)
    headings = [*(Heading(key, "left") for key in keys), Heading(metric), Heading("runs")]

    def cells(row: SweepRow) -> tuple[Cell, ...]:
        finished = len(row.values)
        runs = f"{finished}" if finished == row.points else f"{finished} of {row.points}"
        return tuple(Cell(text, bold=row is best_row) for text in (*row.swept.values(), row.text, runs))

    return Table(tuple(headings), tuple(Row(cells(row)) for row in rows))


def sweep_plot(rows: Sequence[SweepRow], metric: str, path: Path, lowest: bool = False) -> None:
    """Save a plot of the metric over the first swept key, a line for each combination of the others."""
    best_row = best(rows, lowest)
    first, *others = list(rows[0].swept) or ["seed"]
    labels = list(dict.fromkeys(row.swept.get(first, "") for row in rows))
    place = _places(labels)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for values in dict.fromkeys(tuple(row.swept[key] for key in others) for row in rows):
        line = [row for row in rows if row.values and tuple(row.swept[key] for key in others) == values]
        line.sort(key=lambda row: place[row.swept.get(first, "")])
        name = ", ".join(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in zip(others, values, strict=True))
        x = [place[row.swept.get(first, "")] for row in line]
        axes.errorbar(x, [row.mean for row in line], [row.deviation for row in line], marker="o", capsize=3, label=name)
    star = place[best_row.swept.get(first, "")], best_row.mean
    axes.plot(*star, marker="*", markersize=18, color="black", linestyle="none", label=f"best: {best_row.mean:.4g}")
    if set(place.values()) == set(range(len(labels))):
        axes.set_xticks(range(len(labels)), labels)
    elif min(place.values()) > 0 and max(place.values()) > 30 * min(place.values()):
        axes.set_xscale("log")
    axes.set_xlabel(first)
    axes.set_ylabel(metric)
    axes.legend(frameon=False)
    save_figure(figure, path, dpi=150)


def _places(labels: Sequence[str]) -> dict[str, float]:
    """Positions on the axis: numbers at their value, words in order."""
    try:
        return {label: float(label) for label in labels}
    except ValueError:
        return {label: float(index) for index, label in enumerate(labels)}


def _value(folder: Path, metric: str) -> float | None:
    """The metric of a finished run; None for an unfinished one, and with a warning for one with damaged files."""
    if not is_finished(folder):
        return None
    damage = io.DamageLog()
    if metric == LOSS:
        log = damage.read(partial(TrainingLog.read, folder), TrainingLog((), ()))
        return next((float(line[LOSS]) for line in reversed(log.training) if LOSS in line), None)
    record = damage.read(partial(RunRecord.read, folder), None)
    if record is None:
        return None
    metrics = written(record.metrics)
    if metric not in metrics:
        raise ConfigError(f"{folder} has no metric {metric} (it has: {', '.join([*sorted(metrics), LOSS])})")
    return metrics[metric]
