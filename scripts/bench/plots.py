"""Plots of the benchmark of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from bench.recording import Row
from clipzoo.report.figures import DPI, colour, label, style

Panel = tuple[str, str, float, str]
"""Title, key of the values, their factor, and the format of a bar's label."""
STEP: tuple[Panel, ...] = (
    ("step, ms", "seconds", 1000, "%.3g"), ("peak memory, GiB", "peak_mib", 1 / 1024, "%.3g"),
    ("TFLOP/s", "tflops", 1, "%.3g"),
)  # fmt: skip
SUM: tuple[Panel, ...] = (
    ("ms", "seconds", 1000, "%.3g"), ("extra memory, GiB", "extra_mib", 1 / 1024, "%.3g"),
    ("TFLOP/s", "tflops", 1, "%.3g"),
)  # fmt: skip
BARS: dict[str, tuple[Panel, ...]] = {
    "kernels": (
        ("error of values / bound", "value_share", 1, "%.2g"),
        ("of gradients / bound", "gradient_share", 1, "%.2g"),
    ),
    "heads": STEP,
    "captions": STEP,
    "compile": STEP,
    "objectives": SUM,
    "scores": SUM,
    "loader": (("samples/s", "samples_per_second", 1, "%.4g"),),
    "probe_values": (("s", "seconds", 1, "%.2g"), ("iterations", "iterations", 1, "%.0f")),
}
"""Table of the rows -> the panels of its plot."""
PLOTS = tuple(f"{name}.png" for name in BARS)


def write_plots(folder: Path, rows: Iterable[Row]) -> dict[str, Path]:
    """Draw the tables that have numbers -> their files."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row["table"], []).append(row)
    drawn = {}
    for name, panels in BARS.items():
        measured = [row for row in tables.get(name, []) if panels[0][1] in row]
        if measured:
            drawn[name] = folder / f"{name}.png"
            _bars(drawn[name], measured, panels)
    return drawn


def _bars(path: Path, rows: list[Row], panels: Iterable[Panel]) -> None:
    """A bar for each row, in one panel for each quantity; quantities that were not measured are left out."""
    from matplotlib.figure import Figure

    shown = [panel for panel in panels if any(row.get(panel[1]) is not None for row in rows)]
    figure = Figure(figsize=(4.6 + 2.6 * len(shown), 0.32 * len(rows) + 0.9), layout="constrained")
    colours = _colours(rows)
    for axes, (title, key, factor, form) in zip(
        figure.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown, strict=True
    ):
        values = [factor * (row.get(key) or 0.0) for row in rows]
        bars = axes.barh([row["name"] for row in rows], values, color=colours)
        axes.bar_label(bars, fmt=form, padding=3, fontsize=7)
        axes.margins(x=0.2, y=0.01)
        label(axes, title)
        style(axes, grid="x")
    figure.axes[0].invert_yaxis()
    figure.savefig(path, dpi=DPI)


def _colours(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """open_clip in one colour, forms with a matrix in another."""
    kinds = {"open_clip": 1, "matrix": 2, "naive": 2}
    return [colour(next((kind for word, kind in kinds.items() if word in str(row["name"])), 0)) for row in rows]
