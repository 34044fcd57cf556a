"""The papers' tables with the runs of a folder, and comparisons of any runs: Markdown, CSV, LaTeX and one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import yaml

from clipzoo.config.groups import CONF
from clipzoo.errors import ConfigError
from clipzoo.io import DamageLog, below, write_whole
from clipzoo.io.text import save_figure
from clipzoo.report import render
from clipzoo.report.comparison import own_runs, scaling_page, tables as compared
from clipzoo.report.comparison.disagreements import disagreement_table, disagreements, figure as disagreement_figure
from clipzoo.report.comparison.figures import figures as comparison_figures
from clipzoo.report.comparison.scales import Comparison, comparisons
from clipzoo.report.comparison.scaling import Curve, curves
from clipzoo.report.comparison.scaling_runs import trainings
from clipzoo.report.comparison.separation import SEPARATION, separation_table
from clipzoo.report.drawing import DPI
from clipzoo.report.paper_tables import blocks
from clipzoo.report.paper_tables.collect import PAPER, Run, collect, matches
from clipzoo.report.paper_tables.experiments import experiments
from clipzoo.report.paper_tables.figures import figures as table_figures
from clipzoo.report.paper_tables.filled import FilledTable, fill
from clipzoo.report.paper_tables.published import layout, table, table_names
from clipzoo.report.table import Cell, Table, text_table
from clipzoo.runs.record import revision

LEAD = (
    "Our runs with the numbers that the papers print. A run represents a row only if its configuration is that of "
    "the row's experiment, apart from seeds and paths; any other run is shown as a variant, with its differences."
)
SMALL = (
    "Rows of the papers' tables, trained at a small scale: each has its paper's head and objective, and all share one "
    "recipe, except for the settings named with a row. The numbers compare methods on this data and at this budget; "
    "they say nothing about the numbers that the papers print."
)


OWN = (
    "Runs that differ only in their seed are one line. A difference between two lines is "
    "due to all the settings that differ, and to chance: compare several seeds before you believe a small one."
)
SELECTED = (
    "The trials of a search are not tested against each other: the best of many runs owes a part of its result to "
    "chance. To compare it with other settings, train both with several new seeds (-m seed=1,2,3)."
)


@dataclass(frozen=True)
class Section:
    """A part of the page: one scale, or one of the papers' tables.

    Args:
        anchor: id of the section in HTML.
        lead: paragraphs below the title.
        tables: for Markdown and, unless there is an overview, for HTML.
        overview: one table in place of `tables`, for HTML. details: tables to unfold below it, by summary.
        further: tables after these, on all pages.
        missing: rows without runs. row_count: of the paper's table.
        pictures: heading, description and data: address of each.
        latex: the tables in LaTeX.
    """

    anchor: str
    title: str
    short_title: str
    lead: Sequence[str]
    tables: list[Table]
    pictures: Sequence[tuple[str, str, str]]
    latex: str
    overview: Table | None = None
    details: Table | None = None
    further: list[Table] = field(default_factory=list)
    remarks: Sequence[str] = ()
    missing: Table = field(default_factory=lambda: Table((), ()))
    row_count: int = 0


def write_pages(
    folders: Sequence[Path],
    names: Sequence[str],
    output: Path,
    note: str | None = None,
    first: Sequence[Section] = (),
    scaling: Sequence[str] = (),
    labels: Mapping[Path, str] | None = None,
    tested: bool = True,
) -> Path:
    """Write index.html, tables.md, tables.csv and tables.tex over the runs below `folders`.

    The runs of a single folder stand in the papers' tables if they name a row. All others are compared with each other.

    Args:
        folders: run directories, or folders of them.
        names: tables to show; empty for all tables with a measured value.
        output: folder for the files.
        note: a further paragraph at the top.
        first: sections before all others.
        labels: names of runs by their directory. tested: False for trials of a search, among which the best was
            selected: a test of their differences would be biased.
        scaling: axes of scaling fits, see `curves`; a fit also has a figure, scaling_AXIS.png, and scaling_AXIS.csv.

    Returns the path of index.html. Raises ConfigError if there is nothing to show.
    """
    damage = DamageLog()
    collected = [collect(folder, damage) for folder in folders]
    finished, unfinished = ([item for part in parts for item in part] for parts in zip(*collected, strict=True))
    if not finished and not names:
        raise _nothing_to_show(folders, damage)
    runs = [run for run in finished if run.row and len(folders) == 1]
    own = [run for run in finished if run not in runs]
    known = [name for name in table_names() if not layout()["tables"][name].get("repeats")]
    filled = [fill(table(name), runs) for name in names or known]
    filled = [part for part in filled if names or part.measured]
    scales = comparisons(runs)
    fits = {axis: curves(trainings(finished), axis) for axis in scaling}  # all, before a file is written
    laws = [_scaling_section(found, axis, output) for axis, found in fits.items()]
    sections = [*first, *laws, *(_scale_section(part, bool(filled)) for part in scales), *map(_table_section, filled)]
    comparison = own_runs.comparison(own, labels) if own else None
    sections += [_own_section(comparison, len(sections) > len(first) + len(laws), tested)] if comparison else []
    page = {
        "title": "The papers' tables" if scales or filled else "Comparison of runs",
        "lead": [LEAD if filled else SMALL if scales else OWN, *([note] if note else [])],
        "facts": _facts(finished, unfinished, damage, scales, filled),
        "sections": sections,
        "full_size": _full_size(runs),
        "runs": _runs(finished, unfinished, damage),
        "revision": revision(),
        "version": version("clipzoo"),
    }
    lines = [line for part in [*scales, *([comparison] if comparison else [])] for line in compared.cells(part)]
    lines += [line for part in filled for line in blocks.cells(part)]
    write_whole(output / "tables.csv", render.csv(text_table(blocks.CSV_COLUMNS, lines, left=0)))
    write_whole(output / "tables.tex", "\n".join(section.latex for section in sections))
    write_whole(output / "tables.md", render.markdown_page("tables.md.j2", **page))
    write_whole(output / "index.html", render.html_page("tables.html.j2", **page))
    return output / "index.html"


def _nothing_to_show(folders: Sequence[Path], damage: DamageLog) -> ConfigError:
    searched = ", ".join(map(str, folders))
    damaged = f" ({len(damage.faults)} with damaged files)" if damage.faults else ""
    return ConfigError(
        f"no finished run in {searched}{damaged}: train one first, or give --table wpse/1 for an empty table"
    )


def _scale_section(comparison: Comparison, lead: bool) -> Section:
    """lead: explain small scales in HTML, where the page's own lead does not."""
    scale, tables = comparison.scale, compared.task_tables(comparison)
    about = yaml.safe_load((CONF / "scale" / f"{scale}.yaml").read_text())["about"]["title"]
    titled = [replace(part, title=f"{part.title}, scale={scale}") for part in tables[:-1]]
    return Section(
        anchor=f"scale-{scale}",
        title=f"At scale={scale}",
        short_title=f"At scale={scale}",
        lead=[SMALL, about] if lead else [about],
        tables=tables,
        pictures=[(heading, text, render.picture(part)) for heading, text, part in comparison_figures(comparison)],
        latex="\n".join(render.latex(part) for part in titled),
        overview=compared.overview(comparison),
        details=compared.probe_details(comparison),
    )


def _own_section(comparison: Comparison, lead: bool, tested: bool) -> Section:
    """lead: explain the comparison, where the page's own lead does not. tested: add tests of the differences."""
    tables, differing = compared.task_tables(comparison), own_runs.settings_table(comparison)
    separated = separation_table(comparison) if tested else None
    pairs = list(disagreements(comparison.rows)) if tested else []
    pictures = [*comparison_figures(comparison)]
    for pair in pairs:
        if (drawn := disagreement_figure(pair)) is not None:
            pictures.append((f"{pair.title}: one run right, the other wrong", "samples and wrong predictions", drawn))
    return Section(
        anchor="own-runs",
        title="Runs compared",
        short_title="Runs compared",
        lead=[*([OWN] if lead else []), *([] if tested else [SELECTED]), *([SEPARATION] if separated else [])],
        tables=tables,
        pictures=[(heading, text, render.picture(part)) for heading, text, part in pictures],
        latex="\n".join(render.latex(part) for part in tables[:-1]),
        overview=compared.overview(comparison),
        details=compared.probe_details(comparison),
        further=[
            *([separated] if separated else []),
            *([differing] if differing.rows and tested else []),
            *([disagreement_table(pairs)] if pairs else []),
        ],  # fmt: skip
    )


def _scaling_section(found: Sequence[Curve], axis: str, output: Path) -> Section:
    """Return the section of power laws along an axis, and write their table and figure to files of their own too."""
    fits, drawn, title = scaling_page.table(found), scaling_page.figure(found, axis), f"Scaling with {axis}"
    write_whole(below(output, f"scaling_{axis}.csv"), render.csv(fits))
    save_figure(drawn, below(output, f"scaling_{axis}.png"), dpi=DPI)
    return Section(
        anchor=f"scaling-{axis}",
        title=title,
        short_title=title,
        lead=[
            f"{scaling_page.lead(axis, found)} The training loss is the mean of the losses logged in the last tenth "
            "of a training; it is that of new samples only if no sample is repeated. An error is 100 % less accuracy."
        ],
        tables=[fits],
        pictures=[("", f"runs and power laws in {axis}", render.picture(drawn))],
        latex=render.latex(replace(fits, title=title)),
    )


def _table_section(filled: FilledTable) -> Section:
    paper_table, tables = filled.table, blocks.blocks(filled)
    titles = [paper_table.heading + (f" ({part.title})" if part.title else "") for part in tables]
    titled = [replace(part, title=title) for part, title in zip(tables, titles, strict=True)]
    return Section(
        anchor=paper_table.name.replace("/", "-"),
        title=paper_table.heading,
        short_title=paper_table.short_heading,
        lead=[],
        tables=tables,
        pictures=[("", text, render.picture(part)) for text, part in table_figures(filled)],
        latex="\n".join(render.latex(part, rotate=True) for part in titled),
        remarks=blocks.remarks(filled),
        missing=blocks.missing(filled),
        row_count=len(filled.rows),
    )


def _facts(
    runs: Sequence[Run],
    unfinished: Sequence[Path],
    damage: DamageLog,
    scales: Sequence[Comparison],
    filled: Sequence[FilledTable],
) -> list[tuple[str, int | str]]:
    facts: list[tuple[str, int | str]] = [("finished runs", len(runs))]
    if unfinished:
        facts.append(("unfinished", len(unfinished)))
    if damage.faults:
        facts.append(("damaged files", len(damage.faults)))
    facts += [(f"rows at scale={comparison.scale}", len(comparison.rows)) for comparison in scales]
    if filled:
        rows = [row for part in filled for row in part.rows]
        count = sum(row.ours is not None for row in rows)
        facts += [("tables", len(filled)), ("rows filled", f"{count} of {len(rows)}")]
    return facts


def _full_size(runs: Sequence[Run]) -> Table:
    """Commands and costs of the rows that have runs only at another scale."""
    at_full_size = {run.row for run in runs if run.scale == PAPER}
    rows: list[list[str | Cell]] = []
    for row in dict.fromkeys(run.row for run in runs):
        experiment = experiments().get(row or "")
        if row not in at_full_size and experiment is not None:
            names = [name for name in table_names() if any(other.name == row for other in table(name).rows)]
            rows.append([experiment.row, ", ".join(names), Cell(experiment.command, code=True), experiment.cost])
    return text_table(["row", "tables", "command", "estimated cost"], rows, left=4)


def _runs(runs: Sequence[Run], unfinished: Sequence[Path], damage: DamageLog) -> Table:
    rows = []
    for run in runs:
        own = [match for match in matches([run], run.row or "") if match.row == run.row]
        state = (
            ""
            if run.row is None
            else "no such row"
            if not own
            else "yes"
            if own[0].is_row
            else f"no: {own[0].describe(most=12)}"
        )
        code = run.record.revision or ""
        code = code[:9] + "+" * code.endswith("+")
        rows.append([run.folder.name, run.row or "", str(run.seed), run.scale if run.row else "", state, code])
    rows += [[folder.name, "", "", "", "unfinished", ""] for folder in unfinished]
    rows += [[str(fault.path), "", "", "", f"damaged: {fault.fault}", ""] for fault in damage.faults]
    return text_table(["run", "row", "seed", "scale", "represents the row", "revision"], rows, left=6)
