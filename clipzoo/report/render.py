"""Tables and pages: a page is a list of sections, and one writer turns it into HTML, Markdown and LaTeX."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from clipzoo.io import below, whole, write_whole
from clipzoo.io.text import draw, latex_text, markdown_code, markdown_text, one_line

TEMPLATES = Path(__file__).parent / "templates"
SPANS = {
    "code": "<code>{}</code>", "strong": "<strong>{}</strong>", "command": "<pre><code>{}</code></pre>",
    "link": '<a href="{address}">{}</a>', "page": '<a href="{address}">{}</a>',
}  # fmt: skip


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

    group: title above neighbouring columns, in HTML. wrap: break long labels and the texts of a left-aligned column,
    in HTML.
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

    title: without formatting. wrap: break long cells, in HTML. rotate: turn the heads of right-aligned columns by 90
    degrees, in LaTeX.
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
        for title, labels in groupby(heading.group for heading in self.headings):
            count = len(list(labels))
            groups += [(title, count)] if title else [("", 1)] * count
        return groups if any(title for title, _ in groups) else []


def text_table(
    labels: Sequence[str], rows: Sequence[Sequence[str | Cell]], left: int, title: str = "", wrap: bool = False
) -> Table:
    """A table of texts or cells. left: number of left-aligned columns; the others are right-aligned."""
    headings = [Heading(label, "left" if index < left else "right", wrap=True) for index, label in enumerate(labels)]
    cells = [tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in rows]
    return Table(tuple(headings), tuple(map(Row, cells)), title, wrap)


def turned(table: Table) -> Table:
    """Exchange rows and columns; the first row of a group of headings has the group's title."""
    rows = []
    for place, (before, heading) in enumerate(pairwise(table.headings), start=1):
        title = [heading.group] if heading.group != before.group else []
        cells = [row.cells[place] for row in table.rows]
        name = Cell(", ".join([*title, heading.label]), mark="mean" if "mean" in cells[0].mark else "")
        rows.append(Row((name, *cells)))
    headings = [Heading("", "left", wrap=True), *(Heading(row.cells[0].text, wrap=True) for row in table.rows)]
    return Table(tuple(headings), tuple(rows), table.title)


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
class Tile:
    """One or two small pictures as JPEG, with text and small print below them, in HTML."""

    pictures: Sequence[bytes]
    text: str
    note: str = ""

    @property
    def addresses(self) -> list[str]:
        return [f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}" for jpeg in self.pictures]


@dataclass(frozen=True)
class Section:
    """A part of a page: a heading, then text, tables and figures, in this order. Without a title there is no heading.

    Args:
        text: paragraphs. items: a list below them. facts: cards of values by name, above the text.
        tables: a title becomes a heading, and the caption in LaTeX. tiles: below them, in a grid.
        notes: small print at the end.
        level: level of the heading. anchor: id of the heading; sections with an id are in the page's navigation, under
            their `short_title`.
        fold: summary of a collapsible section, in place of the text, in HTML. The section starts collapsed if only
            HTML has it.
        formats: formats of the page that have the section.
    """

    title: str = ""
    text: Sequence[Text] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Picture] = ()
    tiles: Sequence[Tile] = ()
    items: Sequence[Text] = ()
    facts: Mapping[str, Text] = field(default_factory=dict)
    notes: Sequence[Text] = ()
    level: int = 2
    anchor: str = ""
    short_title: str = ""
    fold: str = ""
    formats: Collection[str] = ("html", "md")


def write(title: str, files: Sequence[Path], sections: Sequence[Section]) -> Path:
    """Write a page to its files, whose suffix is the format: .html with the figures in it, .md or .tex.

    Pictures with a file are saved next to the first file, whose path is returned.
    """
    addresses = {}
    for picture in (picture for section in sections for picture in section.figures):
        png = io.BytesIO()
        draw(picture.figure, png)
        addresses[picture] = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
        if picture.file:
            with whole(below(files[0].parent, picture.file)) as file:
                file.write(png.getvalue())
    for path in files:
        suffix = path.suffix[1:]
        page_sections = [section for section in sections if suffix in section.formats]
        if suffix == "tex":
            text = "\n".join(latex(table) for section in page_sections for table in section.tables)
        else:
            text = from_template(f"page.{suffix}.j2", title=title, sections=page_sections, addresses=addresses)
        write_whole(path, text)
    return files[0]


def markdown(table: Table) -> Markup:
    """A Markdown table, without its title."""
    labels: list[str] = [markdown_text(heading.label) for heading in table.headings]
    lines = [labels, ["---" if heading.align == "left" else "---:" for heading in table.headings]]
    for row in table.rows:
        lines.append([])
        for cell in row.cells:
            text: str = markdown_code(cell.noted, in_table=True) if cell.code else markdown_text(cell.noted)
            lines[-1].append("" if not cell.noted else f"**{text}**" if cell.bold else text)
    return Markup("\n".join("| " + " | ".join(line) + " |" for line in lines))


def csv(table: Table) -> str:
    """Comma-separated values, notes left out."""
    from pandas import DataFrame  # takes half a second to import

    labels = [heading.label for heading in table.headings]
    rows = [[cell.text for cell in row.cells] for row in table.rows]
    return DataFrame(rows, columns=labels).to_csv(index=False, lineterminator="\n")


def latex(table: Table) -> str:
    """A booktabs table with its title as caption."""
    heads = []
    for heading in table.headings:
        label = latex_text(heading.label)
        if heading.align == "left":
            label = capitalised(label)
        elif table.rotate:
            label = f"\\rotatebox{{90}}{{{label}}}"
        heads.append(label)
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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<" if heading.align == "left" else ">" for heading in table.headings]
    lines = [[f"{text:{sign}{width}}" for text, sign, width in zip(row, signs, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def capitalised(text: str) -> str:
    """The text with a capital first letter, the rest unchanged."""
    return text[:1].upper() + text[1:]


def from_template(template: str, **content: object) -> str:
    """Fill in a template of the folder `templates`, NAME.html.j2 or NAME.md.j2; all text is escaped.

    Paragraphs of Markdown are separated by one empty line.
    """
    suffix = template.split(".")[1]
    text = _environment(suffix).get_template(template).render(**content)
    return text if suffix == "html" else re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@cache
def _environment(suffix: str) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=partial(_shown, suffix),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"markdown": markdown, "capitalised": capitalised}
    return environment


def _shown(suffix: str, value: Any) -> Any:
    """A value of a template with its spans. jinja2 escapes other text of HTML; Markdown escapes all but numbers."""
    if isinstance(value, tuple):
        return Markup().join(_shown(suffix, part) for part in value)
    if not isinstance(value, Span):
        is_ready = suffix == "html" or isinstance(value, Markup | int | float | None)
        return value if is_ready else markdown_text(str(value))
    address = f"{value.address}.{suffix}" if value.kind == "page" else value.address
    line = one_line(value.text)
    if suffix == "html":
        text = line if value.kind in ("code", "command") else value.text
        return Markup(SPANS[value.kind]).format(text, address=address)
    if value.kind == "code":
        return markdown_code(value.text)
    if value.kind == "strong":
        return Markup(f"**{markdown_text(value.text)}**")
    if value.kind == "command":
        return Markup(f"```bash\n{line}\n```")
    return Markup(f"[{markdown_text(value.text)}]({markdown_text(address)})")
