"""The papers' tables with the runs of a folder: Markdown, CSV, LaTeX and one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import yaml

from clipzoo.config.groups import CONF
from clipzoo.errors import ConfigError
from clipzoo.io import write_whole
from clipzoo.report.comparison.scales import COSTS, Comparison, comparisons
from clipzoo.report.paper_tables.collect import PAPER, Run, collect
from clipzoo.report.paper_tables.experiments import experiments
from clipzoo.report.paper_tables.published import layout, table, table_names
from clipzoo.report.paper_tables.tables import Filled, described, fill, matches
from clipzoo.report.paper_tables.text import aligned, comma_separated, compared_latex, compared_rows, latex, markdown
from clipzoo.runs.record import revision

LEAD = (
    "Our runs beside the numbers that the papers print. A run stands for a row only if its configuration is that of "
    "the row's experiment, seeds and places of files aside; any other is named a variant, with what is different."
)
SMALL = (
    "Rows of the papers' tables, trained in small: each has its paper's head and objective, and all have one recipe, "
    "but for what stands behind a row's name. The numbers compare methods on this data and at this budget; they say "
    "nothing of the numbers that the papers print."
)


def write_pages(root: Path, names: Sequence[str], output: Path, note: str | None = None) -> Path:
    """The page over the runs below `root`, in `output`: of the tables asked for, or of all that some run has values in.

    note: what else a reader must know, a paragraph. Raises ConfigError where there is nothing to show.
    """
    runs, unfinished = collect(root)
    runs = [run for run in runs if run.row]
    known = [name for name in table_names() if not layout()["tables"][name].get("repeats")]
    filled = [fill(table(name), runs) for name in names or known]
    if not names:
        filled = [each for each in filled if each.shown]
        if not runs:
            raise ConfigError(f"{root} holds no finished run of a paper's row: give --table wpse/1, or train one first")
    beside = comparisons(runs)
    output.mkdir(parents=True, exist_ok=True)
    lead = [LEAD if filled else SMALL, *([note] if note else [])]
    write_whole(output / "tables.csv", comma_separated(filled, beside))
    write_whole(output / "tables.tex", "\n".join([*map(compared_latex, beside), *map(latex, filled)]))
    write_whole(output / "tables.md", _markdown(lead, filled, beside, runs, unfinished))
    write_whole(output / "index.html", _html(lead, filled, beside, runs, unfinished))
    return output / "index.html"


def _markdown(
    lead: Sequence[str],
    filled: Sequence[Filled],
    beside: Sequence[Comparison],
    runs: Sequence[Run],
    rest: Sequence[Path],
) -> str:
    parts = ["# The papers' tables", *lead]
    for comparison in beside:
        parts.append(f"## At scale={comparison.scale}\n\n{_scale(comparison.scale)}")
        parts += _compared_markdown(comparison)
    parts += [markdown(each).rstrip() for each in filled]
    if rows := list(_full_size(runs)):
        parts.append("## What the rows take at full size\n\n" + aligned(FULL_SIZE, rows, left=4))
    parts.append("## Runs\n\n" + aligned(RUNS, list(_runs(runs, rest)), left=len(RUNS)))
    return "\n\n".join(parts) + "\n"


def _compared_markdown(comparison: Comparison) -> Iterator[str]:
    for task, columns in comparison.columns.items():
        rows = compared_rows(comparison, columns)
        yield f"### {task}, %\n\n" + aligned(["model", "paper", *(each.label for each in columns)], rows, left=2)
    costs = [
        [
            row.label,
            *(f"{value:.4g}" if (value := row.cost(key, factor)) is not None else "" for _, key, factor in COSTS),
        ]
        for row in comparison.rows
    ]
    yield "### Training\n\n" + aligned(["model", *(name for name, _, _ in COSTS)], costs, left=1)


def _html(
    lead: Sequence[str],
    filled: Sequence[Filled],
    beside: Sequence[Comparison],
    runs: Sequence[Run],
    rest: Sequence[Path],
) -> str:
    from clipzoo.report.paper_tables import html

    facts = [("finished runs", f"{len(runs)}")] + [("unfinished", f"{len(rest)}")] * bool(rest)
    facts += [(f"rows at scale={each.scale}", f"{len(each.rows)}") for each in beside]
    if filled:
        exact = sum(entry.ours is not None for each in filled for entry in each.entries)
        facts += [
            ("tables", f"{len(filled)}"),
            ("of their rows filled", f"{exact} of {sum(len(each.entries) for each in filled)}"),
        ]
    titles = [(f"scale-{each.scale}", f"At scale={each.scale}") for each in beside]
    titles += [(html.anchor(each), each.table.heading.split(":")[0]) for each in filled]
    parts = [html.cards(facts), html.contents([*titles, ("runs", "Runs")])]
    for comparison in beside:
        parts.append(f'<h2 id="scale-{comparison.scale}">At scale={comparison.scale}</h2>')
        if filled:
            parts.append(f"<p>{escape(SMALL)}</p>")
        parts.append(f"<p>{escape(_scale(comparison.scale))}</p>")
        parts.append(html.compared_table(comparison))
        parts += _compared_pictures(comparison)
    parts += [html.filled_table(each, list(_pictures(each))) for each in filled]
    if rows := list(_full_size(runs)):
        shown = [
            [*(escape(each) for each in row[:2]), f"<code>{escape(row[2])}</code>", escape(row[3])] for row in rows
        ]
        parts.append(f"<h2>What the rows take at full size</h2>{html.plain_table(FULL_SIZE, shown)}")
    rows = [[escape(each) for each in row] for row in _runs(runs, rest)]
    parts.append(f'<h2 id="runs">Runs</h2>{html.plain_table(RUNS, rows)}')
    parts.append(f'<p class="note">Made at revision {escape(str(revision()))} by scripts/report.py.</p>')
    return html.page("The papers' tables", lead, parts)


def _compared_pictures(comparison: Comparison) -> Iterator[str]:
    from clipzoo.report.paper_tables import figures
    from clipzoo.report.paper_tables.html import picture

    yield "<h3>By data set</h3>" + picture(figures.compared_bars(comparison), "bars by data set")
    yield "<h3>Over training</h3>" + picture(figures.loss_curves(comparison), "loss over training")
    if (curves := figures.evaluation_curves(comparison)) is not None:
        yield picture(curves, "evaluations during training")
    yield "<h3>Cost</h3>" + picture(figures.cost_bars(comparison), "minutes, samples a second, memory")


def _pictures(filled: Filled) -> Iterator[str]:
    from clipzoo.report.paper_tables import figures
    from clipzoo.report.paper_tables.html import picture

    columns = filled.table.columns
    if any(figures.point_set_size(entry) for entry in filled.entries):
        for column in columns:
            if column.label == "GPUs":
                continue
            title = f"{filled.table.heading.split(':')[0]}: {column.label}"
            yield picture(figures.point_set_sizes(filled, column, title), title)
    elif filled.table.numbers and len(columns) > 1:
        parts = {
            name: [each for each in columns if each.heading == name] for name in (each.heading for each in columns)
        }
        judged = {column for entry in filled.entries for column in columns if entry.ours and entry.ours.ours(column)}
        for heading, part in parts.items():
            # Once there are runs, what none of them was judged on needs no picture.
            if judged and not judged.intersection(part):
                continue
            yield picture(figures.published_bars(filled, part), f"bars, {heading}")


def _scale(name: str) -> str:
    """Title of an option of conf/scale."""
    return yaml.safe_load((CONF / "scale" / f"{name}.yaml").read_text())["about"]["title"]


FULL_SIZE = ("row", "tables", "command", "estimated cost")


def _full_size(runs: Sequence[Run]) -> Iterator[list[str]]:
    """For rows that are there only at another scale."""
    there = {run.row for run in runs if run.scale == PAPER}
    for row in dict.fromkeys(run.row for run in runs):
        experiment = experiments().get(row or "")
        if row in there or experiment is None:
            continue
        inside = [name for name in table_names() if any(each.name == row for each in table(name).rows)]
        several = f", {experiment.runs} runs" if experiment.runs > 1 else ""
        cost = f"{experiment.hours * experiment.runs:,.0f} {experiment.device} hours{several}"
        yield [experiment.row, ", ".join(inside), experiment.command, cost]


RUNS = ("run", "row", "seed", "scale", "stands for the row", "revision")


def _runs(runs: Sequence[Run], unfinished: Sequence[Path]) -> Iterator[list[str]]:
    for run in runs:
        own = [each for each in matches([run], run.row or "") if each.row == run.row]
        state = "no such row" if not own else "yes" if own[0].is_row else f"no: {described(own[0], most=12)}"
        revised = str(run.results.get("revision"))
        yield [
            run.folder.name,
            str(run.row),
            str(run.seed),
            run.scale,
            state,
            revised[:9] + "+" * revised.endswith("+"),
        ]
    for folder in unfinished:
        yield [folder.name, "", "", "", "unfinished", ""]
