"""Curves of a training, with titles and units. Needs neither torch nor matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clipzoo.config.schema import class_constant
from clipzoo.runs.metric_key import VALIDATION_LOSS, MetricKey
from clipzoo.runs.training_log import Line

HIDDEN = {"step", "epoch", "seconds", "event", "forward", "backward", "optimizer", "peak_memory_mib", "slowest_rank"}
FIRST = ("loss", "objective", "lr", "temperature", "gamma", "gradient_norm", "samples_per_second", "data_wait")
TITLES = {
    "lr": "learning rate",
    "gradient_norm": "gradient norm",
    "samples_per_second": "throughput",
    "data_wait": "time waiting for data",
    "slowest_rank_excess": "time of the slowest rank above the median",
    "flops_utilisation": "model FLOPs utilization",
}
UNITS = {
    "samples_per_second": "samples/s",
    "data_wait": "fraction of the time",
    "flops_utilisation": "fraction of the peak",
    "slowest_rank_excess": "fraction",
    **{
        f"{kind}_{direction}": "logit"
        for kind in ("positive", "negative", "gap")
        for direction in ("image_to_text", "text_to_image")
    },
    "alignment": "squared distance",
}
LOSSES = ("loss", "loss_image_to_text", "loss_text_to_image")
"""Numbers whose unit is that of the objective's loss."""
METRICS = {("zero_shot", "top1"): "zero-shot top-1", ("retrieval", "recall_at_1"): "recall@1"}


@dataclass(frozen=True)
class Curve:
    """Values of one quantity over training steps. unit: empty for a number without one."""

    name: str
    title: str
    unit: str
    steps: tuple[float, ...]
    values: tuple[float, ...]


def loss_unit(config: Mapping[str, Any]) -> str:
    """Return the unit of the loss of a run's objective; empty without one, and for classes of other packages."""
    return _of_objective(config, "loss_unit")


def value_log(config: Mapping[str, Any]) -> str:
    """Return the name of the number in metrics.jsonl that the validation loss is compared with."""
    return _of_objective(config, "value_log") or "loss"


def _of_objective(config: Mapping[str, Any], constant: str) -> str:
    """Return a constant of the objective's class; empty without one, and for classes of other packages.

    Other packages are not imported: a report shows the runs of strangers.
    """
    target = str(config.get("objective", {}).get("_target_"))
    if not target.startswith("clipzoo."):
        return ""
    try:
        return str(class_constant(target, constant) or "")
    except LookupError:
        return ""


def training_curves(lines: Sequence[Line], loss_unit: str = "") -> list[Curve]:
    """Return a curve per varying number of metrics.jsonl, the loss first."""
    units = UNITS | dict.fromkeys(LOSSES, loss_unit)
    names = dict.fromkeys(name for line in lines for name, value in line.items() if isinstance(value, int | float))
    curves = {
        name: _curve(lines, name, TITLES.get(name, name.replace("_", " ")), units.get(name, "")) for name in names
    }
    shown = [curves[name] for name in FIRST if name in curves]
    others = [curve for name, curve in curves.items() if name not in (*FIRST, *HIDDEN)]
    return shown + [_per_step(curve) for curve in others if len(set(curve.values)) > 1]


def evaluation_curves(evaluations: Sequence[Line]) -> list[Curve]:
    """Return zero-shot top-1 and recall@1 during training, a curve per dataset and direction."""
    keys = {text: MetricKey.parse(text) for text in (evaluations[-1] if evaluations else ())}
    return [
        _curve(evaluations, text, f"{METRICS[key.task, key.metric]}, {_dataset(key)}", "%")
        for text, key in keys.items()
        if (key.task, key.metric) in METRICS
    ]


def validation_curve(evaluations: Sequence[Line]) -> Curve:
    """Return the loss on held-out pairs, without a point if it was not measured."""
    return _curve(evaluations, str(VALIDATION_LOSS), "validation", "")


def _curve(lines: Sequence[Line], name: str, title: str, unit: str) -> Curve:
    points = [(float(line["step"]), float(line[name])) for line in lines if isinstance(line.get(name), int | float)]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return Curve(name, title, unit, steps, values)


def _per_step(curve: Curve) -> Curve:
    """Return a running total, such as the number of transparent images so far, per step; other curves unchanged.

    Totals are the only whole numbers of the log that never fall.
    """
    values, steps = (0, *curve.values), (0.0, *curve.steps)
    if not all(value.is_integer() for value in curve.values) or list(values) != sorted(values):
        return curve
    rates = [
        (after - before) / max(1.0, end - start)
        for before, after, start, end in zip(values, values[1:], steps, steps[1:], strict=False)
    ]
    return replace(curve, unit="samples per step", values=tuple(rates))


def _dataset(key: MetricKey) -> str:
    return f"{key.dataset} {key.protocol}".strip().replace("_", " ")
