"""The model of a table in a report. `clipzoo.report.render` writes it in every format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


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
    """Text of a cell. note: small print behind it. code: shown as code. mark: space-separated styles of the pages.

    bold: the best value, where the format has no style of its own.
    """

    text: str
    note: str = ""
    code: bool = False
    bold: bool = False
    mark: str = ""


@dataclass(frozen=True)
class Row:
    """Cells of a row. kind: style of the row in the pages. starts: first row of a group, separated from the others."""

    cells: tuple[Cell, ...]
    kind: str = ""
    starts: bool = False


@dataclass(frozen=True)
class Table:
    """Rows below headings. title: what the table shows, without formatting."""

    headings: tuple[Heading, ...]
    rows: tuple[Row, ...]
    title: str = ""

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


def text_table(labels: Sequence[str], rows: Sequence[Sequence[str | Cell]], left: int, title: str = "") -> Table:
    """A table of plain cells.

    Args:
        labels: heads of the columns.
        rows: one text or cell per column.
        left: number of left-aligned columns; the others are right-aligned.
    """
    headings = tuple(
        Heading(label, "left" if index < left else "right", wrap=True) for index, label in enumerate(labels)
    )
    cells = [tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in rows]
    return Table(headings, tuple(Row(row) for row in cells), title)


def capitalised(text: str) -> str:
    """The text with a capital first letter, the rest unchanged."""
    return text[:1].upper() + text[1:]
