"""Figures of a lab: differences with intervals, agreement with the PMI, accuracy against cost, learning curves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clipzoo.report.drawing import DPI, INK, MUTED, RIGHT, WRONG, colour, label, style
from clipzoo.report.lab.claims import Difference
from clipzoo.report.lab.records import Compared, Method
from clipzoo.report.lab.tables import pareto
from clipzoo.report.statistics.intervals import over_seeds

LINE = 0.3
"""Height of a method's line, in inches."""


def difference_figure(found: Sequence[Difference], baseline: str) -> Figure:
    """Differences of all comparisons from the baseline; coloured where they are separated."""
    names = list(dict.fromkeys(item.comparison for item in found))
    counts = [sum(item.comparison == name for item in found) for name in names]
    figure = Figure(figsize=(9, LINE * len(found) + 0.62 * len(names) + 0.4), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(names), 1, squeeze=False, sharex=True, height_ratios=counts).flatten()
    for panel, name in zip(panels, names, strict=True):
        mine = [item for item in found if item.comparison == name]
        for place, item in enumerate(mine):
            shade = MUTED if not item.is_separated else RIGHT if item.interval.estimate > 0 else WRONG
            panel.plot([item.interval.low, item.interval.high], [place, place], color=shade, linewidth=2)
            panel.plot(item.interval.estimate, place, "o", color=shade, markersize=6)
        _lines(panel, [item.method for item in mine])
        panel.axvline(0, color=INK, linewidth=1)
        label(panel, name, size=9)
    panels[-1].set_xlabel(f"accuracy less that of {baseline}, percent points (95 % over seeds)", fontsize=8)
    return figure


def similarity_figure(compared: Compared) -> Figure:
    """How well scores follow the PMI: a panel for each measure, a line for each method, a dot for each seed."""
    panels = (("rank_correlation", "rank correlation", 1.0), ("slope", "slope of the PMI on the score", 1.0),
              ("error", "error, nats", 0.0))  # fmt: skip
    methods = compared.methods
    figure = Figure(figsize=(11, LINE * len(methods) + 0.9), dpi=DPI, layout="constrained")
    for panel, (metric, title, ideal) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        for place, method in enumerate(methods):
            interval = over_seeds(method.values(metric))
            panel.plot(method.values(metric), [place] * len(method.seeds), "o", color=MUTED, markersize=4)
            panel.plot([interval.low, interval.high], [place, place], color=INK, linewidth=1.5)
            panel.plot(interval.estimate, place, "|", color=INK, markersize=11, markeredgewidth=2)
        panel.axvline(ideal, color=RIGHT, linewidth=1, linestyle="--")
        _lines(panel, [method.name for method in methods])
        label(panel, title)
    return figure


def pareto_figure(compared: Compared) -> Figure:
    """Accuracy against three costs of a training; a line joins the methods that no cheaper one surpasses."""
    figure = Figure(figsize=(12, 4.0), dpi=DPI, layout="constrained")
    costs = (("flops", "GFLOPs of a training", 1e-9), ("processor", "CPU seconds of a training", 1.0))
    for panel, (name, title, factor) in zip(figure.subplots(1, 2, sharey=True), costs, strict=True):
        for number, method in enumerate(compared.methods):
            interval = over_seeds(method.values("accuracy"))
            half = interval.high - interval.estimate if np.isfinite(interval.high) else 0.0
            panel.errorbar(
                factor * method.cost(name), interval.estimate, half, fmt="os^Dv"[number // 10], color=colour(number),
                markersize=5, elinewidth=1, label=method.name,
            )  # fmt: skip
        front = sorted(pareto(compared.methods, name), key=lambda method: method.cost(name))
        points = [(factor * method.cost(name), over_seeds(method.values("accuracy")).estimate) for method in front]
        panel.plot(*zip(*points, strict=True), color=INK, linewidth=1, zorder=0)
        label(panel, "", title, "accuracy, %")
        style(panel)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    return figure


def curve_figure(compared: Compared) -> Figure:
    """Accuracy on validation over training: mean and standard deviation over seeds."""
    figure = Figure(figsize=(9, 4.0), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    for number, method in enumerate(compared.methods):
        steps, means, spreads = _band(method)
        panel.plot(steps, means, "os^Dv"[number // 10] + "-", color=colour(number), markersize=4, label=method.name)
        panel.fill_between(steps, means - spreads, means + spreads, color=colour(number), alpha=0.15, linewidth=0)
    label(panel, "", "step", "accuracy on validation, %")
    style(panel)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure


def _band(method: Method) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return steps, mean and standard deviation of the accuracy over seeds."""
    curves = np.array([[value for _, value in seed.curve] for seed in method.seeds])
    spread = curves.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros(curves.shape[1])
    return np.array([step for step, _ in method.seeds[0].curve]), curves.mean(axis=0), spread


def _lines(panel: Axes, names: Sequence[str]) -> None:
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_ylim(len(names) - 0.5, -0.5)
    style(panel, grid="x")
