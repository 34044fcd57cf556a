"""Power laws of a loss and of error rates in compute, samples or width, fitted to trainings of several scales."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from clipzoo.errors import ConfigError, number_of
from clipzoo.report.statistics.intervals import Interval
from clipzoo.report.statistics.scaling import RESAMPLES, ScalingFit, fit_power_law

COMPUTE, SAMPLES, WIDTH = "compute", "samples", "width"
LABELS = {COMPUTE: "FLOPs of the training", SAMPLES: "samples seen", WIDTH: "encoder.image_width"}
GROUPS = {COMPUTE: ("encoder", "head.embed_width", "trainer", "optim", "data"), SAMPLES: ("trainer", "optim", "data")}
"""By axis, the keys whose numbers may differ along a curve; for a configuration key, its group and the schedule."""
FLOOR_RESAMPLES = 300
FEWEST = 4
"""Smallest number of scales of a fit. A law with a floor needs one more."""
MOST_KEYS = 2
"""Largest number of keys in the name of a method, beside classes."""


@dataclass(frozen=True)
class Training:
    """A finished training.

    name: for messages. settings: flat configuration without the seed. flops, samples: its cost; None: not recorded.
    values: what is fitted, by quantity; all are losses or errors, in nats or percent.
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
        key, value = label(axis), self.settings.get(label(axis))
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(
                f"--scaling {axis}: {self.name} has {key}={value}; give compute, samples, width or a configuration "
                "key with numbers above 0"
            )
        return float(value)


@dataclass(frozen=True)
class Scale:
    """Trainings that differ in their seed alone. x: their place on the axis. values: loss or error of each one."""

    x: float
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Geometric mean: power laws are fitted to logarithms."""
        return math.exp(float(np.mean(np.log(self.values))))


@dataclass(frozen=True)
class Extrapolation:
    """A power law and the scale that it was not fitted to.

    predicted: prediction interval of the geometric mean of as many trainings as the held-out scale has.
    """

    fit: ScalingFit
    predicted: Interval
    is_inside: bool


@dataclass(frozen=True)
class Curve:
    """A quantity of one method over the scales of an axis.

    method: its name, empty if there is only one. scales: those of the fit, ascending. dropped: scales that a cheaper
    one surpasses. held_out: the largest scale. laws: without a floor and, with scales enough, with one.
    """

    method: str
    quantity: str
    scales: tuple[Scale, ...]
    dropped: tuple[Scale, ...]
    held_out: Scale
    laws: tuple[Extrapolation, ...] = field(repr=False)


def curves(trainings: Sequence[Training], axis: str) -> list[Curve]:
    """Fit every quantity of every method; the largest scale is held out.

    axis: `compute`, `samples`, `width` or a configuration key with numbers. Trainings form one curve if they differ
    only in numbers of the keys in GROUPS. At equal places the best setting counts. Along compute, scales that a
    cheaper one surpasses are left out of the fit.

    Raises:
        ConfigError: trainings without a value on the axis, or too few scales for a fit.
    """
    methods: dict[str, list[Training]] = {}
    for training in trainings:
        methods.setdefault(_method(training, axis), []).append(training)
    quantities = dict.fromkeys(quantity for training in trainings for quantity in training.values)
    found = {
        method: [curve for quantity in quantities if (curve := _curve(quantity, group, axis))]
        for method, group in methods.items()
    }
    found = {method: fitted for method, fitted in found.items() if fitted}
    if not found:
        most = max(len({training.place(axis) for training in group}) for group in methods.values())
        raise ConfigError(
            f"--scaling {axis}: a method has {number_of(most, 'value')} of {label(axis)} at most; a fit needs "
            f"{FEWEST + 1}, the "
            "largest of them to check the law"
            + "; scales that a cheaper one surpasses do not count"
            * (axis == COMPUTE)
        )
    named = zip(_names(list(found)), found.values(), strict=True)
    return [replace(curve, method=name) for name, fitted in named for curve in fitted]


def label(axis: str) -> str:
    return LABELS.get(axis, axis)


def _method(training: Training, axis: str) -> str:
    """Return what the trainings of one curve have in common."""
    free = GROUPS.get(axis) or (label(axis).partition(".")[0], "head.embed_width", "optim.schedule")
    same = {key: value for key, value in training.settings.items() if not _is_free(key, value, free)}
    return json.dumps(same, sort_keys=True, default=str)


def _is_free(key: str, value: Any, groups: Sequence[str]) -> bool:
    is_number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return (is_number or key.startswith("data.")) and any(
        key == group or key.startswith(f"{group}.") for group in groups
    )


def _names(methods: Sequence[str]) -> list[str]:
    """Name methods by the classes and options in which they differ, and by other keys if these are the same."""
    if len(methods) == 1:
        return [""]
    settings: list[dict[str, Any]] = [json.loads(method) for method in methods]
    keys = [
        key
        for key in dict.fromkeys(key for own in settings for key in own)
        if len({json.dumps(own.get(key)) for own in settings}) > 1
    ]
    chosen = [key for key in keys if key.endswith("_target_") or "." not in key]
    names = [", ".join(str(own.get(key)).rpartition(".")[2] for key in chosen) for own in settings]
    if len(set(names)) == len(names):
        return names
    others = [key for key in keys if key not in chosen][:MOST_KEYS]
    return [", ".join([name] * bool(name) + [f"{key}={own.get(key)}" for key in others])
            for name, own in zip(names, settings, strict=True)]  # fmt: skip


def _curve(quantity: str, trainings: Sequence[Training], axis: str) -> Curve | None:
    """Return None with too few scales."""
    scales = _scales(trainings, axis, quantity)
    if len(scales) <= FEWEST:
        return None
    *others, last = scales
    kept = tuple(_front(others)) if axis == COMPUTE else tuple(others)
    if len(kept) < FEWEST:
        return None
    dropped = tuple(scale for scale in others if scale not in kept)
    return Curve("", quantity, kept, dropped, last, tuple(_extrapolations(kept, last)))


def _scales(trainings: Sequence[Training], axis: str, quantity: str) -> list[Scale]:
    settings: dict[str, list[Training]] = {}
    for training in trainings:
        settings.setdefault(json.dumps(training.settings, sort_keys=True, default=str), []).append(training)
    best: dict[float, Scale] = {}
    for group in settings.values():
        values = tuple(value for training in group if (value := training.values.get(quantity, 0.0)) > 0)
        x = group[0].place(axis)
        if values and (x not in best or Scale(x, values).mean < best[x].mean):
            best[x] = Scale(x, values)
    return [best[x] for x in sorted(best)]


def _front(scales: Sequence[Scale]) -> Iterator[Scale]:
    """Yield the scales that no cheaper one surpasses."""
    least = math.inf
    for scale in scales:
        if scale.mean < least:
            yield scale
            least = scale.mean


def _extrapolations(scales: Sequence[Scale], held_out: Scale) -> Iterator[Extrapolation]:
    x = [scale.x for scale in scales for _ in scale.values]
    y = [value for scale in scales for value in scale.values]
    for with_floor in (False, True) if len(scales) > FEWEST else (False,):
        # A law with a floor is fitted by iterations: fewer resamples.
        fit = fit_power_law(x, y, with_floor, resamples=FLOOR_RESAMPLES if with_floor else RESAMPLES)
        predicted = fit.predicted(held_out.x, runs=len(held_out.values))
        yield Extrapolation(fit, predicted, predicted.contains(held_out.mean))
