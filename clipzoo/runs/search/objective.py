"""The metrics that a search compares: names in results.json, or means over several of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from clipzoo.errors import ConfigError
from clipzoo.runs.metric_key import VALIDATION, VALIDATION_LOSS, written
from clipzoo.runs.record import RunRecord
from clipzoo.runs.training_log import TrainingLog

LOSS = "loss"
"""Name of the last training loss."""
COSTS = "training/"
"""Start of the names of a training's costs, such as training/seconds."""
TASKS = ("zero_shot", "linear_probe", "retrieval")
SUITE = "clipzoo.evaluation.suite.Suite"
MOST_NAMES = 12


def measured(names: Sequence[str], values: Mapping[str, float]) -> list[float]:
    """Return the value of each name; of a pattern ("zero_shot/*/top1"), the mean over the values that match.

    Raises:
        ConfigError: nothing has this name.
    """
    return [_value(name, values) for name in names]


def results_of(folder: Path) -> dict[str, float]:
    """Return all numbers of a finished run by name: metrics, costs of the training, and the last loss."""
    record = RunRecord.read(folder)
    costs = {
        f"{COSTS}{name}": float(value) for name, value in record.training.items() if isinstance(value, int | float)
    }
    losses = [float(line[LOSS]) for line in TrainingLog.read(folder).training if LOSS in line]
    return {**written(record.metrics), **costs, **({LOSS: losses[-1]} if losses else {})}


def require_metrics(names: Sequence[str], evaluation: Mapping[str, Any], rungs: Sequence[float]) -> None:
    """Raise ConfigError if an evaluation has no metric of these names: before anything is trained.

    rungs: those of the search, which compare evaluations.
    """
    places = [f"{task}/{name}" for task in TASKS for name in evaluation.get(task) or ()]
    validated = [str(VALIDATION_LOSS)] if evaluation.get("validation") else []
    places += [f"retrieval/{VALIDATION}"] if validated else []
    known = [*(f"{place}/..." for place in places), *validated, LOSS, f"{COSTS}seconds"]
    own = evaluation.get("_target_") != SUITE
    for number, name in enumerate(names):
        is_cost = name == LOSS or name.startswith(COSTS)
        found = own or name in validated or any(_may_match(name, place) for place in places)
        if not is_cost and not found:
            raise ConfigError(
                f"there is no metric {name} (there are: {', '.join(known)}): choose eval=... or its datasets"
            )
        if rungs and number == 0 and is_cost:
            raise ConfigError(
                f"search.rungs compare evaluations during training, and {name} is not one: give search.rungs=[], or "
                "another first metric"
            )


def _value(name: str, values: Mapping[str, float]) -> float:
    matching = [value for key, value in values.items() if key == name or fnmatchcase(key, name)]
    if not matching:
        known = ", ".join(sorted(values)[:MOST_NAMES])
        raise ConfigError(f"there is no metric {name} (there are: {known})")
    return statistics.fmean(matching)


def _may_match(name: str, place: str) -> bool:
    """Return True if a name or pattern may be that of a metric of this task and dataset."""
    segments = name.split("/")
    candidates = (place, f"{place}_paired")
    return len(segments) > 2 and any(fnmatchcase(candidate, "/".join(segments[:2])) for candidate in candidates)
