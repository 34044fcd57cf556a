"""Colours and axes that all figures of the reports share."""

from __future__ import annotations

from typing import Literal

from matplotlib.axes import Axes

INK, MUTED, RIGHT, WRONG = "#303f9f", "#9fa8da", "#2e8b57", "#c0503c"
PALETTE = ("#303f9f", "#c0503c", "#d99a2b", "#2e8b57", "#7a5ba6", "#3c9cc0", "#8a6d4f", "#b8609a", "#7f8c8d", "#5c7a29")
DPI = 130


def style(panel: Axes, grid: Literal["x", "y"] = "y") -> None:
    """Remove the upper and right frame and draw light grid lines."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(MUTED)
    panel.tick_params(labelsize=8, color=MUTED)
    panel.set_axisbelow(True)
    panel.grid(axis=grid, color="#e8edf1", linewidth=0.8)


def label(panel: Axes, title: str, x: str = "", y: str = "", size: int = 10) -> None:
    """Set title and axis labels. size: font size of the title."""
    panel.set_title(title, fontsize=size, color=INK, loc="left")
    panel.set_xlabel(x, fontsize=8)
    panel.set_ylabel(y, fontsize=8)


def colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]
