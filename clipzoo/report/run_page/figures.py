"""Figures of a run's page. Each function returns a matplotlib figure; none uses pyplot's global state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clipzoo.io.text import shorten, wrap
from clipzoo.report.drawing import DPI, INK, MUTED, RIGHT, WRONG, label, style
from clipzoo.report.run_page import curves
from clipzoo.report.run_page.arrays import Arrays
from clipzoo.runs.training_log import Line

MOST_NUMBERS = 20
"""Largest number of classes whose confusion matrix has its percentages written in."""
MOST_NAMES = 40
"""Largest number of classes whose confusion matrix has their names."""


def training_curves(
    lines: Sequence[Line], loss_unit: str = "", evaluations: Sequence[Line] = (), value_log: str = "loss"
) -> Figure:
    """A panel per varying number of metrics.jsonl, the loss first.

    evaluations: their validation losses are drawn in the panel of the number `value_log`.
    """
    shown = curves.training_curves(lines, loss_unit)
    columns = min(3, len(shown)) or 1
    rows = math.ceil(len(shown) / columns) or 1
    figure = Figure(figsize=(3.7 * columns, 2.6 * rows), dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, curve in zip(panels, shown, strict=False):
        _curve(panel, np.array(curve.steps), np.array(curve.values))
        validation = curves.validation_curve(evaluations)
        if curve.name == value_log and validation.steps:
            panel.lines[-1].set_label("training")
            panel.plot(validation.steps, validation.values, color=RIGHT, marker="o", markersize=3, label="validation")
            panel.legend(frameon=False, fontsize=7)
        label(panel, curve.title, "step", curve.unit)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    return figure


def evaluation_curves(evaluations: Sequence[Line]) -> Figure:
    """Zero-shot top-1 and recall@1 during training, a line per dataset."""
    figure = Figure(figsize=(9, 3.2), dpi=DPI, layout="constrained")
    shown = curves.evaluation_curves(evaluations)
    for panel, title in zip(figure.subplots(1, 2), curves.METRICS.values(), strict=True):
        for curve in shown:
            metric, dataset = curve.title.split(", ", 1)
            if metric == title:
                panel.plot(curve.steps, curve.values, marker="o", markersize=3, label=dataset)
        _ticks(panel)
        label(panel, title, "step", "%")
        if panel.lines:
            panel.legend(frameon=False, fontsize=7)
    return figure


def confusion_matrix(arrays: Arrays) -> Figure:
    """Fractions of each true class (a row) by predicted class."""
    counts, names = arrays["confusion"], [str(name) for name in arrays["class_names"]]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    named, few = len(names) <= MOST_NAMES, len(names) <= MOST_NUMBERS
    side = 2.2 + (0.42 if few else 0.24) * len(names) if named else 6.4
    figure = Figure(figsize=(side + 0.8, side), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    image = panel.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    panel.set_xlabel("predicted class", fontsize=9)
    panel.set_ylabel("true class", fontsize=9)
    if named:
        short = [shorten(name, 18) for name in names]
        panel.set_xticks(range(len(names)), short, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
        panel.set_yticks(range(len(names)), short, fontsize=8)
    if few:
        for row, column in np.argwhere(shares >= 0.005):
            share = shares[row, column]
            ink = "white" if share > 0.55 else INK
            panel.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=ink)
    panel.tick_params(length=0, labelsize=8)
    panel.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=panel, shrink=0.7, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["0", "50", "100 %"], fontsize=8)
    bar.outline.set_visible(False)  # type: ignore[operator]
    return figure


def mistakes(arrays: Arrays) -> Figure:
    """The most confident errors: the predicted class above each image, the true class below."""
    names, count = arrays["class_names"], len(arrays["images"])
    columns = min(6, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(1.55 * columns, 1.95 * rows), dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    samples = zip(arrays["images"], arrays["labels"], arrays["predictions"], strict=True)
    for panel, (image, true, predicted) in zip(panels, samples, strict=False):
        _image(panel, image)
        panel.set_title(shorten(str(names[predicted]), 22), fontsize=8, color=WRONG, pad=3)
        truth = shorten(str(names[true]), 22)
        panel.set_xlabel(f"is {truth}", fontsize=8, color=RIGHT, labelpad=3)
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure


def retrieved(arrays: Arrays) -> Figure:
    """A row per caption: its text, the rank of its own image, and the images it retrieves, best first."""
    rows, columns = arrays["found"].shape
    figure = Figure(figsize=(2.9 + 1.3 * columns, 1.42 * rows), dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns + 1, squeeze=False, width_ratios=[2.1, *[1] * columns])
    for row in range(rows):
        _caption(panels[row, 0], str(arrays["captions"][row]), int(arrays["place"][row]) + 1)
        for column in range(columns):
            own = arrays["found"][row, column] == arrays["owner"][row]
            _image(panels[row, column + 1], arrays["images"][row, column], framed=bool(own))
    return figure


def _caption(panel: Axes, caption: str, rank: int) -> None:
    panel.axis("off")
    write = partial(panel.text, ha="right", transform=panel.transAxes)
    text = wrap(caption, 30, lines=5)
    write(1, 0.56, text, va="center", fontsize=9, color=INK)
    note, ink = f"its own image has rank {rank:,}", RIGHT if rank == 1 else MUTED
    write(1, 0.56 - 0.09 * (text.count("\n") + 1) - 0.08, note, va="top", fontsize=7, color=ink)


def _image(panel: Axes, image: np.ndarray, framed: bool = False) -> None:
    panel.imshow(image)
    panel.set_xticks([])
    panel.set_yticks([])
    panel.spines[:].set_visible(framed)
    if framed:
        panel.spines[:].set(color=RIGHT, linewidth=3.5)


def _curve(panel: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    """Draw the values; many noisy values thinly, below their running mean."""
    noisy = np.abs(np.diff(values)).sum() > 3 * np.ptp(values)
    if len(values) < 30 or not noisy:
        panel.plot(steps, values, color=INK, linewidth=1.6)
    else:
        panel.plot(steps, values, color=MUTED, linewidth=0.7)
        # Mean over a window centred on each step; a window cut short by an end has no mean.
        window, places = len(values) // 30 + 1, np.arange(len(values))
        reach = np.minimum(window, np.minimum(places, len(values) - 1 - places))
        sums = np.concatenate([[0.0], values.cumsum()])
        mean = (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)
        enough = 2 * reach >= window
        panel.plot(steps[enough], mean[enough], color=INK, linewidth=1.6)
    _ticks(panel)


def _ticks(panel: Axes) -> None:
    style(panel)
    panel.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useMathText=True)
    panel.yaxis.get_offset_text().set_fontsize(7)
