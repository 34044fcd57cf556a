"""Power laws of a lab whose methods are trained at several scales."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from clipzoo.errors import ConfigError
from clipzoo.report.comparison.scaling import COMPUTE, SAMPLES, WIDTH, Curve, Training, curves
from clipzoo.report.lab.records import ACCURACY, Compared, Method

LOSS, PMI_ERROR = "loss", "error"
"""Metrics of the records, in nats."""


def laws(compared: Compared) -> Iterator[tuple[str, list[Curve]]]:
    """Yield the axes that have scales enough, and their curves."""
    trainings = [training for method in compared.methods for training in _trainings(method)]
    for axis in (COMPUTE, SAMPLES, WIDTH):
        try:
            yield axis, curves(trainings, axis)
        except ConfigError:  # the scales of this lab do not vary the axis
            continue


def best(compared: Compared) -> str:
    """Say what the PMI itself reaches: no law can fall below."""
    oracle = compared.facts["oracle"]
    return f"The PMI itself has a loss of {oracle[LOSS]:.2f} nats and an error of {100 - oracle[ACCURACY]:.1f} %."


def _trainings(method: Method) -> Iterator[Training]:
    pairs = (line.partition("=") for line in method.overrides)
    settings = {key: yaml.safe_load(value) for key, _, value in pairs}
    for seed in method.seeds:
        values = {
            "test loss": seed.metrics[LOSS], "error, accuracy": 100 - seed.metrics[ACCURACY],
            "distance from the PMI": seed.metrics[PMI_ERROR],
        }  # fmt: skip
        yield Training(f"{method.name}, seed {seed.seed}", settings, seed.cost["flops"], seed.cost["samples"], values)
