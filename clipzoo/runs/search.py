"""Hyperparameter search: a sweep whose points are drawn from ranges, one by one, and stored in a study on the disk.

The next point is a pure function of the seed, the number of the trial and the earlier trials: a search that was killed
draws the points that it would have drawn. Optuna stores the trials and draws for "tpe". Its other parts do not fit: its
grid has a random order, its Sobol sequence no lists of values, and its pruners no rungs at shares of a training.

The journal of a study holds values, never a command line. Command lines are made only from the search space of
the running command, so that a foreign journal cannot add overrides.

runs/search-<digest>/search.json     the ranges, the settings, the command line: for readers, never loaded
runs/search-<digest>/journal.log     trials; optuna.storages.journal.JournalFileBackend reads it
runs/search-<digest>/trials/<n>.lock held by the process that runs trial n; the system releases it at its end
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import math
import operator
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from hydra.core.override_parser.types import IntervalSweep

from clipzoo import io
from clipzoo.config.compose import NOT_SETTINGS, compose, compose_search
from clipzoo.config.trust import alternatives, is_within, read
from clipzoo.config.vocabulary import Ascending, Count, Names, Range, Seed, Share
from clipzoo.errors import ConfigError, cause, installation
from clipzoo.io import shortened
from clipzoo.runs.directory import run_folder, with_digests
from clipzoo.runs.identity import HARMLESS, identity
from clipzoo.runs.lock import locked, try_lock
from clipzoo.runs.record import TASKS, VALIDATION, VALIDATION_LOSS, RunRecord, TrainingLog, written
from clipzoo.runs.status import DESCRIPTION, JOURNAL
from clipzoo.runs.sweep import Point, of_search_option, require_own_names

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial

Value = str | int | float
"""The text of a list's value, or a number of an interval."""
State = Literal["not started", "running", "finished", "pruned", "failed"]
STATES: tuple[State, ...] = get_args(State)
DIGITS = 4
"""Significant digits of drawn numbers: more would only lengthen the names of runs."""
ATTEMPTS = 10
"""Draws of the sampler that may repeat an earlier point; then one of the remaining points is drawn."""
MOST_POINTS = 100_000
"""Largest number of points of a search whose remaining points are listed."""
LOSS = "loss"
COSTS = "training/"
"""Start of the names of a training's costs, such as training/seconds."""
PRUNED = "pruned_at"
"""User attribute of a trial in the journal: the rung that it did not pass."""
OPTUNA_STATES: dict[State, str] = {"running": "RUNNING", "finished": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
SUITE = "clipzoo.evaluation.suite.Suite"
MOST_NAMES = 12


@dataclass(frozen=True)
class Search:
    """Settings of a search.

    sampler: draws the points; None: a plain sweep over all combinations of lists.
    trials: number of points to draw; None: all combinations, for "grid".
    maximize, minimize: metrics, in this order; pruning uses the first one.
    seed: seeds the draws, which are a function of this seed, the number of the trial and the earlier results.
    startup: number of random points before "tpe" models the results.
    rungs: shares of the training after which trials are compared; empty: no pruning.
    keep: share of the trials that continue at a rung.
    launcher: prefix of the command of a trial, which starts its ranks.
    """

    sampler: Literal["tpe", "quasi_random", "random", "grid"] | None
    trials: Count | None
    maximize: str | Names
    minimize: str | Names
    seed: Seed
    startup: Count
    rungs: Annotated[list[Annotated[float, Range(above=0, below=1)]], Ascending()]
    keep: Share
    launcher: str | None

    def __post_init__(self) -> None:
        # A single name is a list of one.
        for name in ("maximize", "minimize"):
            if isinstance(names := getattr(self, name), str):
                object.__setattr__(self, name, [names])

    @property
    def metrics(self) -> list[str]:
        """Names or patterns of the metrics; see `measured`."""
        return [*self.maximize, *self.minimize]

    @property
    def directions(self) -> list[Literal["maximize", "minimize"]]:
        return [*(["maximize"] * len(self.maximize)), *(["minimize"] * len(self.minimize))]  # type: ignore[list-item]

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that determine which points are drawn, for the identity of the study."""
        names = ("sampler", "maximize", "minimize", "seed", "startup", "rungs", "keep")
        return {name: getattr(self, name) for name in names}


def search_of(overrides: Sequence[str]) -> tuple[Search, Space] | None:
    """Return the search of a command line, None for a plain sweep. Raises ConfigError for wrong settings or ranges."""
    hydra = [line for line in overrides if line.lstrip("+").startswith("hydra")]
    parsed = [read(line) for line in overrides if line not in hydra]
    for override in parsed:
        if override.is_sweep_override() and override.key_or_group.startswith("search."):
            raise ConfigError(f"{override.input_line}: a search has one value of {override.get_key_element()}")
    node = compose_search([str(line.input_line) for line in parsed if not line.is_sweep_override()])
    search = Search(**{key: value for key, value in node.items() if key != "_target_"})
    if search.sampler is None:
        if settings := [line for line in overrides if line.startswith("search.")]:
            raise ConfigError(f"{settings[0]} has no effect without search.sampler=tpe, quasi_random, random or grid")
        return None
    if not search.metrics:
        raise ConfigError(
            f"search.sampler={search.sampler} needs a metric: give search.maximize='zero_shot/*/top1' or "
            "search.minimize=loss"
        )
    if repeated := {*search.maximize} & {*search.minimize}:
        raise ConfigError(f"{repeated.pop()} is in search.maximize and in search.minimize: leave it out of one")
    if search.trials is None and search.sampler != "grid":
        raise ConfigError(f"search.sampler={search.sampler} needs the number of runs: give search.trials=20")
    if hydra:
        raise ConfigError(
            f"{hydra[0]} is for plain sweeps: run the command of a search several times, or clipzoo launch --submit"
        )
    space = space_of(of_search_option(overrides), overrides)
    space.require(search.sampler)
    require_metrics(search.metrics, compose(space.corner_lines()[0])["eval"], search.rungs)
    return search, space


@dataclass(frozen=True)
class Choice:
    """A list of values of a key, as texts of the command line."""

    values: tuple[str, ...]

    @property
    def ends(self) -> tuple[str, ...]:
        """Values that are checked before anything is trained."""
        return self.values

    listed = description = ends

    @property
    def count(self) -> float:
        return len(self.values)

    def has(self, value: Any) -> bool:
        return value in self.values

    def at(self, share: float) -> Value:
        """Return the value at a share in [0, 1) of the list."""
        return self.values[int(share * len(self.values))]

    def rounded(self, value: Any) -> Value:
        return str(value)


@dataclass(frozen=True)
class Interval:
    """An interval of numbers, both ends included. log: drawn uniformly in the logarithm."""

    low: float
    high: float
    log: bool
    whole: bool

    @property
    def ends(self) -> tuple[str, ...]:
        return str(self.low), str(self.high)

    @property
    def listed(self) -> range:
        """All values of an interval of whole numbers."""
        return range(math.ceil(self.low), math.floor(self.high) + 1)

    @property
    def count(self) -> float:
        return self.high - self.low + 1 if self.whole else math.inf

    @property
    def description(self) -> list[Any]:
        return [self.low, self.high, "log" if self.log else "linear", "whole" if self.whole else "real"]

    def has(self, value: Any) -> bool:
        return type(value) is (int if self.whole else float) and self.low <= value <= self.high

    def at(self, share: float) -> Value:
        """Return the number at a share in [0, 1) of the interval."""
        margin = 0.5 if self.whole else 0.0
        low, high = self.low - margin, self.high + margin
        if self.log:
            return self.rounded(math.exp(math.log(low) + share * (math.log(high) - math.log(low))))
        return self.rounded(low + share * (high - low))

    def rounded(self, value: Any) -> Value:
        """Return a drawn number with few digits, inside the interval."""
        number = round(value) if self.whole else float(f"{value:.{DIGITS}g}")
        return type(number)(min(max(number, self.low), self.high))


Dimension = Choice | Interval


@dataclass(frozen=True)
class Space:
    """The searched keys and the command line: (key, "") for each searched key, (None, override) for the others."""

    dimensions: Mapping[str, Dimension]
    lines: tuple[tuple[str | None, str], ...]

    @property
    def count(self) -> float:
        """Number of points, infinite with an interval of real numbers."""
        return math.prod(dimension.count for dimension in self.dimensions.values())

    @property
    def scales(self) -> dict[str, bool]:
        """True for each interval whose numbers are drawn uniformly in the logarithm, False for any other interval."""
        return {key: dimension.log for key, dimension in self.dimensions.items() if isinstance(dimension, Interval)}

    @property
    def described(self) -> dict[str, Sequence[Any]]:
        return {key: dimension.description for key, dimension in self.dimensions.items()}

    def overrides(self, values: Mapping[str, Value]) -> tuple[str, ...]:
        """Return the command line of a point."""
        return tuple(f"{key}={values[key]}" if key else line for key, line in self.lines)

    def corner_lines(self) -> list[tuple[str, ...]]:
        """Return as few command lines as contain every value of a list and both ends of every interval."""
        ends = {key: dimension.ends for key, dimension in self.dimensions.items()}
        return [
            self.overrides({key: values[min(index, len(values) - 1)] for key, values in ends.items()})
            for index in range(max(map(len, ends.values())))
        ]

    def require(self, sampler: str) -> None:
        """Raise ConfigError if a sampler cannot draw from this space."""
        endless = [key for key, dimension in self.dimensions.items() if math.isinf(dimension.count)]
        if sampler == "grid" and endless:
            raise ConfigError(
                f"search.sampler=grid takes lists, and {endless[0]} is an interval: give {endless[0]}=a,b,c, or "
                "another sampler"
            )
        if sampler != "grid" and "seed" in self.dimensions:
            raise ConfigError(
                f"search.sampler={sampler} would select a lucky seed: give one seed, and train the best point with "
                "several"
            )


def space_of(searched: Sequence[str], overrides: Sequence[str]) -> Space:
    """Return the space of a command line. searched: swept overrides of its `search=`, which the command line replaces.

    The last override of a key counts, as elsewhere on the command line. Raises ConfigError if a range is invalid, or
    there is none.
    """
    # Overrides of the `search` node are not settings of a run.
    parsed = [override for override in map(read, overrides) if not override.key_or_group.startswith("search.")]
    last = {override.get_key_element(): override for override in parsed}
    dimensions: dict[str, Dimension] = {}
    lines: list[tuple[str | None, str]] = []
    for override in (*map(read, searched), *parsed):
        key, line = override.get_key_element(), override.input_line or ""
        if not override.is_sweep_override():
            lines.append((None, line))
            continue
        if last.get(key, override) is not override:
            continue
        if is_within(key.lstrip("+"), (*HARMLESS, *NOT_SETTINGS)):
            raise ConfigError(f"{line}: {key} does not affect the result of a run, give it one value")
        lines.append((key, ""))
        sweep = override.value()
        if not isinstance(sweep, IntervalSweep):
            values = tuple(text.partition("=")[2] for text in alternatives(override) or ())
            if not values:
                raise ConfigError(f"{line} has no value")
            dimensions[key] = Choice(tuple(dict.fromkeys(values)))
            continue
        low, high, is_log = sweep.start, sweep.end, "log" in sweep.tags
        if tags := sweep.tags - {"log"}:
            raise ConfigError(f"{line} has the tag {', '.join(sorted(tags))}: the only tag of a range is log")
        if low is None or high is None or not -math.inf < low < high < math.inf:
            raise ConfigError(f"{line}: the first end of an interval must be smaller than the second, and both finite")
        if is_log and low <= 0:
            raise ConfigError(f"{line}: a logarithmic interval begins above 0")
        dimensions[key] = Interval(low, high, is_log, isinstance(low, int) and isinstance(high, int))
    if not dimensions:
        raise ConfigError("the search has no ranges: give search=NAME, KEY=a,b,c or KEY='interval(0.1,1)'")
    return Space(dimensions, tuple(lines))


@dataclass(frozen=True)
class Trial:
    """A point of a search.

    number: counted from 0 in the order of the draws. state: "running" also for a trial whose process has been killed;
    "not started" only for points of a sweep. overrides: command line of its run. run: its directory, if it has ended.
    results: values of the metrics, if it is finished. rungs: first metric at each rung that it has reached.
    pruned_at: the rung that it did not pass. reason: cause of a failure.
    """

    number: int
    values: Mapping[str, Value]
    state: State
    overrides: tuple[str, ...]
    run: Path | None = None
    results: tuple[float, ...] = ()
    rungs: Mapping[int, float] = field(default_factory=dict)
    reason: str = ""
    pruned_at: int | None = None

    @cached_property
    def folder(self) -> Path:
        """The run directory, which is found by the configuration until the trial has ended."""
        return self.run or Point({}, self.overrides).folder


def passes(rung: int, value: float, trials: Sequence[Trial], number: int, maximize: bool, keep: float) -> bool:
    """Return True if a trial continues at a rung: it is among the best `keep` of all trials that have reached the rung.

    The best one always continues. Asynchronous successive halving: Li et al. 2020, "A System for Massively Parallel
    Hyperparameter Tuning".
    """
    others = [trial.rungs[rung] for trial in trials if trial.number != number and rung in trial.rungs]
    better = sum(other > value if maximize else other < value for other in others)
    return better < max(1, int(keep * (len(others) + 1) + 1e-9))


def front(trials: Sequence[Trial], directions: Sequence[str]) -> list[Trial]:
    """Return the finished trials that no other one surpasses: the Pareto front, or the best ones of a single metric."""
    signs = [1 if direction == "maximize" else -1 for direction in directions]
    finished = [trial for trial in trials if trial.state == "finished"]
    points = [tuple(sign * value for sign, value in zip(signs, trial.results, strict=True)) for trial in finished]

    def surpassed(point: tuple[float, ...]) -> bool:
        return any(other != point and all(map(operator.ge, other, point)) for other in points)

    return [trial for trial, point in zip(finished, points, strict=True) if not surpassed(point)]


def next_point(search: Search, space: Space, trials: Sequence[Trial]) -> dict[str, Value] | None:
    """Return the values of the trial after all earlier `trials`, in order; None if all points have been drawn."""
    import numpy as np

    number, keys = len(trials), sorted(space.dimensions)
    drawn = {tuple(str(trial.values[key]) for key in keys) for trial in trials}

    def is_new(point: Mapping[str, Value]) -> bool:
        return tuple(str(point[key]) for key in keys) not in drawn

    def all_points() -> Iterator[dict[str, Value]]:
        listed: list[Sequence[Value]] = [dimension.listed for dimension in space.dimensions.values()]
        for point in itertools.product(*listed):
            yield dict(zip(space.dimensions, point, strict=True))

    if search.sampler == "grid":
        return next(itertools.islice(all_points(), number, None), None)
    for attempt in range(ATTEMPTS):
        generator = np.random.default_rng([search.seed, number, attempt])
        if search.sampler == "tpe":
            # Draw from a copy of the study in memory.
            import optuna

            sampler = optuna.samplers.TPESampler(seed=int(generator.integers(2**31)), n_startup_trials=search.startup)
            study, ranges = optuna.create_study(sampler=sampler, directions=search.directions), distributions(space)
            study.add_trials([frozen(trial, ranges) for trial in trials])
            suggested = study.ask(ranges).params
            values = {key: dimension.rounded(suggested[key]) for key, dimension in space.dimensions.items()}
        else:
            shares = generator.random(len(keys))
            if search.sampler == "quasi_random" and not attempt:
                from scipy.stats import qmc

                # A point of Sobol's sequence, shifted by a random vector of the seed, modulo 1.
                sequence = qmc.Sobol(len(keys), scramble=False)
                if number:
                    sequence.fast_forward(number)
                shares = (sequence.random(1)[0] + np.random.default_rng(search.seed).random(len(keys))) % 1.0
            drawn_shares = zip(space.dimensions.items(), shares, strict=True)
            values = {key: dimension.at(float(share)) for (key, dimension), share in drawn_shares}
        if is_new(values):
            return values
    if space.count > MOST_POINTS:
        return values
    remaining = list(filter(is_new, all_points()))
    share = np.random.default_rng([search.seed, number, ATTEMPTS]).random()
    return remaining[int(share * len(remaining))] if remaining else None


def distributions(space: Space) -> dict[str, BaseDistribution]:
    from optuna import distributions as kinds

    ranges: dict[str, BaseDistribution] = {}
    for key, dimension in space.dimensions.items():
        if isinstance(dimension, Choice):
            ranges[key] = kinds.CategoricalDistribution(dimension.values)
        else:
            kind = kinds.IntDistribution if dimension.whole else kinds.FloatDistribution
            ranges[key] = kind(dimension.low, dimension.high, log=dimension.log)  # type: ignore[arg-type]
    return ranges


def frozen(trial: Trial, ranges: Mapping[str, BaseDistribution]) -> FrozenTrial:
    from optuna.trial import TrialState, create_trial

    return create_trial(
        state=TrialState[OPTUNA_STATES[trial.state]],
        params=dict(trial.values),
        distributions=dict(ranges),
        values=list(trial.results) or None,
        intermediate_values=dict(trial.rungs),
    )


def measured(names: Sequence[str], values: Mapping[str, float]) -> list[float]:
    """Return the value of each name, of a pattern ("zero_shot/*/top1") the mean. Raises ConfigError if none matches."""
    results = []
    for name in names:
        matching = [value for key, value in values.items() if key == name or fnmatchcase(key, name)]
        if not matching:
            raise ConfigError(f"there is no metric {name} (there are: {', '.join(sorted(values)[:MOST_NAMES])})")
        results.append(statistics.fmean(matching))
    return results


def results_of(folder: Path) -> dict[str, float]:
    """Return all numbers of a finished run by name: metrics, costs of the training, and the last loss."""
    record, loss = RunRecord.read(folder), TrainingLog.read(folder).last_loss
    costs = {f"{COSTS}{name}": float(cost) for name, cost in record.training.items() if isinstance(cost, int | float)}
    return {**written(record.metrics), **costs, **({} if loss is None else {LOSS: loss})}


def require_metrics(names: Sequence[str], evaluation: Mapping[str, Any], rungs: Sequence[float]) -> None:
    """Raise ConfigError if an evaluation has no metric of these names, or `rungs` cannot compare by the first one."""
    places = [f"{task}/{name}" for task in TASKS for name in evaluation.get(task) or ()]
    validated = [str(VALIDATION_LOSS)] if evaluation.get("validation") else []
    places += [f"retrieval/{VALIDATION}"] if validated else []
    available = [*(f"{place}/..." for place in places), *validated, LOSS, f"{COSTS}seconds"]
    is_custom = evaluation.get("_target_") != SUITE
    for number, name in enumerate(names):
        is_cost = name == LOSS or name.startswith(COSTS)
        is_known = is_cost or is_custom or name in validated
        if name.count("/") > 1:
            # The task and the dataset of the name may be patterns.
            start = "/".join(name.split("/")[:2])
            is_known |= any(fnmatchcase(f"{place}{end}", start) for place in places for end in ("", "_paired"))
        if not is_known:
            raise ConfigError(
                f"there is no metric {name} (there are: {', '.join(available)}): choose eval=... or its datasets"
            )
        if rungs and number == 0 and is_cost:
            raise ConfigError(
                f"search.rungs compare evaluations during training, and {name} is not one: give search.rungs=[], or "
                "another first metric"
            )


class Study:
    """The trials of a search. Methods that read or write them hold the lock of the study: one process at a time."""

    def __init__(self, folder: Path, search: Search, space: Space) -> None:
        self.folder, self.search, self.space = folder, search, space
        self._storage: JournalStorage | None = None
        self._lock: int | None = None
        if importlib.util.find_spec("optuna") is None:
            raise ConfigError(f"search.sampler={search.sampler} needs optuna: {installation('optuna')}")

    def trials(self) -> list[Trial]:
        with self._opened() as (storage, study):
            return self._read(storage, study)

    def claim(self) -> Trial | None:
        """Return a trial to run, None if none is left: one whose process ended without a result, else a new draw."""
        with self._opened() as (storage, study):
            trials = self._read(storage, study)
            for trial in trials:
                if trial.state == "running" and self._take(trial.number):
                    return trial
            if self.search.trials is not None and len(trials) >= self.search.trials:
                return None
            if (values := next_point(self.search, self.space, trials)) is None:
                return None
            trial = Trial(len(trials), values, "running", self.space.overrides(values))
            # One line of the journal: a kill leaves the whole trial or none of it.
            storage.create_new_trial(study, frozen(trial, distributions(self.space)))
            self._take(trial.number)
            return trial

    def finish(
        self, trial: Trial, state: State, results: Sequence[float] = (), reason: str = "", run: Path | None = None
    ) -> None:
        """Record the end of a trial. run: its run directory, next to the study's. reason: cause of a failure."""
        from optuna.trial import TrialState

        with self._opened() as (storage, study):
            key = storage.get_trial_id_from_study_id_trial_number(study, trial.number)
            for name, text in (("reason", reason), ("run", run and run.name)):
                if text:
                    storage.set_trial_user_attr(key, name, text)
            storage.set_trial_state_values(key, TrialState[OPTUNA_STATES[state]], list(results) or None)
        self.release()

    def passes(self, number: int, rung: int, value: float) -> bool:
        """Record the first metric of a trial at a rung; return True if the trial continues."""
        with self._opened() as (storage, study):
            key = storage.get_trial_id_from_study_id_trial_number(study, number)
            trials = self._read(storage, study)
            # A resumed run reaches its last rung again: the first value counts.
            value = trials[number].rungs.get(rung, value)
            storage.set_trial_intermediate_value(key, rung, value)
            continues = passes(rung, value, trials, number, self.search.directions[0] == "maximize", self.search.keep)
            if is_pruned := trials[number].pruned_at == rung or not continues:
                storage.set_trial_user_attr(key, PRUNED, rung)
            return not is_pruned

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self, number: int) -> bool:
        self._lock = try_lock(self.folder / "trials" / f"{number:05d}.lock")
        return self._lock is not None

    @contextmanager
    def _opened(self) -> Iterator[tuple[JournalStorage, int]]:
        """Hold the lock of the study and yield its storage, and the study's number in it. Raises ConfigError."""
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = self.folder / JOURNAL
        try:
            (self.folder / "trials").mkdir(parents=True, exist_ok=True)
            with locked(self.folder / ".lock"):
                if journal.exists():
                    with io.readable(journal, 256 * io.MB), journal.open("r+b") as file:
                        size = file.seek(0, os.SEEK_END)
                        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                            # A killed process has written a part of a line.
                            file.truncate(file.seek(0) or file.read(size).rfind(b"\n") + 1)
                try:
                    if self._storage is None:
                        # The lock of the study is held already.
                        backend = JournalFileBackend(str(journal), lock_obj=Lock())  # type: ignore[arg-type]
                        self._storage = optuna.storages.JournalStorage(backend)
                    if not self._storage.get_all_studies():
                        directions = [optuna.study.StudyDirection[name.upper()] for name in self.search.directions]
                        overrides = self.space.overrides({key: "..." for key in self.space.dimensions})
                        content = {"ranges": self.space.described, "settings": self.search.facts}
                        io.write_json(self.folder / DESCRIPTION, {**content, "overrides": overrides})
                        self._storage.create_new_study(directions, self.folder.name)
                    study = self._storage.get_study_id_from_name(self.folder.name)
                except (OSError, io.WriteError):
                    raise
                # Damaged lines raise errors of many types.
                except Exception as error:
                    raise self._damaged(cause(error)) from None
                yield self._storage, study
        except OSError as error:
            raise ConfigError(
                f"the search cannot be stored in {self.folder}: {error.strerror or error}. Make the folder writable, "
                "free space on its disk, or choose another one with runs=..."
            ) from None

    def _read(self, storage: JournalStorage, study: int) -> list[Trial]:
        """Return all trials. Raises ConfigError for values that the search cannot draw."""
        states = {name: state for state, name in OPTUNA_STATES.items()}
        trials = []
        try:
            for item in storage.get_all_trials(study, deepcopy=False):
                values: dict[str, Any] = {key: item.params.get(key) for key in self.space.dimensions}
                for key, value in values.items():
                    if not self.space.dimensions[key].has(value):
                        name = f"trial {item.number + 1} has {key}={shortened(value)}"
                        raise self._damaged(f"{name}, which is not in the search")
                state, run = states.get(item.state.name, "running"), item.user_attrs.get("run")
                trials.append(Trial(
                    number=item.number,
                    values=values,
                    state=state,
                    overrides=self.space.overrides(values),
                    run=run and io.below(self.folder.parent, run),
                    results=tuple(map(float, item.values or ())) if state == "finished" else (),
                    rungs={int(rung): float(value) for rung, value in item.intermediate_values.items()},
                    reason=str(item.user_attrs.get("reason", "")),
                    pruned_at=item.user_attrs.get(PRUNED),
                ))  # fmt: skip
        except ConfigError:
            raise
        # Optuna does not check the types of attributes and results.
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise self._damaged(cause(error)) from None
        return trials

    def _damaged(self, fault: str) -> ConfigError:
        return ConfigError(
            f"{self.folder / JOURNAL} is damaged or of another search: {fault}. Restore it from a copy, or remove "
            f"{self.folder}: the same command draws the same trials, and finds the runs that are finished"
        )


def study_folder(search: Search, space: Space) -> Path:
    """Return the folder of a search, next to its runs. The same ranges and settings, in any order, find it again.

    The datasets of the evaluation count as settings: a metric may be a mean over them. Raises ConfigError if the
    configuration gives all runs one name.
    """
    lines = space.corner_lines()
    plain = with_digests(compose(lines[0]))
    require_own_names(lines[0], lines[-1])
    evaluated = {key: plain["eval"].get(key) for key in ("_target_", *TASKS)}
    facts = [space.described, search.facts, evaluated, identity(plain)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    return run_folder(plain, lines[0]).parent / f"search-{digest}"
