"""Tables and pages: a page is a list of sections, and one writer turns it into HTML, Markdown and LaTeX."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from clipzoo.io import MB, below, read_bytes, write_whole
from clipzoo.io.text import draw, latex_text, markdown_code, markdown_text, one_line, save_figure

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Span:
    """A part of a paragraph that is not plain text. kind: "page" links to another page in the page's own format."""

    text: str
    kind: Literal["code", "strong", "link", "page", "command"]
    address: str = ""


Text = str | Span | tuple[str | Span, ...]
"""A paragraph, an item of a list, or a fact. All text is escaped."""


@dataclass(frozen=True)
class Heading:
    """Head of a column.

    group: title above neighbouring columns, in HTML. wrap: long labels break, in HTML, and so do the texts of a
    left-aligned column.
    """

    label: str
    align: Literal["left", "right"] = "right"
    group: str = ""
    wrap: bool = False


@dataclass(frozen=True)
class Cell:
    """Text of a cell. note: small print after it. code: shown as code. mark: space-separated styles of the pages.

    bold: the best value, where the format has no style for it.
    """

    text: str
    note: str = ""
    code: bool = False
    bold: bool = False
    mark: str = ""

    @property
    def noted(self) -> str:
        return f"{self.text} ({self.note})" if self.note else self.text


@dataclass(frozen=True)
class Row:
    """Cells of a row. kind: style of the row in the pages. starts: first row of a group, separated from the others."""

    cells: tuple[Cell, ...]
    kind: str = ""
    starts: bool = False


@dataclass(frozen=True)
class Table:
    """Rows below headings.

    title: content of the table, without formatting. wrap: break long cells, in HTML. rotate: turn the heads of
    right-aligned columns by 90 degrees, in LaTeX.
    """

    headings: tuple[Heading, ...]
    rows: tuple[Row, ...]
    title: str = ""
    wrap: bool = False
    rotate: bool = False

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Titles above the headings with the number of columns below each; empty if there are none."""
        groups: list[tuple[str, int]] = []
        for heading in self.headings:
            if groups and heading.group and groups[-1][0] == heading.group:
                groups[-1] = (heading.group, groups[-1][1] + 1)
            else:
                groups.append((heading.group, 1))
        return groups if any(title for title, _ in groups) else []


def text_table(
    labels: Sequence[str], rows: Sequence[Sequence[str | Cell]], left: int, title: str = "", wrap: bool = False
) -> Table:
    """A table of plain cells.

    Args:
        labels: heads of the columns.
        rows: one text or cell per column.
        left: number of left-aligned columns; the others are right-aligned.
        title, wrap: see `Table`.
    """
    headings = [Heading(label, "left" if index < left else "right", wrap=True) for index, label in enumerate(labels)]
    cells = [tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in rows]
    return Table(tuple(headings), tuple(Row(row) for row in cells), title, wrap)


@dataclass(frozen=True)
class Picture:
    """A figure with its description. heading: above it, in HTML.

    file: path relative to the page, at which the figure is saved; without one the figure is in the HTML page only.
    """

    text: str
    figure: Figure
    heading: str = ""
    file: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a page: a heading, then text, tables and figures, in this order. Without a title there is no heading.

    Args:
        text: paragraphs. items: a list below them. facts: cards of values by name, above the text.
        tables: a title becomes a heading, and the caption in LaTeX.
        notes: small print at the end.
        level: of the heading. anchor: id of the heading; sections that have one are in the page's navigation, under
            their `short_title`.
        fold: summary of a part that can be folded, in place of the text, in HTML. It is folded at first if no other
            format has it.
        formats: formats of the page that have the section.
    """

    title: str = ""
    text: Sequence[Text] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Picture] = ()
    items: Sequence[Text] = ()
    facts: Mapping[str, Text] = field(default_factory=dict)
    notes: Sequence[Text] = ()
    level: int = 2
    anchor: str = ""
    short_title: str = ""
    fold: str = ""
    formats: Collection[str] = ("html", "md")


@dataclass(frozen=True)
class Page:
    """Title and files of a page. The suffix of a file is its format: .html with the figures in it, .md or .tex."""

    title: str
    files: Sequence[Path]


def write(page: Page, sections: Sequence[Section]) -> Path:
    """Write the sections in every format of the page; return the path of its first file."""
    addresses = {}
    for drawn in (drawn for section in sections for drawn in section.figures):
        if drawn.file:
            path = below(page.files[0].parent, drawn.file)
            save_figure(drawn.figure, path)
            addresses[drawn] = _address(read_bytes(path, 64 * MB))
        else:
            addresses[drawn] = picture(drawn.figure)
    for path in page.files:
        shown = [section for section in sections if path.suffix[1:] in section.formats]
        if path.suffix == ".md":
            text = markdown_page("page.md.j2", title=page.title, sections=shown)
        elif path.suffix == ".html":
            text = html_page("page.html.j2", title=page.title, sections=shown, addresses=addresses)
        else:
            text = "\n".join(latex(table) for section in shown for table in section.tables)
        write_whole(path, text)
    return page.files[0]


def markdown(table: Table) -> Markup:
    """A Markdown table, without its title."""
    dashes = ["---" if heading.align == "left" else "---:" for heading in table.headings]
    rows = [[_markdown_cell(cell) for cell in row.cells] for row in table.rows]
    lines: list[list[str]] = [[markdown_text(heading.label) for heading in table.headings], dashes, *rows]
    return Markup("\n".join("| " + " | ".join(line) + " |" for line in lines))


def html(table: Table, wrap: bool = False) -> Markup:
    """An HTML table, without its title. wrap: break long cells of tables that do not ask for it."""
    return Markup(html_page("table.html.j2", table=table, wrap=wrap or table.wrap))


def picture(figure: Figure) -> str:
    """The figure as a data: address, for a page that needs no other file."""
    data = io.BytesIO()
    draw(figure, data)
    return _address(data.getvalue())


def _address(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def csv(table: Table) -> str:
    """Comma-separated values, notes left out."""
    from pandas import DataFrame  # takes half a second to import

    labels = [heading.label for heading in table.headings]
    rows = [[cell.text for cell in row.cells] for row in table.rows]
    return DataFrame(rows, columns=labels).to_csv(index=False, lineterminator="\n")


def latex(table: Table, rotate: bool = False) -> str:
    """A booktabs table with its title as caption."""
    turned = rotate or table.rotate
    heads = [
        capitalised(label) if heading.align == "left" else f"\\rotatebox{{90}}{{{label}}}" if turned else label
        for heading in table.headings
        for label in [latex_text(heading.label)]
    ]
    alignment = "".join(heading.align[0] for heading in table.headings)
    lines = ["\\begin{table}", "\\centering", "\\small", f"\\caption{{{latex_text(table.title)}}}"]
    lines += [f"\\begin{{tabular}}{{{alignment}}}", "\\toprule", f"{' & '.join(heads)} \\\\"]
    for number, row in enumerate(table.rows):
        if row.starts or number == 0:
            lines.append("\\midrule")
        lines.append(" & ".join(latex_text(cell.noted) for cell in row.cells) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


def terminal(table: Table) -> str:
    """Columns padded with spaces, without heads that are empty."""
    heads = [heading.label for heading in table.headings]
    rows = [heads] * any(heads) + [[cell.noted for cell in row.cells] for row in table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]

    def padded(row: list[str]) -> Iterator[str]:
        for text, width, heading in zip(row, widths, table.headings, strict=True):
            yield text.ljust(width) if heading.align == "left" else text.rjust(width)

    return "\n".join("  ".join(padded(row)).rstrip() for row in rows)


def capitalised(text: str) -> str:
    """The text with a capital first letter, the rest unchanged."""
    return text[:1].upper() + text[1:]


def markdown_page(template: str, **content: object) -> str:
    """Render a Markdown template of the folder `templates`; all text is escaped.

    Paragraphs are separated by one empty line.
    """
    text = _environment("md").get_template(template).render(**content)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def html_page(template: str, **content: object) -> str:
    """Render an HTML template of the folder `templates`; all text is escaped."""
    return _environment("html").get_template(template).render(**content)


@cache
def _environment(kind: Literal["md", "html"]) -> Environment:
    is_html = kind == "html"
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=_html_value if is_html else _markdown_value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"markdown": markdown, "html": html, "capitalised": capitalised}
    environment.filters["line"] = one_line if is_html else lambda text: Markup(one_line(text))
    return environment


def _html_value(value: Any) -> Any:
    """A value of an HTML template, with its spans; jinja2 escapes the rest."""
    if isinstance(value, tuple):
        return Markup().join(_html_value(part) for part in value)
    if not isinstance(value, Span):
        return value
    address = f"{value.address}.html" if value.kind == "page" else value.address
    return Markup(html_page("span.html.j2", kind=value.kind, text=value.text, address=address).strip())


def _markdown_value(value: Any) -> Any:
    """A value of a Markdown template: anything but a number is escaped, unless a filter has made it Markdown."""
    if isinstance(value, tuple):
        return Markup().join(_markdown_value(part) for part in value)
    if not isinstance(value, Span):
        return value if isinstance(value, Markup | int | float | None) else markdown_text(str(value))
    if value.kind == "code":
        return markdown_code(value.text)
    if value.kind == "strong":
        return Markup(f"**{markdown_text(value.text)}**")
    if value.kind == "command":
        return Markup(f"```\n{one_line(value.text)}\n```")
    address = f"{value.address}.md" if value.kind == "page" else value.address
    return Markup(f"[{markdown_text(value.text)}]({markdown_text(address)})")


def _markdown_cell(cell: Cell) -> str:
    text = cell.noted
    if not text:
        return ""
    shown = markdown_code(text, in_table=True) if cell.code else markdown_text(text)
    return f"**{shown}**" if cell.bold else shown
