"""A paper's table with our runs beside its numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from clipzoo.report.comparison.significance import rank_sum
from clipzoo.report.paper_tables.collect import PAPER, Match, Run, matches
from clipzoo.report.paper_tables.experiments import Experiment, axes, experiments
from clipzoo.report.paper_tables.published import HEADINGS, Column, Number, Row, Table, layout, search_of


@dataclass(frozen=True)
class Ours:
    """Mean of our runs in one column; deviation over seeds, or of one run over its draws. values: a run each."""

    mean: float
    deviation: float | None
    values: tuple[float, ...]

    def __str__(self) -> str:
        return self.text(2)

    def text(self, digits: int) -> str:
        return f"{self.mean:.{digits}f}" + (f" ± {self.deviation:.{digits}f}" if self.deviation is not None else "")


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone. label: what sets them apart from the row."""

    label: str
    runs: tuple[Match, ...]

    def ours(self, column: Column) -> Ours | None:
        """Over the runs that were judged on the column; of several with one seed, trained alike, the first counts."""
        found: dict[int, tuple[float, Match]] = {}
        for each in self.runs:
            value = column.value(each.run.metrics)
            if value is not None:
                found.setdefault(each.run.seed, (value, each))
        if not found:
            return None
        values = tuple(value for value, _ in found.values())
        if len(values) > 1:
            return Ours(statistics.fmean(values), statistics.stdev(values), values)
        value, only = next(iter(found.values()))
        return Ours(value, column.deviation(only.run.metrics), values)


@dataclass(frozen=True)
class Entry:
    """A row of the table. ours: the runs that stand for it, None where there are none; variants never stand for it.

    chosen: for the best of a search, how it was chosen. reason: why no experiment fills the row.
    """

    row: Row
    experiment: Experiment | None
    ours: Group | None
    variants: tuple[Group, ...]
    chosen: str | None
    reason: str | None


@dataclass(frozen=True)
class Filled:
    """A table, an entry a row."""

    table: Table
    entries: tuple[Entry, ...]

    @property
    def shown(self) -> bool:
        """Whether any run has a value in it."""
        cells = [(entry, column) for entry in self.entries for column in self.table.columns]
        return any(
            (entry.ours and entry.ours.ours(column)) or any(variant_value(each, column) for each in entry.variants)
            for entry, column in cells
        )

    def number(self, entry: Entry, column: Column) -> Number | None:
        return self.table.numbers.get((entry.row, column))

    def digits(self, column: Column) -> int:
        """Decimals that the paper prints in the column."""
        printed = [each.printed for (_, where), each in self.table.numbers.items() if where == column]
        return max((len(each.partition(".")[2]) for each in printed), default=2)

    def difference(self, entry: Entry, column: Column) -> float | None:
        """Ours minus published."""
        ours, published = entry.ours and entry.ours.ours(column), self.number(entry, column)
        return ours.mean - published.value if ours and published else None

    def baseline(self, entry: Entry) -> Entry:
        """What the row is tested against: as tables.yaml says, or else the first of its pretraining set."""
        stated = layout()["tables"][self.table.name].get("against", {}).get(f"{entry.row.pretrain}/{entry.row.model}")
        same = [each for each in self.entries if each.row.pretrain == entry.row.pretrain]
        return next((each for each in same if each.row.model == stated), same[0])

    def p_value(self, entry: Entry, column: Column) -> float | None:
        """Of the row against its baseline, our runs; None for the baseline itself and with a single seed."""
        other = self.baseline(entry)
        sides = [side.ours and side.ours.ours(column) for side in (other, entry)]
        if other is entry or not all(side and len(side.values) > 1 for side in sides):
            return None
        first, second = (side.values for side in sides if side)
        return rank_sum(first, second)


def fill(table: Table, runs: Sequence[Run]) -> Filled:
    """Join a table with the runs that were found."""
    return Filled(table, tuple(_entry(row, runs) for row in table.rows))


def variant_value(variant: Group, column: Column) -> Ours | None:
    """A variant's number; costs at another scale say nothing of the row's."""
    if column.heading == HEADINGS["cost"] and any(each.scale != PAPER for each in variant.runs):
        return None
    return variant.ours(column)


def grouped(found: Sequence[Match]) -> list[Group]:
    """Matches that differ in seeds alone stand together."""
    groups: dict[str, list[Match]] = {}
    for match in found:
        groups.setdefault(described(match), []).append(match)
    return [Group(label, tuple(group)) for label, group in groups.items()]


def described(match: Match, most: int = 4) -> str:
    """What sets a run apart from its row: the scale, and values that are neither the experiment's nor searched."""
    parts = [] if match.scale == PAPER else [f"scale={match.scale}"]
    parts += [f"{key}={_short(value)}" for key, value in match.moved.items()]
    different = list(match.differences.items())
    parts += [f"{key} {_short(seen)} for {_short(expected)}" for key, (expected, seen) in different[:most]]
    if len(different) > most:
        parts.append(f"{len(different) - most} more")
    return ", ".join(parts)


def _entry(row: Row, runs: Sequence[Run]) -> Entry:
    found = matches(runs, row.name)
    ours, chosen = _chosen(row, [each for each in found if each.is_row])
    variants = tuple(grouped([each for each in found if not each.is_row]))
    reason = layout()["without_experiment"].get(row.name)
    return Entry(row, experiments().get(row.name), ours, variants, chosen, reason)


def _chosen(row: Row, found: Sequence[Match]) -> tuple[Group | None, str | None]:
    """The runs that stand for the row: of a search's points the one that is best as the paper chose."""
    search = search_of(row.name)
    if not found or search is None:
        return (Group("", tuple(found)), None) if found else (None, None)
    points: dict[str, list[Match]] = {}
    for match in found:
        points.setdefault(_named(match.point), []).append(match)
    judged: dict[str, float] = {}
    for name, group in points.items():
        value = Group(name, tuple(group)).ours(search.select)
        if value is not None:
            judged[name] = value.mean
    total = prod(len(values) for values in axes(search.name).values())
    searched = f"of {total} that the paper searched"
    if search.followed:
        searched = f"the paper took the best point of {search.followed}"
    if len(points) == 1:
        name, how = next(iter(points)), "the only point run"
    elif judged:
        name = max(judged, key=lambda each: judged[each])
        how = f"the best of {len(judged)} points by {search.by}"
    else:
        return None, f"{len(points)} points were run, but none can be chosen: {search.by} was not measured"
    return Group(name, tuple(points[name])), f"{name}: {how}; {searched}"


def _named(point: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={_short(value)}" for key, value in point.items())


def _short(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
