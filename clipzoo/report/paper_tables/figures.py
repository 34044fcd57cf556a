"""Figures of the papers' tables: bars per dataset, and curves over the size of the point set."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clipzoo.report.drawing import DPI, INK, MUTED, colour, label, style
from clipzoo.report.paper_tables.filled import FilledRow, FilledTable
from clipzoo.report.paper_tables.published import PaperColumn
from clipzoo.report.table import capitalised

Value = Callable[[FilledTable, FilledRow, PaperColumn], float | None]


def figures(filled: FilledTable) -> Iterator[tuple[str, Figure]]:
    """Yield description and figure of each picture of a table."""
    columns = filled.table.columns
    if any(point_set_size(row) for row in filled.rows):
        for column in columns:
            if column.label != "GPUs":
                title = f"{filled.table.short_heading}: {column.label}"
                yield title, point_set_curves(filled, column, title)
    elif filled.table.numbers and len(columns) > 1:
        measured = {column for row in filled.rows for column in columns if row.measurement(column)}
        for task in dict.fromkeys(column.heading for column in columns):
            part = [column for column in columns if column.heading == task]
            # Once there are runs, a task that none of them was evaluated on needs no figure.
            if not measured or measured.intersection(part):
                yield f"bars, {task}", published_bars(filled, part)


def published_bars(filled: FilledTable, columns: Sequence[PaperColumn]) -> Figure:
    """A panel per pretraining dataset with runs: published numbers as outlines, ours filled, one colour per model."""
    drawn = [row for row in filled.rows if row.ours] or filled.rows
    datasets = list(dict.fromkeys(row.row.pretrain for row in drawn))
    width = max(6.5, 0.62 * len(columns) * max(1, len(filled.rows) / len(datasets)) + 1.5)
    figure = Figure(figsize=(min(width, 15), 2.7 * len(datasets) + 0.4), dpi=DPI, layout="constrained")
    for panel, dataset in zip(figure.subplots(len(datasets), 1, squeeze=False).flatten(), datasets, strict=True):
        rows = [row for row in filled.rows if row.row.pretrain == dataset]
        for number, row in enumerate(rows):
            _bars(panel, filled, row, columns, number, len(rows))
        panel.set_xticks(range(len(columns)), [column.label for column in columns], rotation=30, ha="right", fontsize=8)
        title = f"{capitalised(columns[0].heading)} after {dataset}: published (outline), ours (filled)"
        label(panel, title, y="%")
        panel.margins(x=0.01)
        panel.set_ylim(0, 1.12 * panel.get_ylim()[1])
        panel.legend(frameon=False, fontsize=8, ncols=6, loc="upper left")
        style(panel)
    return figure


def point_set_curves(filled: FilledTable, column: PaperColumn, title: str) -> Figure:
    """A metric over the number of image points; rows without point sets are horizontal lines."""
    figure = Figure(figsize=(6.2, 3.2), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    sized = [(size, row) for row in filled.rows if (size := point_set_size(row))]
    sources: list[tuple[str, str, str, Value]] = [("published", MUTED, "s", _published), ("ours", INK, "o", _ours)]
    for source, ink, marker, value in sources:
        points = [(size, y) for size, row in sized if (y := value(filled, row, column)) is not None]
        if points:
            sizes, values = zip(*points, strict=True)
            panel.plot(sizes, values, color=ink, marker=marker, linewidth=1.6, label=f"KME-CLIP, {source}")
        for row in filled.rows:
            level = value(filled, row, column)
            if not point_set_size(row) and level is not None:
                panel.axhline(level, color=ink, linestyle="--", linewidth=1.2, label=f"{row.row.model}, {source}")
    panel.set_xscale("log")
    panel.set_xticks([size for size, _ in sized], [str(size) for size, _ in sized])
    panel.minorticks_off()
    label(panel, title, "image points", column.label if column.is_cost else f"{column.label}, %")
    panel.legend(frameon=False, fontsize=8)
    style(panel)
    return figure


def point_set_size(row: FilledRow) -> int | None:
    """Number of image points in the printed name of a row."""
    size = re.search(r"\(point set size (\d+)\)", row.row.model)
    return int(size[1]) if size else None


def _bars(
    panel: Axes, filled: FilledTable, row: FilledRow, columns: Sequence[PaperColumn], number: int, count: int
) -> None:
    width = 0.82 / count
    left = np.arange(len(columns)) - 0.41 + width * (number + 0.5)
    published = [_height(_published(filled, row, column)) for column in columns]
    ours = [_height(_ours(filled, row, column)) for column in columns]
    panel.bar(left, published, 0.92 * width, facecolor="none", edgecolor=colour(number), linewidth=1.1)
    panel.bar(left, ours, 0.62 * width, color=colour(number), label=row.row.model)


def _published(filled: FilledTable, row: FilledRow, column: PaperColumn) -> float | None:
    number = filled.number(row, column)
    return number.value if number else None


def _ours(_: FilledTable, row: FilledRow, column: PaperColumn) -> float | None:
    ours = row.measurement(column)
    return ours.mean if ours else None


def _height(value: float | None) -> float:
    return np.nan if value is None else value
