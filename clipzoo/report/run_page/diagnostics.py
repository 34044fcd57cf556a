"""Figures of what `clipzoo.training.diagnostics` found."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread


def sample_histograms(summary: Mapping[str, Any]) -> Figure:
    """One panel for each statistic of `summarise_samples`: its histogram over the samples seen, with the mean."""
    figure = Figure(figsize=(4.2 * max(1, len(summary)), 3.0), layout="constrained")
    axes = figure.subplots(1, max(1, len(summary)), squeeze=False)[0]
    for panel, (name, values) in zip(axes, summary.items(), strict=False):
        _histogram(panel, name, values)
    return figure


def extreme_samples(summary: Mapping[str, Any], folder: Path, name: str, count: int = 8) -> Figure:
    """The samples where the statistic `name` is highest (first row) and lowest, from `diagnostics.write_examples`."""
    captions = json.loads((folder / "captions.json").read_text())
    figure = Figure(figsize=(1.5 * count, 4.4), layout="constrained")
    rows = figure.subplots(2, count, squeeze=False)
    for row, side in zip(rows, ("highest", "lowest"), strict=True):
        for panel in row:
            panel.axis("off")
        for panel, each in zip(row, summary[name][side][:count], strict=False):
            panel.imshow(imread(folder / f"{each['sample_id']}.png"))
            text = textwrap.shorten(captions[str(each["sample_id"])], 60, placeholder=" ...")
            panel.set_title(f"{each['value']:.2f}\n{textwrap.fill(text, 20)}", fontsize=7)
        row[0].text(-0.15, 0.5, side, transform=row[0].transAxes, rotation=90, va="center", fontsize=9)
    return figure


def _histogram(axes: Axes, name: str, values: Mapping[str, Any]) -> None:
    axes.stairs(values["counts"], values["edges"], fill=True, color="#4878a8")
    axes.axvline(values["mean"], color="#b04030", linewidth=1, label=f"mean {values['mean']:.3g}")
    axes.set_xlabel(name.replace("_", " "))
    axes.set_ylabel("samples")
    axes.set_title(f"{values['seen']:,} samples seen", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
