"""Read the records of a lab: lab.json, and a file for each training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from clipzoo import io
from clipzoo.errors import ConfigError

MANIFEST = "lab.json"
ACCURACY = "accuracy"
TASKS = {ACCURACY: "accuracy", "zero_shot": "zero-shot", "image_to_text": "image to text",
         "text_to_image": "text to image"}  # fmt: skip
"""Metrics in percent, and their names on the page."""
SIMILARITY = {"rank_correlation": "rank correlation", "slope": "slope", "error": "error, nats",
              "calibrated_error": "error after calibration, nats"}  # fmt: skip
"""Measures of the agreement with the PMI."""
LOWER_IS_BETTER = ("error", "calibrated_error")


@dataclass(frozen=True)
class Seed:
    """A training of a winner with a fresh seed.

    metrics: on the test split. outcomes: by task, [n] for the samples of the test split. curve: (step, accuracy on
    validation). cost: FLOPs, seconds, processor (CPU seconds), samples. start: the scores before the first step, if
    the record has them. revision: of the code, None if it is not known.
    """

    seed: int
    metrics: Mapping[str, float]
    outcomes: Mapping[str, Sequence[float]]
    curve: Sequence[tuple[float, float]]
    cost: Mapping[str, float]
    start: Mapping[str, float]
    revision: str | None


@dataclass(frozen=True)
class Method:
    """A method of a comparison.

    seeds: finished trainings of the winner, by seed. failed: number of its trainings that diverged. winner: values of
    the searched keys. points: accuracy on validation of each finished trial. overrides: command line of the winner.
    """

    name: str
    seeds: tuple[Seed, ...]
    failed: int
    winner: Mapping[str, Any]
    points: tuple[float, ...]
    overrides: tuple[str, ...]

    def values(self, metric: str) -> list[float]:
        """Return a metric of every seed."""
        return [seed.metrics[metric] for seed in self.seeds]

    def cost(self, name: str) -> float:
        """Return a mean cost of a training."""
        return float(np.mean([seed.cost[name] for seed in self.seeds]))

    @cached_property
    def mean_outcomes(self) -> dict[str, np.ndarray]:
        """By task, the mean outcome of each test sample over the seeds."""
        tasks = self.seeds[0].outcomes
        return {task: np.mean([seed.outcomes[task] for seed in self.seeds], axis=0) for task in tasks}


@dataclass(frozen=True)
class Compared:
    """The methods of a comparison that have a finished seed.

    facts: of the world, with `oracle`, the metrics of the pointwise mutual information as a score, and `chance`, the
    zero-shot accuracy of guessing. missing: methods without a finished seed.
    """

    name: str
    facts: Mapping[str, Any]
    methods: tuple[Method, ...]
    missing: tuple[str, ...]

    def method(self, name: str) -> Method | None:
        return next((method for method in self.methods if method.name == name), None)


@dataclass(frozen=True)
class Lab:
    """facts: content of lab.json. comparisons: with at least one finished seed."""

    facts: Mapping[str, Any]
    comparisons: tuple[Compared, ...]

    @property
    def baseline(self) -> str:
        return str(self.facts["baseline"])

    @property
    def trainings(self) -> int:
        """Number of finished trainings of winners."""
        return sum(len(method.seeds) for part in self.comparisons for method in part.methods)

    @property
    def revisions(self) -> list[str | None]:
        """Revisions of the code that trained the winners."""
        found = {seed.revision for part in self.comparisons for method in part.methods for seed in method.seeds}
        return sorted(found, key=str)

    @property
    def planned(self) -> int:
        return int(self.facts["seeds"]) * sum(len(part["methods"]) for part in self.facts["comparisons"])


def read_lab(folder: Path, newer: Mapping[str, Any] | None = None) -> Lab:
    """Read a lab. newer: facts that replace those of lab.json. Raises ConfigError if nothing is finished."""
    path = folder / MANIFEST
    if not path.exists():
        raise ConfigError(f"{folder} holds no lab: run clipzoo lab --output {folder} first")
    facts = io.read_json(path, 16 * io.MB, "run the same clipzoo lab command again") | dict(newer or {})
    kinds = {"baseline": str, "seeds": int, "comparisons": list, "title": str, "claims": list, "notes": list}
    io.require_fields(path, facts, kinds)
    damage = io.DamageLog()
    parts = [_compared(folder, node, damage) for node in facts["comparisons"]]
    finished = tuple(part for part in parts if part.methods)
    if not finished:
        raise ConfigError(f"no winner of {folder} is trained yet: let clipzoo lab run on")
    return Lab(facts, finished)


def _compared(folder: Path, node: Mapping[str, Any], damage: io.DamageLog) -> Compared:
    methods = [_method(io.below(folder, item["folder"]), item["name"], damage) for item in node["methods"]]
    present = tuple(method for method in methods if method.seeds)
    missing = tuple(method.name for method in methods if not method.seeds)
    return Compared(node["name"], node, present, missing)


def _method(folder: Path, name: str, damage: io.DamageLog) -> Method:
    records = [_record(path, damage) for path in sorted((folder / "seeds").glob("*.json"), key=_number)]
    read = [record for record in records if record]
    done = [record for record in read if "failed" not in record]
    points = [_record(path, damage) for path in sorted((folder / "points").glob("*.json"), key=_number)]
    seeds = tuple(
        Seed(
            record["seed"], record["test"], record["outcomes"], record["curve"], record["cost"],
            record.get("start", {}), record.get("revision"),
        )
        for record in done
    )  # fmt: skip
    accuracies = tuple(float(point["validation"][ACCURACY]) for point in points if point)
    first = read[0] if read else {"values": {}, "overrides": []}
    return Method(name, seeds, len(read) - len(done), first["values"], accuracies, tuple(first.get("overrides", ())))


def _record(path: Path, damage: io.DamageLog) -> dict[str, Any]:
    return damage.read(
        partial(io.read_json, path, 16 * io.MB, "remove it, and clipzoo lab trains it again"), dict[str, Any]()
    )


def _number(path: Path) -> int:
    return int(path.stem)
