"""Power laws of a loss and of error rates in compute, samples or width, fitted to trainings of several scales."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from clipzoo.config.trust import is_within
from clipzoo.errors import ConfigError, number_of
from clipzoo.report.figures import colour, label, tiles
from clipzoo.report.frame import columns_of, numbers
from clipzoo.report.render import Cell, Table, text_table
from clipzoo.report.statistics import Interval, ScalingFit, fit_power_law
from clipzoo.runs.identity import identity
from clipzoo.runs.record import TrainingLog

COMPUTE, SAMPLES, WIDTH = "compute", "samples", "width"
LABELS = {COMPUTE: "FLOPs of the training", SAMPLES: "samples seen", WIDTH: "encoder.image_width"}
GROUPS = {COMPUTE: ("encoder", "head.embed_width", "trainer", "optim", "data"), SAMPLES: ("trainer", "optim", "data")}
"""By axis, keys whose numbers may differ along a curve. For a configuration key: its group and the schedule."""
FEWEST = 4
"""Smallest number of scales of a fit. A law with a floor needs one more."""


@dataclass(frozen=True)
class Training:
    """A finished training.

    name: for messages. settings: flat configuration without the seed. flops, samples: its cost; None: not recorded.
    values: fitted values by quantity, losses or errors in nats or percent.
    """

    name: str
    settings: Mapping[str, Any]
    flops: float | None
    samples: float
    values: Mapping[str, float]

    def place(self, axis: str) -> float:
        """Return the place on an axis. Raises ConfigError."""
        if axis == COMPUTE:
            if self.flops is None:
                raise ConfigError(
                    f"--scaling compute: {self.name} has no FLOPs in results.json, as runs of earlier versions; "
                    "--scaling samples needs none"
                )
            return self.flops
        if axis == SAMPLES:
            return self.samples
        key, value = axis_label(axis), self.settings.get(axis_label(axis))
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(
                f"--scaling {axis}: {self.name} has {key}={value}; give compute, samples, width or a configuration "
                "key with numbers above 0"
            )
        return float(value)


@dataclass(frozen=True)
class Scale:
    """Trainings that differ only in their seed. x: their place on the axis. values: loss or error of each."""

    x: float
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Geometric mean: power laws are fitted to logarithms."""
        return math.exp(float(np.mean(np.log(self.values))))


@dataclass(frozen=True)
class ScalingCurve:
    """A quantity of one method over the scales of an axis.

    method: its name, empty if there is only one. scales: those of the fit, ascending. dropped: scales that a cheaper
    one surpasses. held_out: the largest scale. laws: without a floor and, given enough scales, with one.
    """

    method: str
    quantity: str
    scales: tuple[Scale, ...]
    dropped: tuple[Scale, ...]
    held_out: Scale
    laws: tuple[ScalingFit, ...] = field(repr=False)

    @property
    def predicted(self) -> list[Interval]:
        """By law, the prediction interval of the geometric mean of the held-out trainings."""
        return [law.predicted(self.held_out.x, runs=len(self.held_out.values)) for law in self.laws]


def curves(trainings: Sequence[Training], axis: str) -> list[ScalingCurve]:
    """Fit every quantity of every method; the largest scale is held out.

    axis: `compute`, `samples`, `width` or a configuration key with numbers. Trainings form one curve if they differ
    only in numbers of the keys in GROUPS. Of several settings at one place the best counts. Along compute, scales that
    a cheaper one surpasses are left out of the fit.

    Raises ConfigError for trainings without a value on the axis, or too few scales for a fit.
    """
    groups = GROUPS.get(axis) or (axis_label(axis).partition(".")[0], "head.embed_width", "optim.schedule")

    def is_free(key: str, value: Any) -> bool:
        is_number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        return (is_number or key.startswith("data.")) and is_within(key, groups)

    methods: dict[str, list[Training]] = {}
    for training in trainings:
        fixed_settings = {key: value for key, value in training.settings.items() if not is_free(key, value)}
        methods.setdefault(json.dumps(fixed_settings, sort_keys=True, default=str), []).append(training)
    quantities = dict.fromkeys(quantity for training in trainings for quantity in training.values)
    fitted: dict[str, list[ScalingCurve]] = {}
    for (method, group), quantity in product(methods.items(), quantities):
        settings: dict[str, list[Training]] = {}
        for training in group:
            settings.setdefault(json.dumps(training.settings, sort_keys=True, default=str), []).append(training)
        best: dict[float, Scale] = {}
        for seeds in settings.values():
            values = tuple(value for training in seeds if (value := training.values.get(quantity, 0.0)) > 0)
            scale = Scale(seeds[0].place(axis), values)
            if values and (scale.x not in best or scale.mean < best[scale.x].mean):
                best[scale.x] = scale
        if len(best) <= FEWEST:
            continue
        *scales, held_out = (best[x] for x in sorted(best))
        fitted_scales: list[Scale] = []
        for scale in scales:
            if axis != COMPUTE or not fitted_scales or scale.mean < fitted_scales[-1].mean:
                fitted_scales.append(scale)
        if len(fitted_scales) < FEWEST:
            continue
        x, y = zip(*((scale.x, value) for scale in fitted_scales for value in scale.values), strict=True)
        # A law with a floor is fitted iteratively, so with fewer resamples.
        laws = [fit_power_law(x, y)]
        if len(fitted_scales) > FEWEST:
            laws.append(fit_power_law(x, y, with_floor=True, resamples=300))
        dropped = tuple(scale for scale in scales if scale not in fitted_scales)
        curve = ScalingCurve("", quantity, tuple(fitted_scales), dropped, held_out, tuple(laws))
        fitted.setdefault(method, []).append(curve)
    if not fitted:
        largest = max(len({training.place(axis) for training in group}) for group in methods.values())
        surpassed = "; scales that a cheaper one surpasses do not count" if axis == COMPUTE else ""
        raise ConfigError(
            f"--scaling {axis}: a method has {number_of(largest, 'value')} of {axis_label(axis)} at most; a fit needs "
            f"{FEWEST + 1}, the largest of them to check the law{surpassed}"
        )
    # Methods are named by the classes and options in which they differ, and by two other keys if these are the same.
    options: list[dict[str, Any]] = [json.loads(method) for method in fitted]
    all_keys = dict.fromkeys(key for part in options for key in part)
    keys = [key for key in all_keys if len({json.dumps(part.get(key)) for part in options}) > 1]
    class_keys = [key for key in keys if key.endswith("_target_") or "." not in key]
    names = [", ".join(str(part.get(key)).rpartition(".")[2] for key in class_keys) for part in options]
    if len(set(names)) < len(names):
        other_keys = [key for key in keys if key not in class_keys][:2]
        others = [[f"{key}={part.get(key)}" for key in other_keys] for part in options]
        names = [", ".join([*[name] * bool(name), *texts]) for name, texts in zip(names, others, strict=True)]
    named = zip(names, fitted.values(), strict=True)
    return [replace(curve, method=name) for name, part in named for curve in part]


def axis_label(axis: str) -> str:
    return LABELS.get(axis, axis)


def trainings(frame: pd.DataFrame, logs: Mapping[Path, TrainingLog]) -> list[Training]:
    """Return the trainings of a frame: the loss of the last tenth, and the mean error of each task."""
    tasks = {
        f"error, {task}, " + ("mean over datasets" if parts[0].label == "mean" else parts[0].label): parts[0]
        for task, parts in columns_of(frame).items()
    }
    finished = []
    for run, metrics in numbers(frame):
        cost = run["record"].training
        values = {name: 100 - value for name, column in tasks.items() if (value := column.value(metrics)) is not None}
        start = 0.9 * float(cost.get("steps", math.inf))
        lines = logs[run["run"]].training
        if losses := [float(line["loss"]) for line in lines if "loss" in line and float(line["step"]) > start]:
            values = {"training loss": float(np.mean(losses)), **values}
        settings = {key: value for key, value in identity(run["config"]).items() if key != "seed"}
        flops = float(cost["flops"]) if "flops" in cost else None
        samples = float(cost["steps"]) * run["config"]["trainer"]["global_batch"]
        finished.append(Training(str(run["run"]), settings, flops, samples, values))
    return finished


def lead(axis: str, curves: Sequence[ScalingCurve]) -> str:
    """Describe the fits, and count the predictions that hold the held-out scale."""
    inside = [interval.contains(curve.held_out.mean) for curve in curves for interval in curve.predicted]
    text = (
        f"Power laws in {axis_label(axis)} (x), fitted to all trainings but those of the largest scale, which is "
        "predicted from them: the interval holds the geometric mean of its trainings with 95 % probability if the law "
        f"continues. {sum(inside)} of {len(inside)} predictions hold the held-out scale."
    )
    if axis == COMPUTE:
        text += " Scales that a cheaper one surpasses are left out of the fit (hollow in the figure)."
    return text


def table(curves: Sequence[ScalingCurve]) -> Table:
    """Laws, exponents and the check on the held-out scale."""
    several = any(curve.method for curve in curves)
    heads = ["quantity", "law", "trainings", "exponent and 95 % interval"]
    heads += ["held-out scale", "predicted", "measured", "inside"]
    rows: list[list[str | Cell]] = []
    for curve in curves:
        trainings, held_out = sum(len(scale.values) for scale in curve.scales), curve.held_out
        for fit, predicted in zip(curve.laws, curve.predicted, strict=True):
            floor = f"{fit.law.floor:.3g} + " if fit.law.floor else ""
            formula = f"{floor}{fit.law.factor:.3g} x^{-fit.law.exponent:.3g}"
            is_inside = predicted.contains(held_out.mean)
            check = [f"{held_out.x:.4g}", predicted.text(".3g"), f"{held_out.mean:.3g}"]
            rows.append([*[curve.method] * several, curve.quantity, formula, str(trainings), fit.exponent.text(".3g"),
                         *check, Cell("yes" if is_inside else "no", bold=not is_inside)])  # fmt: skip
    return text_table(["method"] * several + heads, rows, left=2 + several)


def figure(curves: Sequence[ScalingCurve], axis: str) -> Figure:
    """A panel for each quantity: trainings, law and prediction interval, and the held-out scale as diamonds."""
    quantities = list(dict.fromkeys(curve.quantity for curve in curves))
    names = list(dict.fromkeys(curve.method for curve in curves))
    figure, axes = tiles(len(quantities), 3, 4.0, 3.4)
    for panel, quantity in zip(axes, quantities, strict=True):
        for curve in (curve for curve in curves if curve.quantity == quantity):
            shade, prefix = colour(names.index(curve.method)), f"{curve.method}: " if curve.method else ""
            for scales, marker, face, text in (
                (curve.scales, "o", shade, "trainings"),
                (curve.dropped, "o", "none", ""),
                ((curve.held_out,), "D", "none", "held-out scale"),
            ):
                if points := [(scale.x, value) for scale in scales for value in scale.values]:
                    panel.plot(*zip(*points, strict=True), marker, color=shade, markerfacecolor=face, markersize=4,
                               label=prefix + text if text else None)  # fmt: skip
            grid = np.geomspace(curve.scales[0].x, curve.held_out.x, 40)
            for fit, line in zip(curve.laws, ("-", "--"), strict=False):
                name = "law with a floor" if fit.law.floor else "power law"
                values = [fit.law.value(float(x)) for x in grid]
                panel.plot(grid, values, line, color=shade, linewidth=1.2, label=prefix + name)
            bands = [curve.laws[0].predicted(float(x), runs=len(curve.held_out.values)) for x in grid]
            ends = [band.low for band in bands], [band.high for band in bands]
            band_name = f"{prefix}95 % prediction interval"
            panel.fill_between(grid, *ends, color=shade, alpha=0.15, linewidth=0, label=band_name)
        panel.set_xscale("log")
        panel.set_yscale("log")
        unit = "nats" if "loss" in quantity or "PMI" in quantity else "%"
        label(panel, fill(quantity, 40), axis_label(axis), unit, 9, grid="y")
        # Axes of less than two decades have plain numbers: powers of ten would give too few ticks.
        for side, (low, high) in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, panel.get_ylim())):
            if high / low >= 100:
                continue
            side.set_major_locator(LogLocator(subs=(1, 2, 5)) if high / low > 6 else MaxNLocator(4))
            side.set_major_formatter("{x:,.6g}")
            side.set_minor_locator(NullLocator())
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure
