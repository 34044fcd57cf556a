"""The pictures of a run's page. Each function gives a matplotlib figure; none uses the global state of pyplot."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, RIGHT, WRONG = "#24425c", "#9db4c6", "#2e8b57", "#c0503c"
DPI = 130
NOT_CURVES = {"step", "epoch", "seconds", "event", "forward", "backward", "optimizer", "peak_memory_mib"}
FIRST_CURVES = ("loss", "lr", "temperature", "gamma", "gradient_norm", "samples_per_second", "data_wait")
LABELS = {
    "lr": "learning rate",
    "gradient_norm": "gradient norm",
    "samples_per_second": "samples/s",
    "data_wait": "share of time waiting for data",
    "flops_utilisation": "share of the device's arithmetic",
}
MOST_NUMBERS = 20
"""Classes up to which a confusion matrix is written in numbers."""


def training_curves(lines: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel for each number of metrics.jsonl that changed, the loss first."""
    found = dict.fromkeys(key for line in lines for key, value in line.items() if isinstance(value, int | float))
    keys = [key for key in FIRST_CURVES if key in found]
    keys += [key for key in found if key not in keys and key not in NOT_CURVES and _varies(lines, key)]
    columns = min(3, len(keys)) or 1
    rows = math.ceil(len(keys) / columns) or 1
    figure = Figure(figsize=(3.7 * columns, 2.6 * rows), dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, key in zip(panels, keys, strict=False):
        points = [(line["step"], line[key]) for line in lines if isinstance(line.get(key), int | float)]
        _curve(panel, *zip(*points, strict=True))
        panel.set_title(LABELS.get(key, key.replace("_", " ")), fontsize=10, color=INK)
        panel.set_xlabel("step", fontsize=8)
    for panel in panels[len(keys) :]:
        panel.set_visible(False)
    return figure


def evaluation_curves(evaluations: Sequence[Mapping[str, Any]]) -> Figure:
    """Zero-shot top-1 and recall@1 as training went on, a line a set."""
    figure = Figure(figsize=(9, 3.2), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    for panel, ending, title in ((left, "/top1", "zero-shot top-1, %"), (right, "/recall_at_1", "recall@1, %")):
        start = "zero_shot/" if ending == "/top1" else "retrieval/"
        keys = [key for key in evaluations[-1] if key.startswith(start) and key.endswith(ending)]
        for key in keys:
            points = [(each["step"], each[key]) for each in evaluations if key in each]
            name = " ".join(key.split("/")[1:-1]).replace("_", " ")
            panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        _plain(panel)
        panel.set_title(title, fontsize=10, color=INK)
        panel.set_xlabel("step", fontsize=8)
        if keys:
            panel.legend(frameon=False, fontsize=7)
    return figure


def confusion_matrix(found: Mapping[str, Any]) -> Figure:
    """Shares of each true class (a row) by predicted class; written in numbers where there are few classes."""
    counts, names = found["confusion"], [str(name) for name in found["class_names"]]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    few = len(names) <= MOST_NUMBERS
    side = 2.2 + 0.42 * len(names) if few else 6.4
    figure = Figure(figsize=(side + 0.8, side), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel("predicted", fontsize=9)
    axes.set_ylabel("true", fontsize=9)
    if few:
        short = [textwrap.shorten(name, 18, placeholder="…") for name in names]
        axes.set_xticks(range(len(names)), short, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
        axes.set_yticks(range(len(names)), short, fontsize=8)
        for row, column in np.argwhere(shares >= 0.005):
            share = shares[row, column]
            text = f"{100 * share:.0f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if share > 0.55 else INK)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(shown, ax=axes, shrink=0.7, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["0", "50", "100 %"], fontsize=8)
    bar.outline.set_visible(False)  # type: ignore[operator]
    return figure


def mistakes(found: Mapping[str, Any]) -> Figure:
    """The most confident mistakes: above each what it was taken for, below it what it is."""
    names, count = found["class_names"], len(found["images"])
    columns = min(6, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(1.55 * columns, 1.95 * rows), dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, image, label, chosen in zip(
        panels, found["images"], found["labels"], found["predictions"], strict=False
    ):
        _picture(panel, image, None)
        title = textwrap.shorten(str(names[chosen]), 22, placeholder="…")
        truth = textwrap.shorten(str(names[label]), 22, placeholder="…")
        panel.set_title(title, fontsize=8, color=WRONG, pad=3)
        panel.set_xlabel(f"is {truth}", fontsize=8, color=RIGHT, labelpad=3)
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure


def retrieved(found: Mapping[str, Any]) -> Figure:
    """A row a caption: its text, where its own picture stands, and the pictures it finds."""
    rows, columns = found["found"].shape
    figure = Figure(figsize=(2.9 + 1.3 * columns, 1.42 * rows), dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns + 1, squeeze=False, width_ratios=[2.1, *[1] * columns])
    for row in range(rows):
        words, place = str(found["captions"][row]), int(found["place"][row]) + 1
        text = panels[row, 0]
        text.axis("off")
        lines = textwrap.wrap(words, 30)[:5]
        text.text(1, 0.56, "\n".join(lines), ha="right", va="center", fontsize=9, color=INK, transform=text.transAxes)
        note = f"its own picture is number {place:,}"
        below = 0.56 - 0.09 * len(lines) - 0.08
        colour = RIGHT if place == 1 else MUTED
        text.text(1, below, note, ha="right", va="top", fontsize=7, color=colour, transform=text.transAxes)
        for column in range(columns):
            own = found["found"][row, column] == found["owner"][row]
            _picture(panels[row, column + 1], found["images"][row, column], RIGHT if own else None)
    return figure


def _picture(panel: Axes, image: np.ndarray, frame: str | None) -> None:
    panel.imshow(image)
    panel.set_xticks([])
    panel.set_yticks([])
    panel.spines[:].set_visible(frame is not None)
    if frame is not None:
        panel.spines[:].set(color=frame, linewidth=3.5)


def _curve(panel: Axes, steps: Sequence[float], values: Sequence[float]) -> None:
    """The values; where they are many and noisy, thinly, with their running mean above them."""
    line = np.asarray(values, float)
    noisy = np.abs(np.diff(line)).sum() > 3 * np.ptp(line)
    if len(line) < 30 or not noisy:
        panel.plot(steps, line, color=INK, linewidth=1.6)
    else:
        panel.plot(steps, line, color=MUTED, linewidth=0.7)
        # The mean of the values around each step, as many before as behind it; too few make no mean.
        window, places = len(line) // 30 + 1, np.arange(len(line))
        reach = np.minimum(window, np.minimum(places, len(line) - 1 - places))
        sums = np.concatenate([[0.0], line.cumsum()])
        mean = (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)
        enough = 2 * reach >= window
        panel.plot(np.asarray(steps)[enough], mean[enough], color=INK, linewidth=1.6)
    _plain(panel)


def _plain(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(MUTED)
    panel.tick_params(labelsize=8, color=MUTED)
    panel.grid(axis="y", color="#e8edf1", linewidth=0.8)
    panel.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useMathText=True)
    panel.yaxis.get_offset_text().set_fontsize(7)


def _varies(lines: Sequence[Mapping[str, Any]], key: str) -> bool:
    return len({line[key] for line in lines if key in line}) > 1
