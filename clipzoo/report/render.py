"""Tables and pages as Markdown, HTML, CSV, LaTeX and text for the terminal."""

from __future__ import annotations

import base64
import csv as csv_module
import io
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup
from matplotlib.figure import Figure

from clipzoo.io import MB, below, read_bytes, write_whole
from clipzoo.io.text import draw, latex_text, markdown_code, markdown_text, one_line
from clipzoo.report.table import Cell, Table, capitalised

TEMPLATES = Path(__file__).parent / "templates"


def markdown(table: Table) -> Markup:
    """A Markdown table, without its title."""
    dashes = ["---" if heading.align == "left" else "---:" for heading in table.headings]
    rows = [[_markdown_cell(cell) for cell in row.cells] for row in table.rows]
    lines: list[list[str]] = [[markdown_text(heading.label) for heading in table.headings], dashes, *rows]
    return Markup("\n".join("| " + " | ".join(line) + " |" for line in lines))


def html(table: Table, wrap: bool = False) -> Markup:
    """An HTML table, without its title. wrap: break long cells."""
    return Markup(html_page("table.html.j2", table=table, wrap=wrap))


def csv(table: Table) -> str:
    """Comma-separated values, notes left out."""
    text = io.StringIO()
    writer = csv_module.writer(text, lineterminator="\n")
    writer.writerow(heading.label for heading in table.headings)
    writer.writerows([cell.text for cell in row.cells] for row in table.rows)
    return text.getvalue()


def latex(table: Table, rotate: bool = False) -> str:
    """A booktabs table with its title as caption. rotate: turn the heads of right-aligned columns by 90 degrees."""
    heads = [
        capitalised(label) if heading.align == "left" else f"\\rotatebox{{90}}{{{label}}}" if rotate else label
        for heading in table.headings
        for label in [latex_text(heading.label)]
    ]
    alignment = "".join(heading.align[0] for heading in table.headings)
    lines = ["\\begin{table}", "\\centering", "\\small", f"\\caption{{{latex_text(table.title)}}}"]
    lines += [f"\\begin{{tabular}}{{{alignment}}}", "\\toprule", f"{' & '.join(heads)} \\\\"]
    for number, row in enumerate(table.rows):
        if row.starts or number == 0:
            lines.append("\\midrule")
        lines.append(" & ".join(latex_text(_noted(cell)) for cell in row.cells) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


def terminal(table: Table) -> str:
    """Columns padded with spaces, without heads that are empty."""
    heads = [heading.label for heading in table.headings]
    rows = [heads] * any(heads) + [[_noted(cell) for cell in row.cells] for row in table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]

    def padded(row: list[str]) -> Iterator[str]:
        for text, width, heading in zip(row, widths, table.headings, strict=True):
            yield text.ljust(width) if heading.align == "left" else text.rjust(width)

    return "\n".join("  ".join(padded(row)).rstrip() for row in rows)


def markdown_page(template: str, **content: object) -> str:
    """Render a Markdown template of the folder `templates`; all text is escaped.

    Paragraphs are separated by one empty line.
    """
    text = _environment("md").get_template(template).render(**content)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def html_page(template: str, **content: object) -> str:
    """Render an HTML template of the folder `templates`; all text is escaped."""
    return _environment("html").get_template(template).render(**content)


def write_document(path: Path, template: str, title: str, **content: object) -> Path:
    """Write a page in both formats from one template, `path` and beside it its .html with the pictures in it.

    path: of the Markdown page, to whose folder the addresses of pictures are relative. template: of the page's body;
    its blocks are those of blocks.md.j2 and blocks.html.j2. Returns `path`.
    """
    body = markdown_page(template, blocks="blocks.md.j2", **content)
    write_whole(path, f"# {markdown_text(title)}\n\n{body}".strip() + "\n")
    text = html_page(template, blocks="blocks.html.j2", folder=path.parent, **content)
    write_whole(path.with_suffix(".html"), html_page("document.html.j2", title=title, body=Markup(text)))
    return path


def picture(figure: Figure) -> str:
    """The figure as a data: address, for a page that needs no other file."""
    data = io.BytesIO()
    draw(figure, data)
    return _png(data.getvalue())


def _png(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@pass_context
def _embedded(context: Context, address: str) -> str:
    """The picture at an address relative to the page's folder, as a data: address."""
    return _png(read_bytes(below(context["folder"], address), 64 * MB))


@cache
def _environment(kind: Literal["md", "html"]) -> Environment:
    is_html = kind == "html"
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=None if is_html else _markdown_value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"markdown": markdown, "html": html, "capitalised": capitalised, "embedded": _embedded}
    environment.filters |= {
        "shown": html if is_html else markdown,
        "code": _html_code if is_html else markdown_code,
        "line": one_line if is_html else lambda text: Markup(one_line(text)),
    }
    return environment


def _html_code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(one_line(text))


def _noted(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def _markdown_value(value: object) -> object:
    """A value of a Markdown template: anything but a number is escaped, unless a filter has made it Markdown."""
    return value if isinstance(value, Markup | int | float | None) else markdown_text(str(value))


def _markdown_cell(cell: Cell) -> str:
    text = _noted(cell)
    if not text:
        return ""
    shown = markdown_code(text, in_table=True) if cell.code else markdown_text(text)
    return f"**{shown}**" if cell.bold else shown
