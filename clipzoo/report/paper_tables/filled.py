"""A paper's table filled with runs beside its published numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from clipzoo.errors import number_of
from clipzoo.report.paper_tables.collect import PAPER, Match, Run, matches, shortened
from clipzoo.report.paper_tables.experiments import Experiment, axes, experiments
from clipzoo.report.paper_tables.published import (
    PaperColumn,
    PaperNumber,
    PaperRow,
    PaperTable,
    Search,
    layout,
    search_of,
)
from clipzoo.report.paper_tables.significance import rank_sum


@dataclass(frozen=True)
class Measurement:
    """Mean of runs in one column.

    deviation: standard deviation over seeds, or of a single run over draws of random features. values: one per seed.
    """

    mean: float
    deviation: float | None
    values: tuple[float, ...]

    def text(self, digits: int = 2) -> str:
        return f"{self.mean:.{digits}f}" + (f" ± {self.deviation:.{digits}f}" if self.deviation is not None else "")


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ in their seeds alone. label: settings that distinguish them from the row."""

    label: str
    runs: tuple[Match, ...]

    def measurement(self, column: PaperColumn) -> Measurement | None:
        """Mean over the runs that measured the column; of several runs with one seed the first counts."""
        by_seed: dict[int, tuple[float, Match]] = {}
        for match in self.runs:
            value = column.value(match.run.metrics)
            if value is not None:
                by_seed.setdefault(match.run.seed, (value, match))
        if not by_seed:
            return None
        values = tuple(value for value, _ in by_seed.values())
        if len(values) > 1:
            return Measurement(statistics.fmean(values), statistics.stdev(values), values)
        value, only = next(iter(by_seed.values()))
        return Measurement(value, column.deviation(only.run.metrics), values)

    def measured(self, columns: Sequence[PaperColumn]) -> bool:
        """True if any of the columns is measured."""
        return any(self.measurement(column) for column in columns)

    def variant(self, column: PaperColumn) -> Measurement | None:
        """A variant's measurement; costs at another scale say nothing about the row's and are left out."""
        if column.is_cost and any(match.scale != PAPER for match in self.runs):
            return None
        return self.measurement(column)

    @property
    def seeds(self) -> str:
        """The seeds in words."""
        seeds = sorted({match.run.seed for match in self.runs})
        return f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"


@dataclass(frozen=True)
class FilledRow:
    """A row of a paper's table with its runs.

    ours: the runs that stand for the row, if any. variants: other runs of it. selected: for the best of a search, how
    its point was selected. reason: why no experiment fills the row.
    """

    row: PaperRow
    experiment: Experiment | None
    ours: SeedGroup | None
    variants: tuple[SeedGroup, ...]
    selected: str | None
    reason: str | None

    def measurement(self, column: PaperColumn) -> Measurement | None:
        return self.ours.measurement(column) if self.ours else None


@dataclass(frozen=True)
class FilledTable:
    """A paper's table with the runs of each row."""

    table: PaperTable
    rows: tuple[FilledRow, ...]

    @property
    def measured(self) -> bool:
        """True if any run has a value in the table."""
        return any(
            row.measurement(column) or any(group.variant(column) for group in row.variants)
            for row in self.rows
            for column in self.table.columns
        )

    def number(self, row: FilledRow, column: PaperColumn) -> PaperNumber | None:
        return self.table.numbers.get((row.row, column))

    def difference(self, row: FilledRow, column: PaperColumn) -> float | None:
        """Measured minus published."""
        ours, published = row.measurement(column), self.number(row, column)
        return ours.mean - published.value if ours and published else None

    def p_value(self, row: FilledRow, column: PaperColumn) -> float | None:
        """Rank-sum test of our runs of the row against those of its baseline.

        None for the baseline itself, and unless both sides have several seeds.
        """
        baseline = self.table.baseline(row.row)
        if baseline == row.row:
            return None
        other = next(candidate for candidate in self.rows if candidate.row == baseline)
        first, second = other.measurement(column), row.measurement(column)
        if not first or not second or min(len(first.values), len(second.values)) < 2:
            return None
        return rank_sum(first.values, second.values)

    def tested(self) -> Iterator[tuple[FilledRow, PaperColumn, float]]:
        """All cells with a p-value."""
        for row in self.rows:
            for column in self.table.columns:
                if (p_value := self.p_value(row, column)) is not None:
                    yield row, column, p_value


def fill(table: PaperTable, runs: Sequence[Run]) -> FilledTable:
    """Put runs beside the published numbers of a table."""
    return FilledTable(table, tuple(_filled(row, runs) for row in table.rows))


def grouped(candidates: Sequence[Match]) -> list[SeedGroup]:
    """Group matches that differ in their seeds alone."""
    groups: dict[str, list[Match]] = {}
    for match in candidates:
        groups.setdefault(match.describe(), []).append(match)
    return [SeedGroup(label, tuple(group)) for label, group in groups.items()]


def _filled(row: PaperRow, runs: Sequence[Run]) -> FilledRow:
    candidates = matches(runs, row.name)
    ours, selected = _selected(row, [match for match in candidates if match.is_row])
    variants = tuple(grouped([match for match in candidates if not match.is_row]))
    reason = layout()["without_experiment"].get(row.name)
    return FilledRow(row, experiments().get(row.name), ours, variants, selected, reason)


def _selected(row: PaperRow, candidates: Sequence[Match]) -> tuple[SeedGroup | None, str | None]:
    """The runs that stand for the row; of a search's points, those of the best one by the paper's criterion."""
    search = search_of(row.name)
    if not candidates or search is None:
        return (SeedGroup("", tuple(candidates)), None) if candidates else (None, None)
    points: dict[str, list[Match]] = {}
    for match in candidates:
        points.setdefault(_point_name(match.point), []).append(match)
    groups = {name: SeedGroup(name, tuple(group)) for name, group in points.items()}
    scores = {name: score.mean for name, group in groups.items() if (score := group.measurement(search.select))}
    if len(points) == 1:
        name, how = next(iter(points)), "the only point run"
    elif scores:
        name = max(scores, key=lambda candidate: scores[candidate])
        how = f"the best of {number_of(len(scores), 'point')} by {search.by}"
    else:
        return None, f"no point of the search can be selected: {search.by} was not measured"
    return groups[name], f"{name}: {how}; {_searched(search)}"


def _searched(search: Search) -> str:
    if search.followed:
        return f"the paper took the best point of {search.followed}"
    return f"of {prod(len(values) for values in axes(search.name).values())} that the paper searched"


def _point_name(point: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={shortened(value)}" for key, value in point.items())
