"""Figures of all pages. Each function returns a matplotlib figure; none uses pyplot's global state."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from clipzoo import io
from clipzoo.config.schema import class_constant
from clipzoo.errors import ConfigError
from clipzoo.evaluation.robustness import BASELINES, expected
from clipzoo.io.text import shorten, wrap
from clipzoo.report.frame import TASK_KEYS, Comparison
from clipzoo.report.published import DIRECTIONS
from clipzoo.report.render import Picture, capitalised
from clipzoo.report.statistics import Disagreement
from clipzoo.runs.record import VALIDATION_LOSS, Line, MetricKey, TrainingLog

INK, MUTED, RIGHT, WRONG = "#303f9f", "#9fa8da", "#2e8b57", "#c0503c"
PALETTE = ("#303f9f", "#c0503c", "#d99a2b", "#2e8b57", "#7a5ba6", "#3c9cc0", "#8a6d4f", "#b8609a", "#7f8c8d", "#5c7a29")
DPI = 130
HIDDEN = {"step", "epoch", "seconds", "event", "forward", "backward", "optimizer", "peak_memory_mib", "slowest_rank"}
FIRST = ("loss", "objective", "lr", "temperature", "gamma", "gradient_norm", "samples_per_second", "data_wait")
TITLES = {
    "lr": "learning rate", "gradient_norm": "gradient norm", "samples_per_second": "throughput",
    "data_wait": "time waiting for data", "slowest_rank_excess": "time of the slowest rank above the median",
    "flops_utilisation": "model FLOPs utilization",
}  # fmt: skip
UNITS = {
    "samples_per_second": "samples/s", "data_wait": "fraction of the time", "flops_utilisation": "fraction of the peak",
    "slowest_rank_excess": "fraction", "alignment": "squared distance",
    **{f"{kind}_{direction}": "logit" for kind in ("positive", "negative", "gap")
       for direction in ("image_to_text", "text_to_image")},
}  # fmt: skip
LOSSES = ("loss", "loss_image_to_text", "loss_text_to_image")
"""Numbers whose unit is that of the objective's loss."""
METRICS = {("zero_shot", "top1"): "zero-shot top-1", ("retrieval", "recall_at_1"): "recall@1"}
"""By task and metric, the title of a metric that is drawn over training."""
MOST_NUMBERS, MOST_NAMES = 20, 40
"""Largest numbers of classes for which a confusion matrix shows percentages, and class names."""
SIDES = ("highest", "lowest")
Arrays = dict[str, np.ndarray]
"""Arrays of an evaluation by name, see `clipzoo.evaluation.task.Task.write`."""
Points = list[tuple[float, float]]


def panels(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Return a figure in inches and its panels, row by row. options: see matplotlib's subplots."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options).flatten()


def tiles(count: int, most: int, width: float, height: float) -> tuple[Figure, Any]:
    """Return a figure with `count` panels of this size in inches, at most `most` in a row, and the panels."""
    columns = min(most, count) or 1
    rows = math.ceil(count / columns) or 1
    figure, axes = panels(width * columns, height * rows, rows, columns)
    for panel in axes[count:]:
        panel.set_visible(False)
    return figure, axes[:count]


def style(panel: Axes, grid: Literal["x", "y"] = "y") -> None:
    """Remove the upper and right frame and draw light grid lines."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(MUTED)
    panel.tick_params(labelsize=8, color=MUTED)
    panel.set_axisbelow(True)
    panel.grid(axis=grid, color="#e8edf1", linewidth=0.8)


def label(panel: Axes, title: str, x: str = "", y: str = "", size: int = 10, grid: Literal["x", "y", ""] = "") -> None:
    """Set title and axis labels. size: font size of the title. grid: style the panel with these grid lines."""
    panel.set_title(title, fontsize=size, color=INK, loc="left")
    panel.set_xlabel(x, fontsize=8)
    panel.set_ylabel(y, fontsize=8)
    if grid:
        style(panel, grid)


def colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def as_numbers(values: Sequence[object]) -> list[float] | None:
    """Return the values as numbers; None if a value is not a number."""
    try:
        return [float(str(value)) for value in values]
    except ValueError:
        return None


@dataclass(frozen=True)
class Curve:
    """Values of one quantity over training steps. unit: empty for a number without one."""

    name: str
    title: str
    unit: str
    steps: tuple[float, ...]
    values: tuple[float, ...]


def objective_constant(config: Mapping[str, Any], name: str) -> str:
    """Return a text constant of the class of a run's objective, such as `loss_unit`; empty without one.

    Other packages are not imported: a report may show untrusted runs.
    """
    target = str(config.get("objective", {}).get("_target_"))
    try:
        return str(class_constant(target, name) or "") if target.startswith("clipzoo.") else ""
    except LookupError:
        return ""


def training_curves(lines: Sequence[Line], loss_unit: str = "") -> list[Curve]:
    """Return a curve per varying number of metrics.jsonl, the loss first."""
    units = UNITS | dict.fromkeys(LOSSES, loss_unit)
    names = dict.fromkeys(name for line in lines for name, value in line.items() if isinstance(value, int | float))
    curves = []
    for name in [*(name for name in FIRST if name in names), *(name for name in names if name not in FIRST)]:
        curve = _curve_of(lines, name, TITLES.get(name, name.replace("_", " ")), units.get(name, ""))
        if name not in FIRST and (name in HIDDEN or len(set(curve.values)) < 2):
            continue
        # Running totals, such as the number of transparent images, are drawn per step. They are the only integers of
        # the log that never fall.
        values, steps = np.array([0, *curve.values]), np.array([0.0, *curve.steps])
        rises = np.diff(values)
        if name not in FIRST and all(value.is_integer() for value in curve.values) and (rises >= 0).all():
            rates = (rises / np.maximum(1.0, np.diff(steps))).tolist()
            curve = replace(curve, unit="samples per step", values=tuple(rates))
        curves.append(curve)
    return curves


def evaluation_curves(evaluations: Sequence[Line]) -> list[Curve]:
    """Return zero-shot top-1 and recall@1 during training, a curve per dataset and direction."""
    curves = []
    for text in evaluations[-1] if evaluations else ():
        key = MetricKey.parse(text)
        if (key.task, key.metric) in METRICS:
            dataset = f"{key.dataset} {key.protocol}".strip().replace("_", " ")
            curves.append(_curve_of(evaluations, text, f"{METRICS[key.task, key.metric]}, {dataset}", "%"))
    return curves


def _curve_of(lines: Sequence[Line], name: str, title: str, unit: str) -> Curve:
    points = [(float(line["step"]), float(line[name])) for line in lines if isinstance(line.get(name), int | float)]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return Curve(name, title, unit, steps, values)


def training_figure(
    lines: Sequence[Line], loss_unit: str = "", evaluations: Sequence[Line] = (), value_log: str = "loss"
) -> Figure:
    """A panel per varying number of metrics.jsonl, the loss first.

    evaluations: metrics during training; validation losses are drawn in the panel of `value_log`.
    """
    curves, validation = training_curves(lines, loss_unit), _curve_of(evaluations, str(VALIDATION_LOSS), "", "")
    figure, axes = tiles(len(curves), 3, 3.7, 2.6)
    for panel, curve in zip(axes, curves, strict=True):
        values = pd.Series(curve.values, dtype=float)
        if len(values) < 30 or values.diff().abs().sum() <= 3 * (values.max() - values.min()):
            panel.plot(curve.steps, values, color=INK, linewidth=1.6)
        else:
            # Many noisy values are drawn thinly, below their mean over a window centred on each step.
            panel.plot(curve.steps, values, color=MUTED, linewidth=0.7)
            mean = values.rolling(2 * (len(values) // 30) + 3, center=True).mean()
            panel.plot(curve.steps, mean, color=INK, linewidth=1.6)
        _ticks(panel)
        if curve.name == value_log and validation.steps:
            panel.lines[-1].set_label("training")
            panel.plot(validation.steps, validation.values, color=RIGHT, marker="o", markersize=3, label="validation")
            panel.legend(frameon=False, fontsize=7)
        label(panel, curve.title, "step", curve.unit)
    return figure


def evaluation_figure(evaluations: Sequence[Line]) -> Figure:
    """Zero-shot top-1 and recall@1 during training, a line per dataset."""
    by_dataset: dict[str, list[Curve]] = {}
    for curve in evaluation_curves(evaluations):
        title, dataset = curve.title.split(", ", 1)
        by_dataset.setdefault(dataset, []).append(replace(curve, title=title))
    return runs_figure(by_dataset)


def runs_figure(runs: Mapping[str, Sequence[Curve]]) -> Figure:
    """A panel per title of curves, a line for each run that has one."""
    units = {curve.title: curve.unit for curves in runs.values() for curve in curves}
    figure, axes = tiles(len(units), 3, 3.7, 2.6)
    for panel, (title, unit) in zip(axes, units.items(), strict=True):
        for number, (name, curves) in enumerate(runs.items()):
            for curve in (curve for curve in curves if curve.title == title):
                marker = "o" if len(curve.steps) == 1 else ""  # a line through one point is invisible
                panel.plot(curve.steps, curve.values, color=colour(number), marker=marker, linewidth=1.4, label=name)
        _ticks(panel)
        label(panel, title, "step", unit)
    _legend(figure)
    return figure


def confusion_matrix(arrays: Arrays) -> Figure:
    """Fractions of each true class (a row) by predicted class."""
    counts, names = arrays["confusion"], [str(name) for name in arrays["class_names"]]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    has_names, has_numbers = len(names) <= MOST_NAMES, len(names) <= MOST_NUMBERS
    side = 2.2 + (0.42 if has_numbers else 0.24) * len(names) if has_names else 6.4
    figure, (panel,) = panels(side + 0.8, side)
    image = panel.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    panel.set_xlabel("predicted class", fontsize=9)
    panel.set_ylabel("true class", fontsize=9)
    if has_names:
        labels = [shorten(name, 18) for name in names]
        panel.set_xticks(range(len(names)), labels, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
        panel.set_yticks(range(len(names)), labels, fontsize=8)
    if has_numbers:
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
    """The most confident errors, with the predicted class above each image and the true class below."""
    names = arrays["class_names"]
    figure, axes = tiles(len(arrays["images"]), 6, 1.55, 1.95)
    samples = zip(arrays["images"], arrays["labels"], arrays["predictions"], strict=True)
    for panel, (image, true, predicted) in zip(axes, samples, strict=True):
        _image(panel, image)
        panel.set_title(shorten(str(names[predicted]), 22), fontsize=8, color=WRONG, pad=3)
        panel.set_xlabel(f"is {shorten(str(names[true]), 22)}", fontsize=8, color=RIGHT, labelpad=3)
    return figure


def retrieved(arrays: Arrays) -> Figure:
    """A row per caption: its text, the rank of its own image, and the images it retrieves, best first."""
    rows, columns = arrays["found"].shape
    figure, axes = panels(2.9 + 1.3 * columns, 1.42 * rows, rows, columns + 1, width_ratios=[2.1, *[1] * columns])
    for row, (text_panel, *image_panels) in enumerate(axes.reshape(rows, -1)):
        text, rank = wrap(str(arrays["captions"][row]), 30, lines=5), int(arrays["place"][row]) + 1
        text_panel.axis("off")
        write = partial(text_panel.text, ha="right", transform=text_panel.transAxes)
        write(1, 0.56, text, va="center", fontsize=9, color=INK)
        note, ink = f"its own image has rank {rank:,}", RIGHT if rank == 1 else MUTED
        write(1, 0.56 - 0.09 * (text.count("\n") + 1) - 0.08, note, va="top", fontsize=7, color=ink)
        for panel, image, sample in zip(image_panels, arrays["images"][row], arrays["found"][row], strict=True):
            _image(panel, image, framed=bool(sample == arrays["owner"][row]))
    return figure


def embedding_diagnosis(arrays: Arrays) -> Figure:
    """Spectra of both modalities, the map with lines between the vectors of some pairs, and histograms of N_k."""
    figure, (spectra, plane, hubs) = panels(12, 3.5, columns=3)
    for side, way, ink, points in zip(("image", "text"), DIRECTIONS, (INK, WRONG), arrays["map"], strict=True):
        values, counts = arrays[f"spectrum_{side}"], np.bincount(arrays[f"occurrences_{way}"])
        spectra.semilogy(values[values > 1e-6 * values.max()], color=ink, label=side)
        plane.scatter(*points.T, s=4, color=ink, alpha=0.5, linewidth=0, label=side)
        hubs.stairs(counts, np.arange(len(counts) + 1) - 0.5, color=ink, label=way.replace("_", " "), baseline=None)
    pairs = arrays["map"][:, :: 1 + arrays["map"].shape[1] // 40]
    plane.plot(pairs[:, :, 0], pairs[:, :, 1], color="#999999", linewidth=0.6, zorder=0)
    plane.axis("off")
    hubs.set_yscale("log")
    label(spectra, "spectrum of each modality", "dimension", "standard deviation", grid="y")
    label(plane, "map, with lines between pairs")
    label(hubs, "hubs", "queries that have a vector among their neighbours", "vectors", grid="y")
    for panel in (spectra, plane, hubs):
        panel.legend(frameon=False, fontsize=7, markerscale=3)
    return figure


def _image(panel: Axes, image: np.ndarray, framed: bool = False) -> None:
    panel.imshow(image)
    panel.set_xticks([])
    panel.set_yticks([])
    panel.spines[:].set_visible(framed)
    if framed:
        panel.spines[:].set(color=RIGHT, linewidth=3.5)


def _ticks(panel: Axes) -> None:
    style(panel)
    panel.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useMathText=True)
    panel.yaxis.get_offset_text().set_fontsize(7)


def read_statistics(path: Path) -> dict[str, dict[str, Any]]:
    """Read samples.json: statistics by name, as `write_samples` writes them. Raises DamagedFileError."""
    summary = io.read_json(path, 16 * io.MB)
    number = (int, float)
    fields: dict[str, Any] = {"seen": int, "mean": number, "counts": list, "edges": list, **dict.fromkeys(SIDES, list)}
    for statistic in summary.values():
        io.require_fields(path, statistic, fields)
        for sample in [*statistic["highest"], *statistic["lowest"]]:
            io.require_fields(path, sample, {"sample_id": int, "value": number})
    return summary


def sample_histograms(summary: Mapping[str, Any]) -> Figure:
    """A panel per statistic: its histogram over the samples seen, with the mean."""
    figure, axes = panels(4.2 * len(summary), 3.0, columns=len(summary))
    for panel, (name, statistic) in zip(axes, summary.items(), strict=True):
        panel.stairs(statistic["counts"], statistic["edges"], fill=True, color=INK)
        panel.axvline(statistic["mean"], color=WRONG, linewidth=1, label=f"mean {statistic['mean']:.3g}")
        panel.legend(frameon=False, fontsize=8)
        label(panel, f"{statistic['seen']:,} samples seen", name.replace("_", " "), "samples", 9, grid="y")
    return figure


def extreme_samples(statistic: Mapping[str, Any], folder: Path, count: int = 8) -> Figure:
    """The samples with the highest values (first row) and the lowest.

    folder: images by sample id, and captions.json, as `write_samples` writes them. Raises DamagedFileError.
    """
    captions = io.read_json(folder / "captions.json", 16 * io.MB)
    figure, axes = panels(1.5 * count, 4.4, 2, count)
    for strip, side in zip(axes.reshape(2, count), SIDES, strict=True):
        for panel in strip:
            panel.axis("off")
        for panel, sample in zip(strip, statistic[side][:count], strict=False):
            path = io.below(folder, f"{sample['sample_id']}.png")
            try:
                panel.imshow(imread(path))
            # Damaged bytes raise OSError, SyntaxError, ValueError, struct.error and more.
            except Exception as error:
                raise io.DamagedFileError(path, f"cannot be decoded ({error})") from None
            caption = shorten(str(captions.get(str(sample["sample_id"]), "")), 60, " ...")
            panel.set_title(f"{sample['value']:.2f}\n{wrap(caption, 20, lines=9)}", fontsize=7)
        strip[0].text(-0.15, 0.5, side, transform=strip[0].transAxes, rotation=90, va="center", fontsize=9)
    return figure


def comparison_figures(compared: Comparison, logs: Mapping[Path, TrainingLog]) -> Iterator[Picture]:
    """Yield the figures of a comparison; each row has its colour. logs: training log of each run."""
    labels = {group: runs["label"].iloc[0] for group, runs in compared.rows.items()}
    rows = {group: [logs[run] for run in runs["run"].unique()] for group, runs in compared.rows.items()}

    # A line per dataset, below the mean of its kind: a dot per row of the comparison, with its deviation.
    for task, columns in compared.columns.items():
        figure, (panel,) = panels(4.6, 0.17 * len(columns) + 0.8)
        for number, (group, text) in enumerate(labels.items()):
            places = pd.MultiIndex.from_tuples([(group, column.heading, column.label) for column in columns])
            cells = compared.means.reindex(places)
            panel.errorbar(cells["mean"], range(len(columns)), None, cells["deviation"], "o", markersize=5,
                           elinewidth=0.8, color=colour(number), alpha=0.85, label=text)  # fmt: skip
        panel.set_yticks(range(len(columns)), [column.label for column in columns])
        label(panel, "", "%", grid="x")
        for place, (column, tick) in enumerate(zip(columns, panel.get_yticklabels(), strict=True)):
            if len(column.groups) > 1:
                tick.set_fontweight("bold")
                panel.axhspan(place - 0.5, place + 0.5, color="#f3f4fb", zorder=0)
        panel.set_ylim(len(columns) - 0.5, -0.5)
        panel.set_xlim(left=-1)
        _legend(figure)
        yield Picture(f"dots by dataset, {task}", figure, f"{capitalised(task)} by dataset")

    # A panel per shift of ImageNet: accuracy over that on ImageNet, with the baseline.
    top1 = {key.dataset: key for key in compared.frame["key"].dropna() if replace(key, dataset="") == TASK_KEYS[0][1]}
    if shifts := [shift for shift in BASELINES if {"imagenet", shift} <= top1.keys()]:
        x, means = np.linspace(1, 99, 99), compared.frame.groupby(["group", "key"], sort=False)["value"].mean()
        figure, axes = tiles(len(shifts), 3, 4, 3.2)
        for panel, shift in zip(axes, shifts, strict=True):
            for number, (group, text) in enumerate(labels.items()):
                pair = [means.get((group, top1[name]), math.nan) for name in ("imagenet", shift)]
                panel.plot(*pair, "o", color=colour(number), label=text)
            panel.plot(x, expected(shift, x), color=MUTED, label="baseline")
            label(panel, shift.replace("_", " "), "ImageNet, %", "%", grid="y")
        _legend(figure)
        yield Picture("accuracy under shifts over that on ImageNet", figure, "Robustness")

    # The loss of each row as mean and deviation over seeds, a panel per objective: their losses are not comparable.
    if any(log.training for logs in rows.values() for log in logs):
        by_objective: dict[str, list[str]] = {}
        for group, row in compared.rows.items():
            by_objective.setdefault(row["objective"].iloc[0], []).append(group)
        widths = [1.6 if len(groups) > 1 else 1.0 for groups in by_objective.values()]
        figure, axes = panels(12, 3.0, columns=len(widths), width_ratios=widths)
        for panel, (objective, groups) in zip(axes, by_objective.items(), strict=True):
            for group in groups:
                lines = [[line for line in log.training if {"epoch", "loss"} <= {*line}] for log in rows[group]]
                losses = [[(float(line["epoch"]), float(line["loss"])) for line in run] for run in lines]
                _curves(panel, losses, list(rows).index(group), labels[group])
            label(panel, objective, "epoch", "loss", grid="y")
        _legend(figure)
        yield Picture("loss over training", figure, "Over training")

    # Metrics during training, as mean and standard deviation over seeds.
    if any(len(log.evaluations) > 2 for logs in rows.values() for log in logs):
        figure, axes = panels(12, 3.4, columns=2)
        for panel, (wanted, title) in zip(axes, METRICS.items(), strict=True):
            for number, (group, row_logs) in enumerate(rows.items()):
                runs = []
                for log in row_logs:
                    epochs = {float(line["step"]): float(line["epoch"]) for line in log.training if "epoch" in line}
                    per_step = max((epoch / step for step, epoch in epochs.items() if step), default=1.0)
                    points: Points = []
                    for line in log.evaluations:
                        keys = [(text, MetricKey.parse(text)) for text in line]
                        values = [float(line[text]) for text, key in keys if (key.task, key.metric) == wanted]
                        if values:
                            points.append((float(line["step"]) * per_step, statistics.fmean(values)))
                    runs.append(points)
                _curves(panel, runs, number, labels[group], marker="o")
            label(panel, f"{title}, mean over datasets", "epoch", "%", grid="y")
            if not panel.get_legend_handles_labels()[0]:
                panel.text(0.5, 0.5, "not evaluated", transform=panel.transAxes, ha="center", color=MUTED)
                panel.set(xticks=[], yticks=[])
        _legend(figure)
        yield Picture("evaluations during training", figure)


def _curves(panel: Axes, runs: Sequence[Points], number: int, name: str, marker: str = "") -> None:
    """Draw the mean of a row's runs and a band of one standard deviation; runs with different steps separately."""
    runs = [points for points in runs if points]
    if len(runs) > 1 and len({tuple(x for x, _ in points) for points in runs}) == 1:
        values = np.array([[y for _, y in points] for points in runs])
        mean, spread = values.mean(axis=0), values.std(axis=0, ddof=1)
        places = [x for x, _ in runs[0]]
        panel.fill_between(places, mean - spread, mean + spread, color=colour(number), alpha=0.18, linewidth=0)
        runs = [list(zip(places, mean.tolist(), strict=True))]
    for index, points in enumerate(runs):
        x, y = zip(*points, strict=True)
        point_marker = marker or ("o" if len(points) == 1 else "")  # a line through one point is invisible
        text = None if index else name
        panel.plot(x, y, color=colour(number), marker=point_marker, markersize=3.5, linewidth=1.5, label=text)


def _legend(figure: Figure) -> None:
    """Add a legend of all labels above the panels, and make the figure taller to hold it."""
    handles = {
        text: handle for panel in figure.axes for handle, text in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    width = 160 * figure.get_figwidth() / 12  # characters in a line
    columns = int(max(1, min(7, len(handles), width // max(map(len, handles), default=1))))
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(handles) // columns))
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=columns, frameon=False, fontsize=9
    )


def profile_figure(summary: Mapping[str, Any]) -> Figure:
    """Bars of the times of a step's parts, and the memory over time."""
    figure, (times, memory) = panels(9, 3.4, columns=2, width_ratios=(3, 2))
    parts = list(summary["host_ms"])
    sources = [("process", summary["host_ms"], INK), ("GPU", summary["device_ms"], MUTED)]
    sources = sources if summary["device_ms"] else sources[:1]
    height = 0.8 / len(sources)
    for number, (name, values, ink) in enumerate(sources):
        places = [place + height * (number - (len(sources) - 1) / 2) for place in range(len(parts))]
        bars = times.barh(places, [values.get(part, 0.0) for part in parts], height, color=ink, label=name)
        times.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
    times.set_yticks(range(len(parts)), parts)
    times.invert_yaxis()
    times.margins(x=0.12)
    label(times, "time of a step", "ms", grid="x")
    if summary["device_ms"]:
        times.legend(frameon=False, fontsize=8)
    where = "since the profile began" if summary["device"] == "CPU" else "on the GPU"
    label(memory, f"memory allocated {where}", "ms", "MiB", grid="y")
    if summary["memory"]:
        memory.step(*zip(*summary["memory"], strict=True), where="post", color=INK, linewidth=1)
        memory.set_ylim(bottom=0)
    return figure


def disagreement_figure(pair: Disagreement) -> Figure | None:
    """Up to eight samples that only one of two runs classifies correctly; None without any, or without the images."""
    from clipzoo.evaluation.datasets.benchmarks import open_benchmark
    from clipzoo.evaluation.datasets.dataset import ClassificationDataset

    one, two = pair.right
    shown_samples = [part.nonzero()[0][:8] for part in (one & ~two, two & ~one)]
    columns = max(len(samples) for samples in shown_samples)
    dataset = None
    if pair.names and columns:
        try:
            dataset = open_benchmark(pair.dataset, pair.root, "set")
        except ConfigError:
            return None
    # The dataset of a run from another machine may have other images.
    if not isinstance(dataset, ClassificationDataset) or len(dataset.splits["test"]) < len(pair.labels):
        return None
    figure = Figure(figsize=(1.5 * columns + 0.4, 2 * 2.15), dpi=DPI, layout="constrained")
    strips = figure.subfigures(2, 1, squeeze=False).flatten()
    for strip, name, samples, answers in zip(strips, pair.runs, shown_samples, (pair.second, pair.first), strict=True):
        strip.suptitle(f"only {name} is right", fontsize=9)
        for panel in (axes := strip.subplots(1, columns, squeeze=False)[0]):
            panel.axis("off")
        for panel, sample in zip(axes, samples, strict=False):
            image, true_class = dataset.splits["test"][int(sample)]
            panel.imshow(np.asarray(image))
            panel.set_title(shorten(pair.names[true_class], 20), fontsize=7, color=RIGHT, pad=2)
            panel.text(0.5, -0.03, f"not {shorten(pair.names[answers[sample]], 20)}", fontsize=7, color=WRONG,
                       ha="center", va="top", transform=panel.transAxes)  # fmt: skip
    return figure
