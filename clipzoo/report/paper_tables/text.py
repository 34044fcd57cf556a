"""Filled tables as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from clipzoo.report.comparison.scales import Compared, Comparison
from clipzoo.report.paper_tables.experiments import experiments
from clipzoo.report.paper_tables.lines import Block, blocks, missing, remarks
from clipzoo.report.paper_tables.published import Column
from clipzoo.report.paper_tables.tables import Entry, Filled, described, variant_value

CSV_COLUMNS = (
    *("table", "pretrain_data", "model", "row", "experiment", "task", "column", "published", "published_std", "state"),
    *("ours", "ours_std", "runs", "difference", "p_value"),
)


def markdown(filled: Filled) -> str:
    parts = [f"## {filled.table.heading}"]
    for block in blocks(filled):
        if block.heading:
            parts.append(f"### {block.heading[0].upper()}{block.heading[1:]}")
        rows = [[line.after, line.model, line.what, *line.cells] for line in block.lines]
        parts.append(aligned(["after", "model", "", *block.labels], rows, left=3))
    if said := remarks(filled):
        parts.append("\n".join(f"- {each}" for each in said))
    if lacking := missing(filled):
        rows = [[each.after, each.model, f"`{each.command}`" if each.command else "", each.cost] for each in lacking]
        parts.append("Missing:\n\n" + aligned(["after", "model", "command", "estimated cost"], rows, left=4))
    return "\n\n".join(parts) + "\n"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A Markdown table: so many columns to the left, the others to the right."""
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def compared_rows(comparison: Comparison, columns: Sequence[Column]) -> list[list[str]]:
    """model, paper, and a cell a column; chance, where it is known, comes last."""
    rows = [
        [row.named, row.paper, *(str(row.group.ours(column) or "") for column in columns)] for row in comparison.rows
    ]
    chance = [column.value(comparison.chance) for column in columns]
    if any(chance):
        rows.append(["chance", "", *("" if value is None else f"{value:.1f}" for value in chance)])
    return rows


def compared_latex(comparison: Comparison) -> str:
    """A booktabs table a task."""
    return "\n".join(_compared_latex(comparison, task, columns) for task, columns in comparison.columns.items())


def _compared_latex(comparison: Comparison, task: str, columns: Sequence[Column]) -> str:
    head = " & ".join(["Model", "Paper", *(_escaped(each.label) for each in columns)])
    lines = ["\\begin{table}", "\\centering", "\\small"]
    lines += [f"\\caption{{{_escaped(f'{task}, %, scale={comparison.scale}')}}}"]
    lines += [f"\\begin{{tabular}}{{ll{'r' * len(columns)}}}", "\\toprule", f"{head} \\\\", "\\midrule"]
    for row in compared_rows(comparison, columns):
        lines.append(" & ".join(_escaped(each) for each in row) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


def comma_separated(tables: Sequence[Filled], beside: Sequence[Comparison]) -> str:
    """Tidy: a line for each cell of a row, with runs (state "row") or without ("missing"), and of each variant.

    Runs at another scale come first, each as a variant in the table "scale=<name>".
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for comparison in beside:
        for row in comparison.rows:
            writer.writerows(_compared_cells(comparison, row))
    for filled in tables:
        for entry in filled.entries:
            for column in filled.table.columns:
                writer.writerows(_cell(filled, entry, column))
    return text.getvalue()


def _compared_cells(comparison: Comparison, row: Compared) -> Iterator[list[str]]:
    first = row.group.runs[0]
    _, pretrain, model = first.row.split("/", 2)
    experiment = experiments()[first.row].name
    for column in [each for columns in comparison.columns.values() for each in columns]:
        if ours := row.group.ours(column):
            place = [f"scale={comparison.scale}", pretrain, model, first.row, experiment, column.heading, column.label]
            numbers = [_plain(ours.mean), _plain(ours.deviation), str(len(ours.values))]
            yield [*place, "", "", f"variant: {described(first)}", *numbers, "", ""]


def _cell(filled: Filled, entry: Entry, column: Column) -> Iterator[list[str]]:
    number, row = filled.number(entry, column), entry.row
    experiment = entry.experiment.name if entry.experiment else ""
    place = [filled.table.name, row.pretrain, row.model, row.name, experiment, column.heading, column.label]
    place += [number.printed, _plain(number.deviation)] if number else ["", ""]
    ours = entry.ours and entry.ours.ours(column)
    if ours:
        against = [_plain(filled.difference(entry, column)), _plain(filled.p_value(entry, column))]
        yield [*place, "row", _plain(ours.mean), _plain(ours.deviation), str(len(ours.values)), *against]
    elif number:
        yield [*place, "missing", "", "", "", "", ""]
    for group in entry.variants:
        if ours := variant_value(group, column):
            numbers = [_plain(ours.mean), _plain(ours.deviation), str(len(ours.values))]
            yield [*place, f"variant: {group.label}", *numbers, "", ""]


def latex(filled: Filled) -> str:
    """A booktabs table a block."""
    return "\n".join(_latex_block(filled, block) for block in blocks(filled))


def _latex_block(filled: Filled, block: Block) -> str:
    caption = filled.table.heading + (f" ({block.heading})" if block.heading else "")
    head = " & ".join(["After", "Model", "", *(f"\\rotatebox{{90}}{{{_escaped(each)}}}" for each in block.labels)])
    lines = ["\\begin{table}", "\\centering", "\\small", f"\\caption{{{_escaped(caption)}}}"]
    lines += [f"\\begin{{tabular}}{{lll{'r' * len(block.labels)}}}", "\\toprule", f"{head} \\\\"]
    for line in block.lines:
        if line.model:
            lines.append("\\midrule")
        lines.append(" & ".join(_escaped(each) for each in (line.after, line.model, line.what, *line.cells)) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


def _escaped(text: str) -> str:
    for character in "&%#_":
        text = text.replace(character, f"\\{character}")
    return text.replace("±", "$\\pm$")


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
