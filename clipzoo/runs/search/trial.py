"""A point of a search: its values, its state and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from clipzoo.runs.search.space import Value
from clipzoo.runs.sweep import Point

State = Literal["not started", "running", "finished", "pruned", "failed"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True)
class Trial:
    """A point of a search.

    Args:
        number: from 0, in the order of the draws.
        values: value of each searched key.
        state: "running" also for a trial whose process has been killed; "not started" for points of a sweep alone.
        overrides: command line of its run. run: its run directory, if it has ended.
        results: values of the metrics, if it is finished.
        rungs: first metric at each rung that it has reached.
        reason: of a failure.
    """

    number: int
    values: Mapping[str, Value]
    state: State
    overrides: tuple[str, ...]
    run: Path | None = None
    results: tuple[float, ...] = ()
    rungs: Mapping[int, float] = field(default_factory=dict)
    reason: str = ""

    @cached_property
    def folder(self) -> Path:
        """The run directory, which is found by the configuration until the trial has ended."""
        return self.run or Point({}, self.overrides).folder


def passes(rung: int, value: float, trials: Sequence[Trial], number: int, maximize: bool, keep: float) -> bool:
    """Return True if a trial goes on at a rung: it is among the best `keep` of all trials that have reached the rung.

    The best one always continues. Asynchronous successive halving: Li et al. 2020, "A System for Massively Parallel
    Hyperparameter Tuning".
    """
    others = [trial.rungs[rung] for trial in trials if trial.number != number and rung in trial.rungs]
    better = sum(other > value if maximize else other < value for other in others)
    return better < max(1, int(keep * (len(others) + 1) + 1e-9))


def front(trials: Sequence[Trial], directions: Sequence[str]) -> list[Trial]:
    """Return the finished trials that no other one surpasses: of several metrics the Pareto front, of one the best."""
    signs = [1 if direction == "maximize" else -1 for direction in directions]
    points = {
        trial.number: tuple(sign * value for sign, value in zip(signs, trial.results, strict=True))
        for trial in trials
        if trial.state == "finished"
    }

    def surpassed(point: tuple[float, ...]) -> bool:
        return any(
            other != point and all(mine <= theirs for mine, theirs in zip(point, other, strict=True))
            for other in points.values()
        )

    return [trial for trial in trials if trial.number in points and not surpassed(points[trial.number])]
