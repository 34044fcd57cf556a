"""The papers' tables with the runs of a folder: Markdown, CSV, LaTeX and one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from clipzoo.config.groups import CONF
from clipzoo.errors import ConfigError
from clipzoo.io import write_whole
from clipzoo.report import render
from clipzoo.report.comparison import tables as compared
from clipzoo.report.comparison.scales import Comparison, comparisons
from clipzoo.report.paper_tables import blocks
from clipzoo.report.paper_tables.collect import PAPER, Run, collect, matches
from clipzoo.report.paper_tables.experiments import experiments
from clipzoo.report.paper_tables.filled import FilledTable, fill
from clipzoo.report.paper_tables.published import layout, table, table_names
from clipzoo.report.table import Cell, Table, text_table
from clipzoo.runs.record import revision

LEAD = (
    "Our runs beside the numbers that the papers print. A run stands for a row only if its configuration is that of "
    "the row's experiment, apart from seeds and paths; any other run is shown as a variant, with its differences."
)
SMALL = (
    "Rows of the papers' tables, trained at a small scale: each has its paper's head and objective, and all share one "
    "recipe, except for the settings named with a row. The numbers compare methods on this data and at this budget; "
    "they say nothing about the numbers that the papers print."
)
Pictures = list[tuple[str, list[tuple[str, str]]]]
"""Titled groups of pictures, each with a description and a data: address."""


@dataclass(frozen=True)
class ComparisonSection:
    """The part of the page about one scale."""

    comparison: Comparison

    @property
    def anchor(self) -> str:
        return f"scale-{self.comparison.scale}"

    @property
    def title(self) -> str:
        return f"At scale={self.comparison.scale}"

    @property
    def about(self) -> str:
        """Title of the option of conf/scale."""
        path = CONF / "scale" / f"{self.comparison.scale}.yaml"
        return yaml.safe_load(path.read_text())["about"]["title"]

    @cached_property
    def tables(self) -> list[Table]:
        return compared.task_tables(self.comparison)

    @property
    def overview(self) -> Table:
        return compared.overview(self.comparison)

    @property
    def probes(self) -> Table | None:
        return compared.probe_details(self.comparison)

    @property
    def pictures(self) -> Pictures:
        from clipzoo.report.comparison.figures import figures

        titles: dict[str, list[tuple[str, str]]] = {}
        for title, description, figure in figures(self.comparison):
            titles.setdefault(title, []).append((description, render.picture(figure)))
        return list(titles.items())

    def latex(self) -> str:
        scale = self.comparison.scale
        tables = [table for table in self.tables if table.title != "Training"]
        return "\n".join(
            render.latex(Table(table.headings, table.rows, f"{table.title}, scale={scale}")) for table in tables
        )


@dataclass(frozen=True)
class TableSection:
    """The part of the page about one of the papers' tables."""

    filled: FilledTable

    @property
    def anchor(self) -> str:
        return self.filled.table.name.replace("/", "-")

    @property
    def title(self) -> str:
        return self.filled.table.heading

    @property
    def short_title(self) -> str:
        return self.filled.table.short_heading

    @property
    def row_count(self) -> int:
        return len(self.filled.rows)

    @cached_property
    def blocks(self) -> list[Table]:
        return blocks.blocks(self.filled)

    @cached_property
    def missing(self) -> Table:
        return blocks.missing(self.filled)

    @cached_property
    def remarks(self) -> list[str]:
        return blocks.remarks(self.filled)

    @property
    def pictures(self) -> Pictures:
        from clipzoo.report.paper_tables.figures import figures

        return [("", [(description, render.picture(figure)) for description, figure in figures(self.filled)])]

    def latex(self) -> str:
        titles = [self.title + (f" ({block.title})" if block.title else "") for block in self.blocks]
        parts = zip(self.blocks, titles, strict=True)
        return "\n".join(render.latex(Table(part.headings, part.rows, title), rotate=True) for part, title in parts)


@dataclass(frozen=True)
class Page:
    """Content of the page, for the templates tables.md.j2 and tables.html.j2."""

    lead: Sequence[str]
    comparisons: Sequence[ComparisonSection]
    sections: Sequence[TableSection]
    finished: Sequence[Run]
    unfinished: Sequence[Path]
    title: str = "The papers' tables"
    small: str = SMALL

    @property
    def facts(self) -> list[tuple[str, str]]:
        facts = [("finished runs", f"{len(self.finished)}")]
        if self.unfinished:
            facts.append(("unfinished", f"{len(self.unfinished)}"))
        for section in self.comparisons:
            facts.append((f"rows at scale={section.comparison.scale}", f"{len(section.comparison.rows)}"))
        if self.sections:
            rows = [row for section in self.sections for row in section.filled.rows]
            filled = sum(row.ours is not None for row in rows)
            facts += [("tables", f"{len(self.sections)}"), ("rows filled", f"{filled} of {len(rows)}")]
        return facts

    @cached_property
    def full_size(self) -> Table:
        """Commands and costs of the rows that have runs only at another scale."""
        at_full_size = {run.row for run in self.finished if run.scale == PAPER}
        rows: list[list[str | Cell]] = []
        for row in dict.fromkeys(run.row for run in self.finished):
            experiment = experiments().get(row or "")
            if row not in at_full_size and experiment is not None:
                names = [name for name in table_names() if any(other.name == row for other in table(name).rows)]
                command = Cell(experiment.command, code=True)
                rows.append([experiment.row, ", ".join(names), command, experiment.cost])
        return text_table(["row", "tables", "command", "estimated cost"], rows, left=4)

    @cached_property
    def runs(self) -> Table:
        """All run directories."""
        rows = [
            [run.folder.name, str(run.row), str(run.seed), run.scale, _state(run), _short(run.record.revision)]
            for run in self.finished
        ]
        rows += [[folder.name, "", "", "", "unfinished", ""] for folder in self.unfinished]
        return text_table(["run", "row", "seed", "scale", "stands for the row", "revision"], rows, left=6)

    @cached_property
    def revision(self) -> str:
        return str(revision())

    def csv(self) -> str:
        """A line per measured or missing cell; runs at another scale come first."""
        lines = [line for section in self.comparisons for line in compared.cells(section.comparison)]
        lines += [line for section in self.sections for line in blocks.cells(section.filled)]
        return render.csv(text_table(blocks.CSV_COLUMNS, lines, left=0))


def write_pages(root: Path, names: Sequence[str], output: Path, note: str | None = None) -> Path:
    """Write index.html, tables.md, tables.csv and tables.tex over the runs below `root`.

    Args:
        root: folder of run directories.
        names: tables to show; empty for all tables with a measured value.
        output: folder for the files.
        note: a further paragraph at the top.

    Returns the path of index.html. Raises ConfigError if there is nothing to show.
    """
    runs, unfinished = collect(root)
    runs = [run for run in runs if run.row]
    if not runs and not names:
        raise ConfigError(f"{root} holds no finished run of a paper's row: give --table wpse/1, or train one first")
    known = [name for name in table_names() if not layout()["tables"][name].get("repeats")]
    filled = [fill(table(name), runs) for name in names or known]
    sections = [TableSection(part) for part in filled if names or part.measured]
    lead = [LEAD if sections else SMALL, *([note] if note else [])]
    page = Page(lead, [ComparisonSection(part) for part in comparisons(runs)], sections, runs, unfinished)
    output.mkdir(parents=True, exist_ok=True)
    parts: list[ComparisonSection | TableSection] = [*page.comparisons, *page.sections]
    write_whole(output / "tables.csv", page.csv())
    write_whole(output / "tables.tex", "\n".join(part.latex() for part in parts))
    write_whole(output / "tables.md", render.markdown_page("tables.md.j2", page=page))
    write_whole(output / "index.html", render.html_page("tables.html.j2", page=page))
    return output / "index.html"


def _state(run: Run) -> str:
    own = [match for match in matches([run], run.row or "") if match.row == run.row]
    if not own:
        return "no such row"
    return "yes" if own[0].is_row else f"no: {own[0].describe(most=12)}"


def _short(revision: str | None) -> str:
    """The first nine digits of a revision, and its "+"."""
    return str(revision)[:9] + "+" * str(revision).endswith("+")
