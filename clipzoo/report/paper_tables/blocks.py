"""A filled table of a paper as tables for the page: numbers, missing rows, remarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clipzoo.report.paper_tables.filled import FilledRow, FilledTable, Measurement, SeedGroup
from clipzoo.report.paper_tables.published import PaperColumn, PaperNumber, not_measured
from clipzoo.report.paper_tables.significance import LEVEL
from clipzoo.report.table import Cell, Heading, Row, Table, text_table

MOST_COLUMNS = 9
"""Up to this number of columns one table holds all tasks; beyond, there is a table for each task."""
CSV_COLUMNS = (
    *("table", "pretrain_data", "model", "row", "experiment", "task", "column", "published", "published_std", "state"),
    *("ours", "ours_std", "runs", "difference", "p_value"),
)


def blocks(filled: FilledTable) -> list[Table]:
    """Tables of published numbers, ours, their difference and variants; titled by task if there are several."""
    columns = filled.table.columns
    tasks = list(dict.fromkeys(column.heading for column in columns))
    if len(tasks) == 1 or len(columns) <= MOST_COLUMNS:
        labels = [f"{column.heading}: {column.label}" if len(tasks) > 1 else column.label for column in columns]
        return [_block(filled, "", columns, labels)]
    by_task = {task: [column for column in columns if column.heading == task] for task in tasks}
    return [_block(filled, task, part, [column.label for column in part]) for task, part in by_task.items()]


def missing(filled: FilledTable) -> Table:
    """Rows without runs, with command and cost, and rows whose runs were evaluated on none of the columns."""
    rows: list[list[str | Cell]] = []
    for row in filled.rows:
        place: list[str | Cell] = [row.row.pretrain, row.row.model]
        if row.ours is None:
            command = row.experiment.command if row.experiment else ""
            cost = row.experiment.cost if row.experiment else row.reason or "no experiment"
            rows.append([*place, Cell(command, code=True), cost])
        elif not row.ours.measured(filled.table.columns):
            command = f"clipzoo evaluate run={row.ours.runs[0].run.folder} eval={filled.table.paper}"
            rows.append([*place, Cell(command, code=True), "evaluation of a trained run"])
    return text_table(["after", "model", "command", "estimated cost"], rows, left=4)


def remarks(filled: FilledTable) -> list[str]:
    """Sentences below the table."""
    table, lines = filled.table, []
    if table.note:
        lines.append(table.note)
    if table.without_numbers:
        lines.append(f"No published numbers: {table.without_numbers}.")
    for column in table.columns:
        # The mean over several datasets is empty too; the columns of the datasets say why.
        if len({(key.task, key.dataset) for key in column.keys}) == 1 and (reason := not_measured(column.keys[0])):
            lines.append(f"{column.label}, {column.heading}: not measured; {reason}.")
    for row in filled.rows:
        lines += _row_remarks(row)
    if tests := [f"{row.row.model}, {column.label}: p = {p:.3f}" for row, column, p in filled.tested()]:
        lines.append(
            "* differs at 5 % from the baseline of its pretraining dataset (two-sided unpaired Wilcoxon test over "
            f"seeds): {'; '.join(tests)}"
        )
    return lines


def _row_remarks(row: FilledRow) -> Iterator[str]:
    name = f"{row.row.pretrain}, {row.row.model}"
    if row.selected:
        yield f"{name}: {row.selected}."
    for other in dict.fromkeys(match.run.row for match in (row.ours.runs if row.ours else ())):
        if other != row.row.name:
            yield f"{name}: includes runs of {other}, whose configuration is the same."


def cells(filled: FilledTable) -> Iterator[list[str]]:
    """Lines of the CSV: a line per cell of a row, with runs (state "row") or without ("missing"), and per variant."""
    for row in filled.rows:
        for column in filled.table.columns:
            yield from _csv_cells(filled, row, column)


def csv_numbers(ours: Measurement) -> list[str]:
    return [csv_number(ours.mean), csv_number(ours.deviation), str(len(ours.values))]


def csv_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _csv_cells(filled: FilledTable, row: FilledRow, column: PaperColumn) -> Iterator[list[str]]:
    number, place = filled.number(row, column), row.row
    experiment = row.experiment.name if row.experiment else ""
    start = [filled.table.name, place.pretrain, place.model, place.name, experiment, column.heading, column.label]
    start += [number.printed, csv_number(number.deviation)] if number else ["", ""]
    if ours := row.measurement(column):
        comparison = [csv_number(filled.difference(row, column)), csv_number(filled.p_value(row, column))]
        yield [*start, "row", *csv_numbers(ours), *comparison]
    elif number:
        yield [*start, "missing", "", "", "", "", ""]
    for group in row.variants:
        if variant := group.variant(column):
            yield [*start, f"variant: {group.label}", *csv_numbers(variant), "", ""]


def _block(filled: FilledTable, title: str, columns: Sequence[PaperColumn], labels: Sequence[str]) -> Table:
    names = [Heading(label, "left") for label in ("after", "model", "")]
    values = [Heading(label, wrap=True) for label in labels]
    rows = [row for filled_row in filled.rows for row in _rows(filled, filled_row, columns)]
    return Table((*names, *values), tuple(rows), title)


def _rows(filled: FilledTable, row: FilledRow, columns: Sequence[PaperColumn]) -> Iterator[Row]:
    published = [_published(filled.number(row, column)) for column in columns]
    yield _row("published", "published", published, row.row.pretrain, row.row.model)
    if row.ours and row.ours.measured(columns):
        yield _row("ours", f"ours, {row.ours.seeds}", [_ours(filled, row, column) for column in columns])
        changes = [_difference(filled, row, column) for column in columns]
        if any(change.text for change in changes):
            yield _row("difference", "difference", changes)
    for group in row.variants:
        numbers = [_variant(filled, group, column) for column in columns]
        if any(number.text for number in numbers):
            yield _row("variant", f"variant: {group.label}, {group.seeds}", numbers)


def _row(kind: str, name: str, numbers: Sequence[Cell], pretrain: str = "", model: str = "") -> Row:
    return Row((Cell(pretrain), Cell(model), Cell(name, mark="wrap what"), *numbers), kind, starts=bool(model))


def _published(number: PaperNumber | None) -> Cell:
    if number is None:
        return Cell("")
    return Cell(number.printed + (f" ± {number.deviation:.2f}" if number.deviation is not None else ""))


def _ours(filled: FilledTable, row: FilledRow, column: PaperColumn) -> Cell:
    """Measurement with the paper's number of decimals; * if it differs from the baseline."""
    ours, p_value = row.measurement(column), filled.p_value(row, column)
    star = "*" if p_value is not None and p_value < LEVEL else ""
    return Cell("" if ours is None else ours.text(filled.table.digits(column)) + star)


def _difference(filled: FilledTable, row: FilledRow, column: PaperColumn) -> Cell:
    """Signed difference; zero after rounding has no sign."""
    change, digits = filled.difference(row, column), filled.table.digits(column)
    if change is None:
        return Cell("")
    rounded = round(change, digits)
    if not rounded:
        return Cell(f"{0:.{digits}f}")
    return Cell(f"{change:+.{digits}f}", mark="up" if rounded > 0 else "down")


def _variant(filled: FilledTable, group: SeedGroup, column: PaperColumn) -> Cell:
    number = group.variant(column)
    return Cell(number.text(filled.table.digits(column)) if number else "")
