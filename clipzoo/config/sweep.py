"""Sweeps: which points a command line stands for, where their runs are, and what they came to."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from clipzoo.config.compose import compose
from clipzoo.config.identity import run_folder
from clipzoo.config.overrides import alternatives, read
from clipzoo.errors import ConfigError

LOSS = "loss"
"""Stands among the metrics for the last loss of training, for runs without evaluation."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep. swept: the keys with several values, and this point's value; overrides: its command line."""

    swept: Mapping[str, str]
    overrides: tuple[str, ...]

    @cached_property
    def folder(self) -> Path:
        """The run directory of this point."""
        experiments = [line.partition("=")[2] for line in self.overrides if line.startswith("experiment=")]
        return run_folder(compose(self.overrides), experiments[-1] if experiments else None)


def points(overrides: Sequence[str]) -> list[Point]:
    """Return every combination of the values `key=a,b,c`; the values of the last key change fastest."""
    choices: list[list[tuple[str, str | None]]] = []
    for override in map(read, overrides):
        key, lines = override.get_key_element(), alternatives(override)
        if lines is None:
            raise ConfigError(f"{override.input_line} is no list of values: give {key}=a,b,c or {key}=range(1,5)")
        if key == "name":
            raise ConfigError(
                f"{override.input_line} would give all points of the sweep one name: leave it out, "
                "and each run is named by a digest of its configuration"
            )
        choices.append([(line, key if override.is_sweep_override() else None) for line in lines])
    return [
        Point({key: line.partition("=")[2] for line, key in choice if key}, tuple(line for line, _ in choice))
        for choice in itertools.product(*choices)
    ]


def sweep_name(overrides: Sequence[str]) -> str:
    """Return one name for all points of a command line: the group of their runs in W&B."""
    return "sweep-" + hashlib.sha256("\n".join(sorted(overrides)).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Row:
    """Points that differ in their seed alone. values: the metric of those that are finished; points: of all."""

    swept: Mapping[str, str]
    values: tuple[float, ...]
    points: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """Over seeds, 0 where there is one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0


def rows(sweep: Sequence[Point], metric: str) -> list[Row]:
    """The metric of each combination of swept values, seeds put together, in the order of the command line."""
    found: dict[tuple[tuple[str, str], ...], list[float | None]] = {}
    for point in sweep:
        swept = tuple((key, value) for key, value in point.swept.items() if key != "seed")
        found.setdefault(swept, []).append(_value(point.folder, metric))
    return [
        Row(dict(swept), tuple(value for value in values if value is not None), len(values))
        for swept, values in found.items()
    ]


def best(found: Sequence[Row], lowest: bool = False) -> Row:
    """The row with the highest (or lowest) mean among those with a finished point."""
    finished = [row for row in found if row.values]
    if not finished:
        raise ConfigError("no point of the sweep is finished")
    return (min if lowest else max)(finished, key=lambda row: row.mean)


def table(found: Sequence[Row], metric: str, lowest: bool = False) -> str:
    """A Markdown table of swept values and the metric, the best row in bold."""
    keys, chosen = list(found[0].swept), best(found, lowest)
    lines = [f"| {' | '.join([*keys, metric, 'runs'])} |", f"| {'--- | ' * len(keys)}---: | ---: |"]
    for row in found:
        mark = "**" if row is chosen else ""
        value = f"{row.mean:.4g}" + (f" ± {row.deviation:.2g}" if len(row.values) > 1 else "") if row.values else "-"
        runs = f"{len(row.values)}" if len(row.values) == row.points else f"{len(row.values)} of {row.points}"
        lines.append("| " + " | ".join(f"{mark}{cell}{mark}" for cell in [*row.swept.values(), value, runs]) + " |")
    return "\n".join(lines)


def plot(found: Sequence[Row], metric: str, path: Path, lowest: bool = False) -> None:
    """The metric over the first swept key, a line for each combination of the others, as a PNG."""
    from matplotlib.figure import Figure

    chosen = best(found, lowest)
    first, *others = list(found[0].swept) or ["seed"]
    labels = list(dict.fromkeys(row.swept.get(first, "") for row in found))
    place = _places(labels)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for values in dict.fromkeys(tuple(row.swept[key] for key in others) for row in found):
        line = [row for row in found if row.values and tuple(row.swept[key] for key in others) == values]
        line.sort(key=lambda row: place[row.swept.get(first, "")])
        name = ", ".join(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in zip(others, values, strict=True))
        x = [place[row.swept.get(first, "")] for row in line]
        axes.errorbar(x, [row.mean for row in line], [row.deviation for row in line], marker="o", capsize=3, label=name)
    star = place[chosen.swept.get(first, "")], chosen.mean
    axes.plot(*star, marker="*", markersize=18, color="black", linestyle="none", label=f"best: {chosen.mean:.4g}")
    if set(place.values()) == set(range(len(labels))):
        axes.set_xticks(range(len(labels)), labels)
    elif min(place.values()) > 0 and max(place.values()) > 30 * min(place.values()):
        axes.set_xscale("log")
    axes.set_xlabel(first)
    axes.set_ylabel(metric)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _places(labels: Sequence[str]) -> dict[str, float]:
    """Where values stand on the axis: numbers at their value, words in a row."""
    try:
        return {label: float(label) for label in labels}
    except ValueError:
        return {label: float(index) for index, label in enumerate(labels)}


def _value(folder: Path, metric: str) -> float | None:
    """The metric of a finished run; None while it is not finished."""
    if not (folder / "results.json").exists():
        return None
    if metric == LOSS:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [float(line[LOSS]) for line in lines if LOSS in line][-1]
    metrics: dict[str, Any] = json.loads((folder / "results.json").read_text())["metrics"]
    if metric not in metrics:
        raise ConfigError(f"{folder} has no metric {metric} (it has: {', '.join([*sorted(metrics), LOSS])})")
    return float(metrics[metric])
