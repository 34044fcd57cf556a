"""Trials of a search or points of a sweep, with their costs: the table, and the importance of the searched keys."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from clipzoo.errors import number_of
from clipzoo.io import DamageLog
from clipzoo.io.text import shorten
from clipzoo.report.table import Cell, Table, text_table
from clipzoo.runs.directory import is_finished
from clipzoo.runs.record import RunRecord
from clipzoo.runs.search.trial import STATES, Trial, front
from clipzoo.runs.training_log import TrainingLog

MOST_GROUPS = 4
"""Groups into which the values of a key are divided for its importance."""
SECONDS = "seconds"
LONGEST_VALUE = 24
"""Columns of a value in the label of a run."""


@dataclass(frozen=True)
class Trials:
    """Trials of a search with their metrics, for its page.

    Args:
        trials: in the order of the draws.
        metrics, directions: compared values, "maximize" or "minimize" for each. rungs: shares of the training.
        runs: run directories of trials that are means over seeds, by number.
        scales: True for each key whose axis is logarithmic, False for each whose axis is linear; other axes follow
            from their values.
    """

    trials: Sequence[Trial]
    metrics: Sequence[str]
    directions: Sequence[str]
    rungs: Sequence[float] = ()
    runs: Mapping[int, Sequence[Path]] = field(default_factory=dict)
    scales: Mapping[str, bool] = field(default_factory=dict)

    @cached_property
    def keys(self) -> list[str]:
        """The searched keys."""
        return list(dict.fromkeys(key for trial in self.trials for key in trial.values))

    @property
    def labels(self) -> dict[Path, str]:
        """The searched values of each run, "peak=0.001 width=32". Keys are cut to their last parts if these differ."""
        short = {key: key.rpartition(".")[2] for key in self.keys}
        names = short if len(set(short.values())) == len(short) else dict(zip(self.keys, self.keys, strict=True))
        return {
            folder: " ".join(
                f"{names[key]}={shorten(str(value), LONGEST_VALUE)}" for key, value in trial.values.items()
            )
            for trial in self.trials
            for folder in self.runs.get(trial.number, [trial.folder])
        }

    @cached_property
    def finished(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.state == "finished"]

    @cached_property
    def best(self) -> list[Trial]:
        """The best trial; with several metrics, all that no other trial surpasses in every metric."""
        return front(self.finished, self.directions)

    @cached_property
    def minutes(self) -> dict[int, float]:
        """Minutes of training of each trial, 0 where unknown."""
        return {
            trial.number: sum(map(_minutes, self.runs.get(trial.number) or [trial.folder])) for trial in self.trials
        }

    @property
    def compared(self) -> tuple[str, dict[int, float]]:
        """First metric of as many trials as possible: finished ones, or all at the first rung; its name, by number."""
        finished = {trial.number: trial.results[0] for trial in self.finished}
        early = {trial.number: trial.rungs[0] for trial in self.trials if 0 in trial.rungs}
        if len(early) > len(finished):
            return f"{self.metrics[0]} after {self.rungs[0]:.0%} of the training", early
        return self.metrics[0], finished

    @property
    def summary(self) -> str:
        counts = {state: sum(trial.state == state for trial in self.trials) for state in STATES}
        known = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        minutes = sum(self.minutes.values())
        return f"{number_of(len(self.trials), 'trial')}: {known or 'none finished'}; {minutes:.3g} minutes of training"


def trial_table(shown: Trials, most: int | None = None) -> Table:
    """A row for each trial, the best with a star. most: number of rows, of the best trials."""
    trials = list(shown.trials)
    if most is not None and len(trials) > most:
        sign = -1 if shown.directions[0] == "maximize" else 1
        chosen = sorted(shown.finished, key=lambda trial: sign * trial.results[0])[:most]
        trials = sorted(chosen, key=lambda trial: trial.number)
    best = {trial.number for trial in shown.best}
    rows = []
    for trial in trials:
        results = [f"{value:.4g}" for value in trial.results] or ["-"] * len(shown.metrics)
        rungs = [value for _, value in sorted(trial.rungs.items())]
        if trial.state == "pruned" and rungs:
            results[0] = f"({rungs[-1]:.4g})"
        state = f"{trial.state}{': ' if trial.reason else ''}{trial.reason}"
        values = [str(trial.values.get(key, "")) for key in shown.keys]
        own = [str(trial.number + 1), *values, *results, f"{shown.minutes[trial.number]:.3g}", state]
        own[len(values) + 1] += "*" if trial.number in best else ""
        rows.append([Cell(text, bold=trial.number in best) for text in own])
    return text_table(["trial", *shown.keys, *shown.metrics, "minutes", "state"], rows, left=1 + len(shown.keys))


def importance(shown: Trials) -> dict[str, float]:
    """Share of the variance of the compared metric that each key explains by itself, the largest first.

    The values of a key are divided into at most MOST_GROUPS groups of neighbouring values; the share is the effect size
    epsilon squared of a one-way analysis of variance (Kelley 1935): what chance alone explains is subtracted. Keys with
    as many groups as values have no share.
    """
    _, values = shown.compared
    trials = [trial for trial in shown.trials if trial.number in values]
    found = {}
    for key in shown.keys:
        share = _share(groups([trial.values[key] for trial in trials]), [values[trial.number] for trial in trials])
        if share is not None:
            found[key] = share
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def groups(values: Sequence[object]) -> list[int]:
    """Return the number of a group for each value: of equal values, or of neighbouring numbers if there are many."""
    distinct = list(dict.fromkeys(values))
    if (numbers := as_numbers(values)) is None or len(distinct) <= MOST_GROUPS:
        return [distinct.index(value) for value in values]
    ordered = sorted(numbers)
    return [ordered.index(number) * MOST_GROUPS // len(ordered) for number in numbers]


def as_numbers(values: Sequence[object]) -> list[float] | None:
    """Return the values as numbers, None if one is none."""
    try:
        return [float(str(value)) for value in values]
    except ValueError:
        return None


def _share(numbers: Sequence[int], values: Sequence[float]) -> float | None:
    members: Mapping[int, list[float]] = {number: [] for number in numbers}
    for number, value in zip(numbers, values, strict=True):
        members[number].append(value)
    if len(members) < 2 or len(values) <= len(members):
        return None
    mean = statistics.fmean(values)
    total = sum((value - mean) ** 2 for value in values)
    within = sum((value - statistics.fmean(group)) ** 2 for group in members.values() for value in group)
    if total == 0:
        return 0.0
    chance = (len(members) - 1) * within / (len(values) - len(members))
    return max(0.0, (total - within - chance) / total)


def _minutes(run: Path) -> float:
    damage = DamageLog()
    log = damage.read(partial(TrainingLog.read, run), TrainingLog((), ()))
    record = damage.read(partial(RunRecord.read, run), RunRecord()) if is_finished(run) else RunRecord()
    seconds = [float(line[SECONDS]) for line in log.training if SECONDS in line]
    return max([*seconds, float(record.training.get(SECONDS, 0.0))]) / 60
