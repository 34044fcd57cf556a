"""Figures of per-sample statistics: histograms, and the samples with extreme values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from clipzoo import io
from clipzoo.io.text import shorten, wrap
from clipzoo.report.drawing import INK, WRONG

SIDES = ("highest", "lowest")


class Sample(TypedDict):
    """A sample and its value of a statistic."""

    sample_id: int
    value: float


class Statistic(TypedDict):
    """A per-sample statistic as `inspection.diagnostics.summarise_samples` writes it; edges: of the histogram."""

    seen: int
    mean: float
    counts: list[float]
    edges: list[float]
    highest: list[Sample]
    lowest: list[Sample]


def read_statistics(path: Path) -> dict[str, Statistic]:
    """Read samples.json: statistics by name. Raises DamagedFileError."""
    summary = io.read_json(path, 16 * io.MB)
    for statistic in summary.values():
        sides: dict[str, type] = dict.fromkeys(SIDES, list)
        fields: dict[str, Any] = {"seen": int, "mean": (int, float), "counts": list, "edges": list, **sides}
        io.require_fields(path, statistic if isinstance(statistic, dict) else {}, fields)
        for sample in [*statistic["highest"], *statistic["lowest"]]:
            values = sample if isinstance(sample, dict) else {}
            io.require_fields(path, values, {"sample_id": int, "value": (int, float)})
    return cast(dict[str, Statistic], summary)


def sample_histograms(summary: Mapping[str, Statistic]) -> Figure:
    """A panel per statistic: its histogram over the samples seen, with the mean."""
    count = max(1, len(summary))
    figure = Figure(figsize=(4.2 * count, 3.0), layout="constrained")
    for panel, (name, statistic) in zip(figure.subplots(1, count, squeeze=False)[0], summary.items(), strict=False):
        _histogram(panel, name, statistic)
    return figure


def extreme_samples(statistic: Statistic, folder: Path, count: int = 8) -> Figure:
    """The samples with the highest values (first row) and the lowest.

    folder: images by sample id, and captions.json, as `inspection.diagnostics.write_examples` leaves them.

    Raises:
        DamagedFileError: an image or the captions cannot be read.
    """
    captions = io.read_json(folder / "captions.json", 16 * io.MB)
    figure = Figure(figsize=(1.5 * count, 4.4), layout="constrained")
    rows = zip(
        figure.subplots(2, count, squeeze=False), SIDES, (statistic["highest"], statistic["lowest"]), strict=True
    )
    for panels, side, samples in rows:
        for panel in panels:
            panel.axis("off")
        for panel, sample in zip(panels, samples[:count], strict=False):
            panel.imshow(_image(io.below(folder, f"{sample['sample_id']}.png")))
            caption = shorten(str(captions.get(str(sample["sample_id"]), "")), 60, " ...")
            panel.set_title(f"{sample['value']:.2f}\n{wrap(caption, 20, lines=9)}", fontsize=7)
        panels[0].text(-0.15, 0.5, side, transform=panels[0].transAxes, rotation=90, va="center", fontsize=9)
    return figure


def _image(path: Path) -> np.ndarray:
    try:
        return imread(path)
    # Damaged bytes end in OSError, SyntaxError, ValueError, struct.error and more.
    except Exception as error:
        raise io.DamagedFileError(path, f"cannot be decoded ({error})") from None


def _histogram(panel: Axes, name: str, statistic: Statistic) -> None:
    panel.stairs(statistic["counts"], statistic["edges"], fill=True, color=INK)
    panel.axvline(statistic["mean"], color=WRONG, linewidth=1, label=f"mean {statistic['mean']:.3g}")
    panel.set_xlabel(name.replace("_", " "))
    panel.set_ylabel("samples")
    panel.set_title(f"{statistic['seen']:,} samples seen", fontsize=9)
    panel.legend(frameon=False, fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
