"""Figures of per-sample statistics: histograms, and the samples with extreme values."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from clipzoo.report.drawing import INK, WRONG

SIDES = ("highest", "lowest")


class Sample(TypedDict):
    """A sample and its value of a statistic."""

    sample_id: int
    value: float


class Statistic(TypedDict):
    """A per-sample statistic as `clipzoo.training.diagnostics.summarise_samples` writes it; edges: of the histogram."""

    seen: int
    mean: float
    counts: list[float]
    edges: list[float]
    highest: list[Sample]
    lowest: list[Sample]


def sample_histograms(summary: Mapping[str, Statistic]) -> Figure:
    """A panel per statistic: its histogram over the samples seen, with the mean."""
    count = max(1, len(summary))
    figure = Figure(figsize=(4.2 * count, 3.0), layout="constrained")
    for panel, (name, statistic) in zip(figure.subplots(1, count, squeeze=False)[0], summary.items(), strict=False):
        _histogram(panel, name, statistic)
    return figure


def extreme_samples(statistic: Statistic, folder: Path, count: int = 8) -> Figure:
    """The samples with the highest values (first row) and the lowest.

    folder: images by sample id, and captions.json, as `clipzoo.training.diagnostics.write_examples` leaves them.
    """
    captions = json.loads((folder / "captions.json").read_text())
    figure = Figure(figsize=(1.5 * count, 4.4), layout="constrained")
    rows = zip(
        figure.subplots(2, count, squeeze=False), SIDES, (statistic["highest"], statistic["lowest"]), strict=True
    )
    for panels, side, samples in rows:
        for panel in panels:
            panel.axis("off")
        for panel, sample in zip(panels, samples[:count], strict=False):
            panel.imshow(imread(folder / f"{int(sample['sample_id'])}.png"))
            caption = textwrap.shorten(captions[str(sample["sample_id"])], 60, placeholder=" ...")
            panel.set_title(f"{sample['value']:.2f}\n{textwrap.fill(caption, 20)}", fontsize=7)
        panels[0].text(-0.15, 0.5, side, transform=panels[0].transAxes, rotation=90, va="center", fontsize=9)
    return figure


def _histogram(panel: Axes, name: str, statistic: Statistic) -> None:
    panel.stairs(statistic["counts"], statistic["edges"], fill=True, color=INK)
    panel.axvline(statistic["mean"], color=WRONG, linewidth=1, label=f"mean {statistic['mean']:.3g}")
    panel.set_xlabel(name.replace("_", " "))
    panel.set_ylabel("samples")
    panel.set_title(f"{statistic['seen']:,} samples seen", fontsize=9)
    panel.legend(frameon=False, fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
