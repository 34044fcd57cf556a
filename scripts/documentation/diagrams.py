"""Diagrams: how a batch flows, the order of an epoch, and the division of a batch among ranks."""

from __future__ import annotations

import numpy
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from clipzoo.data.plan import Plan

from .drawing import BLUE, GREEN, INK, ORANGE, RED, VIOLET, figure, save

PARTS = (
    (0.0, "tar shards", "WebDataset", "#8a929e"), (1.55, "data plan", "read, decode,\ntokenize", GREEN),
    (3.1, "encoder", "image tower\ntext tower", BLUE), (4.65, "head", "project, gather,\nscore", VIOLET),
    (6.2, "objective", "loss of the\nglobal batch", ORANGE), (7.75, "step", "backward, clip,\nupdate", RED),
)  # fmt: skip
ARROWS = ("", "Batch", "Features", "Similarity", "Loss")
SHARDS, SAMPLES, BATCH = 4, 12, 8
COLOURS = (BLUE, ORANGE, GREEN, VIOLET)


def draw() -> None:
    """Write docs/images/architecture.svg, epoch.svg and ranks.svg."""
    drawn, (panel,) = figure(8.8, 2.5)
    for x, name, work, colour in PARTS:
        _box(panel, x, 1.0, name, work, colour)
    for (x, *_), label in zip(PARTS, ARROWS, strict=False):
        _arrow(panel, (x + 1.12, 1.45), (x + 1.53, 1.45))
        panel.text(x + 1.33, 1.98, label, ha="center", fontsize=8, style="italic")
    _box(panel, 4.65, -0.55, "evaluation", "zero-shot, probe,\nretrieval", VIOLET)
    _box(panel, 6.2, -0.55, "report", "results.json\nreport.md", "#8a929e")
    _box(panel, 7.75, -0.55, "checkpoint", "weights, state,\nstep", "#8a929e")
    _arrow(panel, (5.2, 1.0), (5.2, 0.37))
    _arrow(panel, (5.77, -0.1), (6.18, -0.1))
    _arrow(panel, (8.3, 1.0), (8.3, 0.37))
    panel.set(xlim=(-0.05, 8.95), ylim=(-0.65, 2.2))
    panel.axis("off")
    save(drawn, "architecture")

    # The first rows of a run: 48 samples in four shards, steps of eight, two ranks.
    plan = Plan([[SAMPLES] * SHARDS], [1.0], seed=0, shuffle_window=2, global_batch=BATCH)
    drawn, (panel,) = figure(8.4, 2.1)
    for step in range(9):
        rows = plan.rows(step)
        for place, (sample, epoch) in enumerate(zip(rows.sample_id, rows.epoch, strict=True)):
            x, y = step * 1.06, BATCH - 1 - place
            panel.bar(x, 0.9, 0.94, bottom=y, color=COLOURS[sample // SAMPLES], alpha=0.9 if epoch == 0 else 0.4)
            ink = "white" if epoch == 0 else INK
            panel.text(x, y + 0.44, str(sample), ha="center", va="center", fontsize=6.5, color=ink)
    panel.axhline(BATCH / 2 - 0.05, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
    panel.set(xticks=numpy.arange(9) * 1.06, xticklabels=range(9), xlabel="step", xlim=(-0.6, 9.1))
    panel.set(yticks=[1.95, 5.95], yticklabels=["rank 1", "rank 0"])
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    save(drawn, "epoch")

    # Scores of a global batch of twelve on three ranks: rows are local, columns are gathered.
    drawn, (left, right) = figure(6.6, 2.9, panels=2)
    for panel, title in ((left, "images with all captions"), (right, "captions with all images")):
        for rank, colour in enumerate((BLUE, ORANGE, GREEN)):
            for row in range(4 * rank, 4 * rank + 4):
                for column in range(12):
                    shade = 1.0 if row == column else 0.28
                    panel.bar(column, 0.86, 0.86, bottom=11 - row, color=colour, alpha=shade)
            panel.text(-1.1, 9.4 - 4 * rank, f"rank {rank}", ha="right", va="center", fontsize=8.5)
        panel.set(aspect="equal", title=title, xlabel="columns of all ranks", xticks=[], yticks=[], xlim=(-0.6, 11.6))
        panel.spines[:].set_visible(False)
    save(drawn, "ranks")


def _box(panel: Axes, x: float, y: float, name: str, work: str, colour: str) -> None:
    shape = FancyBboxPatch((x, y), 1.1, 0.9, boxstyle="round,pad=0,rounding_size=0.09", linewidth=1.3)
    shape.set(facecolor=to_rgba(colour, 0.16), edgecolor=colour)
    panel.add_patch(shape)
    panel.text(x + 0.55, y + 0.69, name, ha="center", va="center", fontsize=9.5, weight="bold")
    panel.text(x + 0.55, y + 0.3, work, ha="center", va="center", fontsize=7.6, linespacing=1.25)


def _arrow(panel: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    panel.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=INK, linewidth=1.0))
