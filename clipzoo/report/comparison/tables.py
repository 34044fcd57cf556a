"""A comparison as tables for the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from clipzoo.report.comparison.scales import COSTS, ComparedRow, Comparison, Cost
from clipzoo.report.paper_tables.blocks import csv_numbers
from clipzoo.report.paper_tables.experiments import experiments
from clipzoo.report.paper_tables.published import PaperColumn
from clipzoo.report.table import Cell, Heading, Row, Table


def overview(comparison: Comparison) -> Table:
    """All tasks and costs in one table; linear probes by their mean."""
    probes = _probes(comparison)
    columns = {task: parts[:1] if task in probes else parts for task, parts in comparison.columns.items()}
    return _table(comparison, columns, COSTS)


def probe_details(comparison: Comparison) -> Table | None:
    """Linear probes by dataset; None if the overview has them all."""
    probes = _probes(comparison)
    if all(len(columns) == 1 for columns in probes.values()):
        return None
    return _table(comparison, probes, ())


def task_tables(comparison: Comparison) -> list[Table]:
    """A table per task and one of costs, titled."""
    tables = [
        _table(comparison, {task: columns}, (), f"{task}, %") for task, columns in comparison.columns.items()
    ]  # fmt: skip
    return [*tables, _table(comparison, {}, COSTS, "Training")]


def cells(comparison: Comparison) -> Iterator[list[str]]:
    """Lines of the CSV, each row a variant in the table "scale=<name>"; columns as in the papers' tables."""
    for row in comparison.rows:
        match = row.group.runs[0]
        if match.row:
            _, pretrain, model = match.row.split("/", 2)
            start = [f"scale={comparison.scale}", pretrain, model, match.row, experiments()[match.row].name]
        else:
            start = ["runs", "", row.label, "", ""]
        for column in [column for columns in comparison.columns.values() for column in columns]:
            if ours := row.group.measurement(column):
                place = [*start, column.heading, column.label, "", "", f"variant: {match.describe()}"]
                yield [*place, *csv_numbers(ours), "", ""]


def _probes(comparison: Comparison) -> dict[str, Sequence[PaperColumn]]:
    return {task: columns for task, columns in comparison.columns.items() if task.startswith("linear probe")}


def _table(
    comparison: Comparison, tasks: Mapping[str, Sequence[PaperColumn]], costs: Sequence[Cost], title: str = ""
) -> Table:
    columns = [column for parts in tasks.values() for column in parts]
    of_papers = any(row.paper for row in comparison.rows)
    headings = (
        [Heading("model", "left"), Heading("paper", "left")] if of_papers else [Heading("run", "left", wrap=True)]
    )
    headings += [Heading(column.label, group=task) for task, parts in tasks.items() for column in parts]
    headings += [Heading(cost.label, group="training") for cost in costs]
    best = {column: _best(comparison.rows, column) for column in columns}
    rows = [
        Row(
            (
                Cell(row.label, note=row.note),
                *([Cell(row.paper)] if of_papers else []),
                *(_cell(row, column, best[column]) for column in columns),
                *(Cell(_cost(row.cost(cost))) for cost in costs),
            )
        )
        for row in comparison.rows
    ]
    chance = [column.value(comparison.chance) for column in columns]
    if any(chance):
        numbers = [Cell("" if value is None else f"{value:.1f}") for value in chance]
        first = [Cell("chance"), *([Cell("")] if of_papers else [])]
        rows.append(Row((*first, *numbers, *[Cell("")] * len(costs)), kind="published"))
    return Table(tuple(headings), tuple(rows), title)


def _cell(row: ComparedRow, column: PaperColumn, best: float | None) -> Cell:
    ours = row.group.measurement(column)
    marks = ["mean"] * (column.label == "mean") + ["best"] * (ours is not None and ours.mean == best)
    return Cell(ours.text() if ours else "", mark=" ".join(marks))


def _best(rows: Sequence[ComparedRow], column: PaperColumn) -> float | None:
    means = [ours.mean for row in rows if (ours := row.group.measurement(column))]
    return max(means) if len(means) > 1 else None


def _cost(value: float | None) -> str:
    return "" if value is None else format(value, ",.3g" if value < 100 else ",.0f")
