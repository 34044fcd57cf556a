"""Figures of what `clipzoo.diagnostics` found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def sample_histograms(summary: Mapping[str, Any]) -> Figure:
    """One panel for each statistic of `summarise_samples`: its histogram over the samples seen, with the mean."""
    figure = Figure(figsize=(4.2 * max(1, len(summary)), 3.0), layout="constrained")
    axes = figure.subplots(1, max(1, len(summary)), squeeze=False)[0]
    for panel, (name, values) in zip(axes, summary.items(), strict=False):
        _histogram(panel, name, values)
    return figure


def _histogram(axes: Axes, name: str, values: Mapping[str, Any]) -> None:
    axes.stairs(values["counts"], values["edges"], fill=True, color="#4878a8")
    axes.axvline(values["mean"], color="#b04030", linewidth=1, label=f"mean {values['mean']:.3g}")
    axes.set_xlabel(name.replace("_", " "))
    axes.set_ylabel("samples")
    axes.set_title(f"{values['seen']:,} samples seen", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
