"""Figures of the studies: their colours, panels and lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Drawing = tuple[Figure, str]
"""A figure and its caption."""
# Okabe and Ito's palette, distinguishable with every form of colour vision.
BLACK, ORANGE, BLUE, GREEN, VERMILION, PURPLE, SKY = (
    "#000000", "#e69f00", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#56b4e9",
)  # fmt: skip
CYCLE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)


def line(draw: Callable, rows: Sequence[Mapping[str, Any]], x: str, y: str, *style: str, **options: Any) -> None:
    """Draw column y of a table over column x. draw: method of the axes, such as `axis.loglog`."""
    draw([row[x] for row in rows], [row[y] for row in rows], *style, **options)


def ticks_at(axis: Axes, values: Sequence[float], **options: Any) -> None:
    """Put ticks on a logarithmic x axis at these values only."""
    axis.set_xticks(values, [str(value) for value in values], **options)
    axis.minorticks_off()


def panels(
    rows: int, columns: int, width: float = 3.4, height: float = 2.8, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its rows * columns axes, row by row. width, height: size of one panel in inches."""
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes
