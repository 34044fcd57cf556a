"""Figures drawn without a display and without global state."""

from __future__ import annotations

from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette, distinguishable with every form of colour vision.
BLACK, ORANGE, BLUE, GREEN, VERMILION, PURPLE, SKY = (
    "#000000", "#e69f00", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#56b4e9",
)  # fmt: skip
CYCLE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)


def panels(
    rows: int, columns: int, width: float = 3.4, height: float = 2.8, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its rows * columns axes, row by row. width, height: size of one panel in inches."""
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        if rcParams["axes.spines.top"]:
            axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)
