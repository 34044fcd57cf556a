"""Table and figure of scaling fits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from clipzoo.report.comparison.scaling import COMPUTE, Curve, Extrapolation, label as axis_label
from clipzoo.report.drawing import DPI, INK, colour, label, style
from clipzoo.report.statistics.intervals import Interval
from clipzoo.report.table import Cell, Table, text_table

NATS = re.compile("loss|PMI")
"""Quantities in nats; all others are in percent."""
PANELS = 3
"""Panels side by side."""
TITLE = 40
"""Characters of a line in the title of a panel."""


def lead(axis: str, curves: Sequence[Curve]) -> str:
    """Say what was fitted and how the held-out scales came out."""
    checked = [law for curve in curves for law in curve.laws]
    inside = sum(law.is_inside for law in checked)
    text = (
        f"Power laws in {axis_label(axis)} (x), fitted to all trainings but those of the largest scale, which is "
        "predicted from them: the interval holds the geometric mean of its trainings with 95 % probability if the law "
        f"continues. {inside} of {len(checked)} predictions hold the held-out scale."
    )
    if axis == COMPUTE:
        text += " Scales that a cheaper one surpasses are left out of the fit (hollow in the figure)."
    return text


def table(curves: Sequence[Curve]) -> Table:
    """Laws, exponents and the check on the held-out scale."""
    several = any(curve.method for curve in curves)
    heads = [
        "quantity",
        "law",
        "trainings",
        "exponent and 95 % interval",
        "held-out scale",
        "predicted",
        "measured",
        "inside",
    ]
    rows: list[list[str | Cell]] = [
        [
            *([curve.method] if several else []), curve.quantity, _law(law),
            str(sum(len(scale.values) for scale in curve.scales)), _interval(law.fit.exponent),
            f"{curve.held_out.x:.4g}", _interval(law.predicted), f"{curve.held_out.mean:.3g}",
            Cell("yes" if law.is_inside else "no", bold=not law.is_inside),
        ]
        for curve in curves
        for law in curve.laws
    ]  # fmt: skip
    return text_table(["method"] * several + heads, rows, left=2 + several)


def figure(curves: Sequence[Curve], axis: str) -> Figure:
    """A panel for each quantity: trainings, law and prediction interval, and the held-out scale as diamonds."""
    quantities = list(dict.fromkeys(curve.quantity for curve in curves))
    names = list(dict.fromkeys(curve.method for curve in curves))
    lines = -(-len(quantities) // PANELS)
    figure = Figure(figsize=(4.0 * min(PANELS, len(quantities)), 3.3 * lines + 0.3), dpi=DPI, layout="constrained")
    panels = figure.subplots(lines, min(PANELS, len(quantities)), squeeze=False).flatten()
    for panel, quantity in zip(panels, quantities, strict=False):
        for curve in (curve for curve in curves if curve.quantity == quantity):
            _draw(panel, curve, colour(names.index(curve.method)))
        panel.set_xscale("log")
        panel.set_yscale("log")
        label(panel, fill(quantity, TITLE), axis_label(axis), "nats" if NATS.search(quantity) else "%", size=9)
        style(panel)
        _readable(panel)
    for panel in panels[len(quantities) :]:
        panel.remove()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _draw(panel: Axes, curve: Curve, shade: str) -> None:
    prefix = f"{curve.method}: " if curve.method else ""
    for scales, marker, face, text in (
        (curve.scales, "o", shade, "trainings"),
        (curve.dropped, "o", "none", ""),
        ((curve.held_out,), "D", "none", "held-out scale"),
    ):
        points = [(scale.x, value) for scale in scales for value in scale.values]
        if points:
            panel.plot(
                *zip(*points, strict=True), marker, color=shade, markerfacecolor=face, markersize=4,
                label=prefix + text if text else None,
            )  # fmt: skip
    ends = curve.scales[0].x, curve.held_out.x
    grid = np.geomspace(ends[0], ends[1], 40)
    for law, line in zip(curve.laws, ("-", "--"), strict=False):
        values = [law.fit.law.value(float(x)) for x in grid]
        name = "law with a floor" if law.fit.law.floor else "power law"
        panel.plot(grid, values, line, color=shade if line == "-" else INK, linewidth=1.2, label=prefix + name)
    bands = [curve.laws[0].fit.predicted(float(x), runs=len(curve.held_out.values)) for x in grid]
    panel.fill_between(
        grid, [band.low for band in bands], [band.high for band in bands], color=shade, alpha=0.15, linewidth=0,
        label=prefix + "95 % prediction interval",
    )  # fmt: skip


def _readable(panel: Axes) -> None:
    """Write plain numbers on axes of less than two decades, whose powers of ten alone would be too few ticks."""
    for axis, (low, high) in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, panel.get_ylim())):
        if high / low < 100:
            places = [base * 10**power for power in range(-3, 19) for base in (1, 1.5, 2, 3, 4, 5, 6, 8)]
            shown = [place for place in places if low <= place <= high]
            if len(shown) < 2:  # less than an octave: equal distances serve as well
                shown = [float(place) for place in MaxNLocator(4).tick_values(low, high) if low <= place <= high]
            shown = shown[:: max(1, -(-len(shown) // 6))]
            axis.set_ticks(shown, [f"{place:,.0f}" if 1e3 <= place < 1e6 else f"{place:.4g}" for place in shown])
            axis.set_ticks([], minor=True)


def _law(law: Extrapolation) -> str:
    formula = f"{law.fit.law.factor:.3g} x^{-law.fit.law.exponent:.3g}"
    return f"{law.fit.law.floor:.3g} + {formula}" if law.fit.law.floor else formula


def _interval(interval: Interval) -> str:
    return f"{interval.estimate:.3g} [{interval.low:.3g}, {interval.high:.3g}]"
