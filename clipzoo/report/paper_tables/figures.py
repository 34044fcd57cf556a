"""The pictures of the papers' pages: bars per data set, curves over training, size of the point set, cost."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clipzoo.report.comparison.scales import COSTS, Compared, Comparison
from clipzoo.report.paper_tables.published import Column
from clipzoo.report.paper_tables.tables import Entry, Filled
from clipzoo.report.run_page.figures import DPI, INK, MUTED
from clipzoo.report.run_page.page import read_metrics

PALETTE = ("#24425c", "#c0503c", "#d99a2b", "#2e8b57", "#7a5ba6", "#3c9cc0", "#8a6d4f", "#b8609a", "#7f8c8d", "#5c7a29")
CURVES = {
    "zero-shot top-1, mean of the sets, %": ("zero_shot/", "/top1"),
    "recall@1, mean of both directions, %": ("retrieval/", "/recall_at_1"),
}
"""What is drawn over training: the mean of the metrics that begin and end so."""


def published_bars(filled: Filled, columns: Sequence[Column]) -> Figure:
    """A panel for each pretraining set that has runs: what is printed as outlines, ours filled, a colour a model."""
    drawn = [entry for entry in filled.entries if entry.ours] or filled.entries
    sets = list(dict.fromkeys(entry.row.pretrain for entry in drawn))
    width = max(6.5, 0.62 * len(columns) * max(1, len(filled.entries) / len(sets)) + 1.5)
    figure = Figure(figsize=(min(width, 15), 2.7 * len(sets) + 0.4), dpi=DPI, layout="constrained")
    for panel, name in zip(figure.subplots(len(sets), 1, squeeze=False).flatten(), sets, strict=True):
        entries = [each for each in filled.entries if each.row.pretrain == name]
        share = 0.82 / len(entries)
        for place, entry in enumerate(entries):
            colour = PALETTE[place % len(PALETTE)]
            left = np.arange(len(columns)) - 0.41 + share * (place + 0.5)
            printed = [number.value if (number := filled.number(entry, each)) else np.nan for each in columns]
            ours = [found.mean if (found := entry.ours and entry.ours.ours(each)) else np.nan for each in columns]
            panel.bar(left, printed, 0.92 * share, facecolor="none", edgecolor=colour, linewidth=1.1)
            panel.bar(left, ours, 0.62 * share, color=colour, label=entry.row.model)
        panel.set_xticks(range(len(columns)), [each.label for each in columns], rotation=30, ha="right", fontsize=8)
        heading = columns[0].heading
        what = f"{heading[0].upper()}{heading[1:]} after {name}, %: printed (outline), ours (filled)"
        panel.set_title(what, fontsize=10, color=INK, loc="left")
        panel.margins(x=0.01)
        panel.set_ylim(0, 1.12 * panel.get_ylim()[1])
        panel.legend(frameon=False, fontsize=8, ncols=6, loc="upper left")
        _plain(panel)
    return figure


def compared_bars(comparison: Comparison) -> Figure:
    """A panel for each task, bars for each data set, a colour a row."""
    tasks = list(comparison.columns.items())
    counts = [len(columns) for _, columns in tasks]
    figure = Figure(figsize=(12, 2.5 * len(_shelves(counts)) + 0.5), dpi=DPI, layout="constrained")
    shelves = figure.subfigures(len(_shelves(counts)), 1, squeeze=False).flatten()
    for shelf, places in zip(shelves, _shelves(counts), strict=True):
        panels = shelf.subplots(1, len(places), width_ratios=[counts[place] for place in places], squeeze=False)
        for panel, place in zip(panels.flatten(), places, strict=True):
            task, columns = tasks[place]
            _bars(panel, comparison.rows, columns)
            panel.set_title(f"{task}, %", fontsize=10 if counts[place] > 1 else 8, color=INK, loc="left")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(7, len(labels)), frameon=False, fontsize=9)
    return figure


def evaluation_curves(comparison: Comparison) -> Figure | None:
    """What each row came to while it was trained; None where no run was judged thrice: two points are no curve."""
    found = {row.label: [_evaluations(match.run.folder, match.run.plain) for match in row.group.runs]
             for row in comparison.rows}  # fmt: skip
    if not any(len(run) > 2 for runs in found.values() for run in runs):
        return None
    figure = Figure(figsize=(12, 3.4), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, (title, (start, end)) in zip(panels, CURVES.items(), strict=True):
        for place, (label, runs) in enumerate(found.items()):
            for number, run in enumerate(runs):
                points = [(epoch, _mean(metrics, start, end)) for epoch, metrics in run]
                points = [(epoch, value) for epoch, value in points if value is not None]
                if points:
                    colour = PALETTE[place % len(PALETTE)]
                    panel.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3.5, linewidth=1.6,
                               label=None if number else label)  # fmt: skip
        panel.set_title(title, fontsize=10, color=INK, loc="left")
        panel.set_xlabel("epoch", fontsize=8)
        _plain(panel)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def loss_curves(comparison: Comparison) -> Figure:
    """The loss of each row, a panel an objective: only losses of one objective can be compared."""
    panels: dict[str, list[tuple[int, Compared]]] = {}
    for place, row in enumerate(comparison.rows):
        objective = str(row.group.runs[0].run.plain["objective"]["_target_"]).rpartition(".")[2]
        panels.setdefault(objective, []).append((place, row))
    widths = [1.6 if len(rows) > 1 else 1.0 for rows in panels.values()]
    figure = Figure(figsize=(12, 3.0), dpi=DPI, layout="constrained")
    drawn = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False).flatten()
    for panel, (objective, rows) in zip(drawn, panels.items(), strict=True):
        for place, row in rows:
            for number, match in enumerate(row.group.runs):
                lines, _ = read_metrics(match.run.folder / "metrics.jsonl")
                points = [(line["epoch"], line["loss"]) for line in lines if "loss" in line]
                if points:
                    panel.plot(*zip(*points, strict=True), color=PALETTE[place % len(PALETTE)], linewidth=1.4,
                               label=None if number else row.label)  # fmt: skip
        panel.set_title(f"{objective}, loss", fontsize=10, color=INK, loc="left")
        panel.set_xlabel("epoch", fontsize=8)
        panel.legend(frameon=False, fontsize=7)
        _plain(panel)
    return figure


def cost_bars(comparison: Comparison) -> Figure:
    """Minutes, samples a second and memory of each row."""
    figure = Figure(figsize=(12, 0.32 * len(comparison.rows) + 1.1), dpi=DPI, layout="constrained")
    labels = [row.label for row in comparison.rows]
    for number, (panel, (title, key, factor)) in enumerate(zip(figure.subplots(1, 3), COSTS, strict=True)):
        values = [value if (value := row.cost(key, factor)) is not None else np.nan for row in comparison.rows]
        colours = [PALETTE[place % len(PALETTE)] for place in range(len(labels))]
        drawn = panel.barh(range(len(labels)), values, 0.7, color=colours)
        panel.bar_label(drawn, fmt="{:,.3g}", fontsize=8, padding=2, color=INK)
        panel.set_yticks(range(len(labels)), labels if number == 0 else [""] * len(labels), fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.set_title(title, fontsize=10, color=INK, loc="left")
        _plain(panel, grid="x")
    return figure


def point_set_sizes(filled: Filled, column: Column, title: str) -> Figure:
    """A number over the size of the image's point set; the row without points is a line across."""
    figure = Figure(figsize=(6.2, 3.2), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    sized = [(size, entry) for entry in filled.entries if (size := point_set_size(entry))]
    for name, colour, marker, value in (("printed", MUTED, "s", _printed), ("ours", INK, "o", _ours)):
        points = [(size, found) for size, entry in sized if (found := value(filled, entry, column)) is not None]
        if points:
            panel.plot(
                *zip(*points, strict=True), color=colour, marker=marker, linewidth=1.6, label=f"KME-CLIP, {name}"
            )
        for entry in filled.entries:
            flat = value(filled, entry, column)
            if not point_set_size(entry) and flat is not None:
                panel.axhline(flat, color=colour, linestyle="--", linewidth=1.2, label=f"{entry.row.model}, {name}")
    panel.set_xscale("log")
    panel.set_xticks([size for size, _ in sized], [str(size) for size, _ in sized])
    panel.minorticks_off()
    panel.set_xlabel("image points", fontsize=8)
    panel.set_title(title, fontsize=10, color=INK, loc="left")
    panel.legend(frameon=False, fontsize=8)
    _plain(panel)
    return figure


def point_set_size(entry: Entry) -> int | None:
    found = re.search(r"\(point set size (\d+)\)", entry.row.model)
    return int(found[1]) if found else None


def _printed(filled: Filled, entry: Entry, column: Column) -> float | None:
    number = filled.number(entry, column)
    return number.value if number else None


def _ours(filled: Filled, entry: Entry, column: Column) -> float | None:
    found = entry.ours and entry.ours.ours(column)
    return found.mean if found else None


def _bars(panel: Axes, rows: Sequence[Compared], columns: Sequence[Column]) -> None:
    share = 0.84 / len(rows)
    for place, row in enumerate(rows):
        found = [row.group.ours(column) for column in columns]
        values = [each.mean if each else np.nan for each in found]
        spread = [each.deviation if each and each.deviation is not None else np.nan for each in found]
        left = np.arange(len(columns)) - 0.42 + share * (place + 0.5)
        panel.bar(left, values, 0.92 * share, color=PALETTE[place % len(PALETTE)], label=row.label)
        panel.errorbar(left, values, spread, fmt="none", ecolor="#555555", elinewidth=0.8)
    panel.margins(x=0.03 / len(columns))
    panel.set_xticks(range(len(columns)), [each.label for each in columns], fontsize=8)
    panel.set_ylim(0, None)
    _plain(panel)


def _shelves(counts: Sequence[int]) -> list[list[int]]:
    """Panels beside each other, each on the first shelf with room: seven data sets a shelf at most."""
    shelves: list[list[int]] = []
    for place, count in enumerate(counts):
        with_room = [shelf for shelf in shelves if sum(counts[each] for each in shelf) + count <= 7]
        if with_room:
            with_room[0].append(place)
        else:
            shelves.append([place])
    return shelves


def _evaluations(folder: Path, plain: Mapping[str, Any]) -> list[tuple[float, Mapping[str, float]]]:
    """(epoch, metrics) of each evaluation."""
    lines, evaluations = read_metrics(folder / "metrics.jsonl")
    epochs = {line["step"]: line["epoch"] for line in lines if "epoch" in line}
    per_step = max((epoch / step for step, epoch in epochs.items() if step), default=1.0)
    return [(each["step"] * per_step, each) for each in evaluations]


def _mean(metrics: Mapping[str, float], start: str, end: str) -> float | None:
    found = [value for key, value in metrics.items() if key.startswith(start) and key.endswith(end)]
    return statistics.fmean(found) if found else None


def _plain(panel: Axes, grid: str = "y") -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(MUTED)
    panel.tick_params(labelsize=8, color=MUTED)
    panel.set_axisbelow(True)
    panel.grid(axis=grid, color="#e8edf1", linewidth=0.8)  # type: ignore[arg-type]
