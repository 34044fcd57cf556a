"""SVG figures that are readable on a light and on a dark page."""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

IMAGES = Path(__file__).parents[2] / "docs" / "images"
INK = "#010203"
"""Colour of texts and axes; becomes black or white with the theme of the page."""
BLUE, ORANGE, GREEN, VIOLET, RED = "#4c86e8", "#e08a3c", "#3fa37a", "#9b7bd8", "#d9605a"
SCORES = LinearSegmentedColormap.from_list("scores", ["#27437c", "#4c86e8", "#a8c4f2", "#f3e3c3", "#e9a657", "#c8562f"])
SIGNED = LinearSegmentedColormap.from_list("signed", ["#2f6fdb", "#8fb3ee", "#f4f2ee", "#eda98c", "#c9432f"])
THEME = "<style>svg{color:#24292f} @media (prefers-color-scheme: dark){svg{color:#e2e4e9}}</style>"


def figure(width: float, height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a transparent figure with panels side by side. width, height: inches."""
    matplotlib.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "clipzoo", "font.family": "sans-serif", "font.size": 9,
        "font.sans-serif": ["DejaVu Sans"], "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK,
        "xtick.color": INK, "ytick.color": INK, "axes.titlesize": 10,
    })  # fmt: skip
    drawn = Figure(figsize=(width, height), layout="constrained")
    drawn.patch.set_alpha(0)
    axes = list(drawn.subplots(1, panels, squeeze=False)[0])
    for panel in axes:
        panel.patch.set_alpha(0)
        panel.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def save(drawn: Figure, name: str) -> None:
    """Write docs/images/<name>.svg. Colours of the theme replace INK; the font is that of the reader's system."""
    stream = io.StringIO()
    drawn.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue().replace(INK, "currentColor").replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans'")
    text = re.sub(r"(<svg [^>]*>)", rf"\1{THEME}", text, count=1)
    text = re.sub(r"[ \t]+$", "", text[text.index("<svg") :], flags=re.MULTILINE)
    path = IMAGES / f"{name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
