"""Filled tables and comparisons as parts of one HTML page that needs no other file."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from matplotlib.figure import Figure

from clipzoo.report.comparison.scales import COSTS, Compared, Comparison
from clipzoo.report.paper_tables.lines import Block, Line, blocks, missing, remarks
from clipzoo.report.paper_tables.published import Column
from clipzoo.report.paper_tables.tables import Filled

STYLE = """
:root { --ink: #24425c; --quiet: #6b7f90; --line: #dfe6ec; --good: #2e7d4f; --bad: #b5442f; }
body { font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; color: #1d2a35; max-width: 1400px; margin: 2.2rem auto;
  padding: 0 1.2rem; }
h1, h2, h3 { color: var(--ink); line-height: 1.25; } h1 { font-size: 1.7rem; margin-bottom: .3rem; }
h2 { font-size: 1.25rem; margin-top: 2.6rem; border-bottom: 2px solid var(--line); padding-bottom: .3rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; padding: 0; list-style: none; }
.cards li { border: 1px solid var(--line); border-radius: 8px; padding: .5rem .9rem; }
.cards b { display: block; font-size: 1.35rem; color: var(--ink); }
nav a { margin-right: .9rem; white-space: nowrap; } a { color: #2f6f9f; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: 12px; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .42rem; white-space: nowrap; text-align: right; }
th { vertical-align: bottom; color: var(--quiet); font-weight: 600; border-bottom: 1px solid var(--ink); }
th.group { text-align: center; border-bottom: 1px solid var(--line); white-space: normal; min-width: 4.6rem; }
.left { text-align: left; } .wrap { white-space: normal; }
td { vertical-align: top; } td.what { max-width: 15rem; min-width: 7rem; }
tr.first td { border-top: 1px solid var(--line); } tr.published td, tr.difference td { color: var(--quiet); }
tr.published.first td:nth-child(-n+2) { color: #1d2a35; font-weight: 600; }
tr.ours td { font-weight: 600; } tr.variant td { color: #8a6320; }
small { display: block; color: var(--quiet); font-size: 10.5px; line-height: 1.3; white-space: normal;
  max-width: 15rem; }
td.mean { background: #f3f6f9; } td.best { font-weight: 700; color: var(--ink); }
td.up { color: var(--good) !important; } td.down { color: var(--bad) !important; }
img { max-width: 100%; height: auto; margin: .5rem 0; }
code { background: #f3f6f9; border-radius: 4px; padding: .1rem .3rem; font-size: 12px; }
p.note, li.note { color: var(--quiet); font-size: 13.5px; } details { margin: .6rem 0; } summary { cursor: pointer; }
"""


def page(title: str, lead: Iterable[str], parts: Iterable[str]) -> str:
    """A whole document. lead: its first paragraphs."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = f"<h1>{escape(title)}</h1>\n" + "\n".join([*(f"<p>{escape(each)}</p>" for each in lead), *parts])
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def cards(facts: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<li><b>{escape(value)}</b>{escape(name)}</li>" for name, value in facts)
    return f'<ul class="cards">{items}</ul>'


def contents(titles: Sequence[tuple[str, str]]) -> str:
    """Links to sections, as (anchor, title)."""
    return "<nav>" + " ".join(f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title in titles) + "</nav>"


def picture(figure: Figure, description: str) -> str:
    """The figure inside the page."""
    data = io.BytesIO()
    figure.savefig(data, format="png")
    encoded = base64.b64encode(data.getvalue()).decode()
    return f'<img alt="{escape(description)}" src="data:image/png;base64,{encoded}">'


def filled_table(filled: Filled, pictures: Sequence[str]) -> str:
    """The section of one of a paper's tables."""
    parts = [f'<h2 id="{anchor(filled)}">{escape(filled.table.heading)}</h2>']
    for block in blocks(filled):
        if block.heading:
            parts.append(f"<h3>{escape(block.heading[0].upper() + block.heading[1:])}</h3>")
        parts.append(_block(block))
    parts += pictures
    parts += [f'<p class="note">{escape(each)}</p>' for each in remarks(filled)]
    if lacking := missing(filled):
        rows = [
            [escape(each.after), escape(each.model), f"<code>{escape(each.command)}</code>" if each.command else "",
             escape(each.cost)] for each in lacking
        ]  # fmt: skip
        table = plain_table(["after", "model", "command", "estimated cost"], rows)
        parts.append(f"<details open><summary>Missing: {len(lacking)} of {len(filled.entries)} rows</summary>")
        parts.append(f"{table}</details>")
    return "\n".join(parts)


def anchor(filled: Filled) -> str:
    return filled.table.name.replace("/", "-")


def compared_table(comparison: Comparison) -> str:
    """Rows beside each other, the best of each column in bold; probes by their mean, their sets in a table to open."""
    probes = {task: columns for task, columns in comparison.columns.items() if task.startswith("linear probe")}
    short = {task: columns[:1] if task in probes else columns for task, columns in comparison.columns.items()}
    table = _compared(comparison, short, COSTS)
    if all(len(columns) == 1 for columns in probes.values()):
        return table
    return f"{table}<details><summary>Linear probes by data set</summary>{_compared(comparison, probes, ())}</details>"


def _apart(row: Compared) -> str:
    """In small, what sets the runs apart, unless the label says it."""
    return f"<small>{escape(row.apart)}</small>" if row.apart and row.apart not in row.label else ""


def _compared(
    comparison: Comparison, tasks: Mapping[str, Sequence[Column]], costs: Sequence[tuple[str, str, float]]
) -> str:
    chance = comparison.chance
    columns = [column for found in tasks.values() for column in found]
    groups = "".join(f'<th class="group" colspan="{len(found)}">{escape(task)}</th>' for task, found in tasks.items())
    groups += f'<th class="group" colspan="{len(costs)}">training</th>' if costs else ""
    labels = "".join(
        f"<th>{escape(each)}</th>" for each in [*(each.label for each in columns), *(name for name, *_ in costs)]
    )
    best = {column: _best(comparison.rows, column) for column in columns}
    lines = []
    for row in comparison.rows:
        cells = f'<td class="left">{escape(row.label)}{_apart(row)}</td><td class="left">{escape(row.paper)}</td>'
        for column in columns:
            ours = row.group.ours(column)
            marks = ["mean"] * (column.label == "mean") + ["best"] * bool(ours and ours.mean == best[column])
            cells += f'<td class="{" ".join(marks)}">{escape(str(ours)) if ours else ""}</td>'
        for _, key, factor in costs:
            value = row.cost(key, factor)
            cells += f"<td>{'' if value is None else format(value, ',.3g' if value < 100 else ',.0f')}</td>"
        lines.append(f"<tr>{cells}</tr>")
    if any(column.value(chance) for column in columns):
        values = [column.value(chance) for column in columns]
        cells = "".join(f"<td>{'' if value is None else format(value, '.1f')}</td>" for value in values)
        lines.append(
            f'<tr class="published"><td class="left">chance</td><td></td>{cells}{"<td></td>" * len(costs)}</tr>'
        )
    head = f'<tr><th></th><th></th>{groups}</tr><tr><th class="left">model</th><th class="left">paper</th>{labels}</tr>'
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table></div>'


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """All to the left; cells are HTML already."""
    top = "".join(f'<th class="left">{escape(each)}</th>' for each in head)
    body = "".join(
        "<tr class='first'>" + "".join(f'<td class="left wrap">{each}</td>' for each in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _block(block: Block) -> str:
    head = "".join(f'<th class="left">{each}</th>' for each in ("after", "model", ""))
    # A line may break at a space, not in CIFAR-10.
    head += "".join(f'<th class="wrap">{escape(each).replace("-", "&#8209;")}</th>' for each in block.labels)
    lines = []
    for line in block.lines:
        cells = "".join(f'<td class="left">{escape(each)}</td>' for each in (line.after, line.model))
        cells += f'<td class="left wrap what">{escape(line.what)}</td>'
        for each in line.cells:
            cells += f"<td{_change(line, each)}>{escape(each)}</td>"
        lines.append(f'<tr class="{line.kind}{" first" if line.model else ""}">{cells}</tr>')
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _change(line: Line, cell: str) -> str:
    """Above or below what is published, in colour."""
    return {"+": " class='up'", "-": " class='down'"}.get(cell[:1], "") if line.kind == "difference" else ""


def _best(rows: Sequence[Compared], column: Column) -> float | None:
    found = [ours.mean for row in rows if (ours := row.group.ours(column))]
    return max(found) if len(found) > 1 else None
