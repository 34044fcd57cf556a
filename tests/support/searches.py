"""Searches whose trials are computed by a function instead of a training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipzoo.runs.search import Search, Space, Study, Trial, Value, space_of

LINES = ("data.shards=a.tar", "optim.schedule.peak=tag(log,interval(1e-5,1e-2))", "head.embed_width=16,32,64")


def search(**changes: Any) -> Search:
    settings: dict[str, Any] = {
        "sampler": "tpe", "trials": 12, "maximize": "zero_shot/*/top1", "minimize": [], "seed": 0, "startup": 4,
        "rungs": [], "keep": 0.5, "launcher": None,
    }  # fmt: skip
    return Search(**{**settings, **changes})


def space(*lines: str) -> Space:
    return space_of([], lines or LINES)


def study(folder: Path, *lines: str, **changes: Any) -> Study:
    return Study(folder, search(**changes), space(*lines))


def accuracy(values: Mapping[str, Value]) -> float:
    """A smooth function of the point with its maximum at a peak of 1e-3 and a width of 64."""
    distance = math.log10(float(values["optim.schedule.peak"])) + 3
    return 60 - 5 * distance**2 + float(values["head.embed_width"]) / 16


def complete(own: Study) -> list[Trial]:
    """Claim and finish trials until none is left; return all."""
    while (trial := own.claim()) is not None:
        own.finish(trial, "finished", [accuracy(trial.values)])
    return own.trials()
