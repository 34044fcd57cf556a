"""Figures of a comparison: bars per dataset, curves over training, costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clipzoo.report.comparison.scales import COSTS, ComparedRow, Comparison
from clipzoo.report.drawing import DPI, INK, MUTED, colour, label, style
from clipzoo.report.paper_tables.collect import Run
from clipzoo.report.paper_tables.published import PaperColumn
from clipzoo.runs.metric_key import MetricKey

PANELS_WIDTH = 7
"""Datasets side by side in one line of panels."""
CURVES = {
    "zero-shot top-1, mean over datasets": ("zero_shot", "top1"),
    "recall@1, mean over directions and datasets": ("retrieval", "recall_at_1"),
}
"""Task and metric whose mean is drawn over training."""

LEGEND_WIDTH = 160
"""Characters side by side in a legend above a figure."""

Points = list[tuple[float, float]]


def figures(comparison: Comparison) -> Iterator[tuple[str, str, Figure]]:
    """Yield heading (empty below the same heading), description and figure of each picture of a comparison."""
    if comparison.columns:
        yield "By dataset", "bars by dataset", dataset_bars(comparison)
    yield "Over training", "loss over training", loss_curves(comparison)
    if (curves := evaluation_curves(comparison)) is not None:
        yield "", "evaluations during training", curves
    yield "Cost", "minutes of training and of evaluation, samples per second, memory", cost_bars(comparison)


def dataset_bars(comparison: Comparison) -> Figure:
    """A panel per task, bars per dataset, one colour per row."""
    tasks = list(comparison.columns.items())
    counts = [len(columns) for _, columns in tasks]
    lines = _lines(counts)
    figure = Figure(figsize=(12, 2.5 * len(lines) + 0.3), dpi=DPI, layout="constrained")
    for strip, places in zip(figure.subfigures(len(lines), 1, squeeze=False).flatten(), lines, strict=True):
        panels = strip.subplots(1, len(places), width_ratios=[counts[place] for place in places], squeeze=False)
        for panel, place in zip(panels.flatten(), places, strict=True):
            task, columns = tasks[place]
            _bars(panel, comparison.rows, columns)
            label(panel, f"{task}, %", size=10 if counts[place] > 1 else 8)
    _legend(figure)
    return figure


def evaluation_curves(comparison: Comparison) -> Figure | None:
    """Metrics during training, as mean and standard deviation over seeds; None without a run of three evaluations."""
    curves = [[_evaluations(match.run) for match in row.group.runs] for row in comparison.rows]
    if not any(len(evaluations) > 2 for runs in curves for evaluations in runs):
        return None
    figure = Figure(figsize=(12, 3.4), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, (title, (task, metric)) in zip(panels, CURVES.items(), strict=True):
        for number, (row, runs) in enumerate(zip(comparison.rows, curves, strict=True)):
            means = [[(epoch, _mean(metrics, task, metric)) for epoch, metrics in run] for run in runs]
            points = [[(epoch, mean) for epoch, mean in run if mean is not None] for run in means]
            _curves(panel, points, number, row.label, marker="o")
        label(panel, title, "epoch", "%")
        style(panel)
        if not panel.get_legend_handles_labels()[0]:
            panel.text(0.5, 0.5, "not evaluated", transform=panel.transAxes, ha="center", color=MUTED)
            panel.set(xticks=[], yticks=[])
    _legend(figure)
    return figure


def loss_curves(comparison: Comparison) -> Figure:
    """The loss of each row as mean and deviation over seeds, a panel per objective: others cannot be compared."""
    panels: dict[str, list[tuple[int, ComparedRow]]] = {}
    for number, row in enumerate(comparison.rows):
        objective = str(row.group.runs[0].run.plain["objective"]["_target_"]).rpartition(".")[2]
        panels.setdefault(objective, []).append((number, row))
    widths = [1.6 if len(rows) > 1 else 1.0 for rows in panels.values()]
    figure = Figure(figsize=(12, 3.0), dpi=DPI, layout="constrained")
    drawn = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False).flatten()
    for panel, (objective, rows) in zip(drawn, panels.items(), strict=True):
        for number, row in rows:
            points = [
                [(float(line["epoch"]), float(line["loss"])) for line in lines if {"epoch", "loss"} <= line.keys()]
                for lines in (match.run.log.training for match in row.group.runs)
            ]
            _curves(panel, points, number, row.label)
        label(panel, objective, "epoch", "loss")
        style(panel)
    _legend(figure)
    return figure


def cost_bars(comparison: Comparison) -> Figure:
    """Minutes of training and of evaluation, samples per second and peak memory of each row."""
    figure = Figure(figsize=(12, 0.32 * len(comparison.rows) + 1.1), dpi=DPI, layout="constrained")
    places = range(len(comparison.rows))
    labels = [row.label for row in comparison.rows]
    for number, (panel, cost) in enumerate(zip(figure.subplots(1, len(COSTS)), COSTS, strict=True)):
        values = [value if (value := row.cost(cost)) is not None else np.nan for row in comparison.rows]
        bars = panel.barh(places, values, 0.7, color=[colour(place) for place in places])
        panel.bar_label(bars, fmt="{:,.3g}", fontsize=8, padding=2, color=INK)
        panel.set_yticks(places, labels if number == 0 else [""] * len(labels), fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        label(panel, cost.label)
        style(panel, grid="x")
    return figure


def _bars(panel: Axes, rows: Sequence[ComparedRow], columns: Sequence[PaperColumn]) -> None:
    width = 0.84 / len(rows)
    for number, row in enumerate(rows):
        ours = [row.group.measurement(column) for column in columns]
        means = [measurement.mean if measurement else np.nan for measurement in ours]
        spread = [measurement.deviation if measurement and measurement.deviation else np.nan for measurement in ours]
        left = np.arange(len(columns)) - 0.42 + width * (number + 0.5)
        panel.bar(left, means, 0.92 * width, color=colour(number), label=row.label)
        panel.errorbar(left, means, spread, fmt="none", ecolor="#555555", elinewidth=0.8)
    panel.margins(x=0.03 / len(columns))
    panel.set_xticks(range(len(columns)), [column.label for column in columns], fontsize=8)
    panel.set_ylim(0, None)
    style(panel)


def _curves(panel: Axes, runs: Sequence[Points], number: int, name: str, marker: str = "") -> None:
    """Draw the mean of the runs of a row and a band of one standard deviation; runs with other points separately."""
    runs = [points for points in runs if points]
    if len(runs) > 1 and len({tuple(x for x, _ in points) for points in runs}) == 1:
        values = np.array([[y for _, y in points] for points in runs])
        mean, spread = values.mean(axis=0), values.std(axis=0, ddof=1)
        places = [x for x, _ in runs[0]]
        panel.fill_between(places, mean - spread, mean + spread, color=colour(number), alpha=0.18, linewidth=0)
        runs = [list(zip(places, mean.tolist(), strict=True))]
    for turn, points in enumerate(runs):
        x, y = zip(*points, strict=True)
        shown = marker or ("o" if len(points) == 1 else "")  # a line through one point is invisible
        text = None if turn else name
        panel.plot(x, y, color=colour(number), marker=shown, markersize=3.5, linewidth=1.5, label=text)


def _legend(figure: Figure) -> None:
    """Add a line for each label of the panels above them, for which the figure grows."""
    handles = {
        text: handle for panel in figure.axes for handle, text in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    columns = max(1, min(7, len(handles), LEGEND_WIDTH // max(map(len, handles), default=1)))
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(handles) // columns))
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=columns, frameon=False, fontsize=9
    )


def _lines(counts: Sequence[int]) -> list[list[int]]:
    """Arrange panels in lines of at most seven datasets, each panel in the first line with room."""
    lines: list[list[int]] = []
    for place, count in enumerate(counts):
        with_room = [line for line in lines if sum(counts[other] for other in line) + count <= PANELS_WIDTH]
        if with_room:
            with_room[0].append(place)
        else:
            lines.append([place])
    return lines


def _evaluations(run: Run) -> list[tuple[float, dict[str, float | str]]]:
    """Epoch and metrics of each evaluation during training."""
    epochs = {float(line["step"]): float(line["epoch"]) for line in run.log.training if "epoch" in line}
    per_step = max((epoch / step for step, epoch in epochs.items() if step), default=1.0)
    return [(float(line["step"]) * per_step, line) for line in run.log.evaluations]


def _mean(metrics: dict[str, float | str], task: str, metric: str) -> float | None:
    keys = {text: MetricKey.parse(text) for text in metrics}
    values = [float(metrics[text]) for text, key in keys.items() if (key.task, key.metric) == (task, metric)]
    return statistics.fmean(values) if values else None
