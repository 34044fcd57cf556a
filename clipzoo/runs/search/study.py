"""The study of a search: its trials in a journal of Optuna, which several processes share and no kill damages.

The journal holds values, never a command line: whoever wrote it, only the space of the own command line makes one.

runs/search-<digest>/search.json     the ranges, the settings, the command line: for people, never read
runs/search-<digest>/journal.log     trials; optuna.storages.journal.JournalFileBackend reads it
runs/search-<digest>/trials/<n>.lock held by the process that runs trial n; the system releases it at its end
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipzoo import io
from clipzoo.config.compose import compose
from clipzoo.errors import ConfigError, cause, installation
from clipzoo.io import shortened
from clipzoo.runs.identity import identity
from clipzoo.runs.initial import with_digests
from clipzoo.runs.lock import locked, try_lock
from clipzoo.runs.names import run_folder
from clipzoo.runs.search import sampling
from clipzoo.runs.search.objective import TASKS
from clipzoo.runs.search.settings import Search
from clipzoo.runs.search.space import Space
from clipzoo.runs.search.trial import State, Trial, passes

if TYPE_CHECKING:
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial

JOURNAL, DESCRIPTION = "journal.log", "search.json"
JOURNAL_BYTES = 256 * io.MB
PRUNED = "pruned_at"
"""User attribute of a trial: the rung that it did not pass."""


class Study:
    """The trials of a search.

    Every method that reads or writes them holds the lock of the study: processes act one after the other.
    """

    def __init__(self, folder: Path, search: Search, space: Space) -> None:
        self.folder, self.search, self.space = folder, search, space
        self._storage: JournalStorage | None = None
        self._lock: int | None = None
        if importlib.util.find_spec("optuna") is None:
            raise ConfigError(f"search.sampler={search.sampler} needs optuna: {installation('optuna')}")

    @property
    def name(self) -> str:
        return self.folder.name

    def trials(self) -> list[Trial]:
        """Return all trials by number."""
        with self._opened() as storage:
            return self._read(storage)

    def claim(self) -> Trial | None:
        """Return a trial for this process to run; None if there is none left.

        A trial whose process has ended without a result comes first, then a new draw.
        """
        with self._opened() as storage:
            trials = self._read(storage)
            for trial in trials:
                if trial.state == "running" and self._take(trial.number):
                    return trial
            if self.search.trials is not None and len(trials) >= self.search.trials:
                return None
            values = sampling.next_point(self.search, self.space, trials)
            if values is None:
                return None
            trial = Trial(len(trials), values, "running", self.space.overrides(values))
            ranges = {key: sampling.distribution(dimension) for key, dimension in self.space.dimensions.items()}
            # One line of the journal: a kill leaves the whole trial or none of it.
            storage.create_new_trial(self._id(storage), sampling.frozen(trial, ranges))
            self._take(trial.number)
            return trial

    def finish(
        self, trial: Trial, state: State, results: Sequence[float] = (), reason: str = "", run: Path | None = None
    ) -> None:
        """Record the end of a trial. run: its run directory, beside the study's. reason: of a failure."""
        from optuna.trial import TrialState

        ends = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        with self._opened() as storage:
            key = storage.get_trial_id_from_study_id_trial_number(self._id(storage), trial.number)
            for name, text in (("reason", reason), ("run", run and run.name)):
                if text:
                    storage.set_trial_user_attr(key, name, text)
            storage.set_trial_state_values(key, ends[state], list(results) or None)
        self.release()

    def passes(self, number: int, rung: int, value: float) -> bool:
        """Record the first metric of a trial at a rung; return True if the trial continues."""
        with self._opened() as storage:
            key = storage.get_trial_id_from_study_id_trial_number(self._id(storage), number)
            trials = self._read(storage)
            # A resumed run reaches its last rung again: the first answer stands.
            value = trials[number].rungs.get(rung, value)
            storage.set_trial_intermediate_value(key, rung, value)
            maximize = self.search.directions[0] == "maximize"
            goes_on = self._pruned_at(storage, number) != rung
            goes_on = goes_on and passes(rung, value, trials, number, maximize, self.search.keep)
            if not goes_on:
                storage.set_trial_user_attr(key, PRUNED, rung)
            return goes_on

    def was_pruned(self, trial: Trial) -> bool:
        """Return True if the trial has not passed a rung."""
        with self._opened() as storage:
            return self._pruned_at(storage, trial.number) is not None

    def release(self) -> None:
        """Release the trial that this process has claimed."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def _opened(self) -> Iterator[JournalStorage]:
        """Hold the lock of the study and yield its storage.

        Raises:
            ConfigError: the storage cannot be written, or is damaged.
        """
        journal = self.folder / JOURNAL
        try:
            (self.folder / "trials").mkdir(parents=True, exist_ok=True)
            with locked(self.folder / ".lock"):
                _end_last_line(journal)
                yield self._synchronised(journal)
        except OSError as error:
            raise ConfigError(
                f"the search cannot be stored in {self.folder}: {error.strerror or error}. Make the folder writable, "
                "free space on its disk, or choose another one with runs=..."
            ) from None

    def _synchronised(self, journal: Path) -> JournalStorage:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            if self._storage is None:
                backend = JournalFileBackend(str(journal), lock_obj=_NoLock())  # type: ignore[arg-type]
                self._storage = optuna.storages.JournalStorage(backend)
            if not self._storage.get_all_studies():
                directions = [optuna.study.StudyDirection[name.upper()] for name in self.search.directions]
                io.write_json(self.folder / DESCRIPTION, description(self.search, self.space))
                self._storage.create_new_study(directions, self.name)
            self._id(self._storage)
        except (OSError, io.WriteError):
            raise
        # Damaged lines end in errors of many types.
        except Exception as error:
            raise self._damaged(cause(error)) from None
        return self._storage

    def _damaged(self, fault: str) -> ConfigError:
        return ConfigError(
            f"{self.folder / JOURNAL} is damaged or of another search: {fault}. Restore it from a copy, or remove "
            f"{self.folder}: the same command draws the same trials, and finds the runs that are finished"
        )

    def _id(self, storage: JournalStorage) -> int:
        return storage.get_study_id_from_name(self.name)

    def _read(self, storage: JournalStorage) -> list[Trial]:
        try:
            return [self._trial(item) for item in storage.get_all_trials(self._id(storage), deepcopy=False)]
        except ConfigError:
            raise
        # Optuna does not check the types of attributes and results.
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise self._damaged(cause(error)) from None

    def _trial(self, item: FrozenTrial) -> Trial:
        from optuna.trial import TrialState

        values: dict[str, Any] = {key: item.params.get(key) for key in self.space.dimensions}
        for key, value in values.items():
            if not self.space.dimensions[key].has(value):
                raise self._damaged(f"trial {item.number + 1} has {key}={shortened(value)}, which is not in the search")
        states: Mapping[TrialState, State] = {
            TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed",
        }  # fmt: skip
        run = item.user_attrs.get("run")
        return Trial(
            number=item.number,
            values=values,
            state=states.get(item.state, "running"),
            overrides=self.space.overrides(values),
            run=run and io.below(self.folder.parent, run),
            results=tuple(map(float, item.values or ())) if item.state == TrialState.COMPLETE else (),
            rungs={int(rung): float(value) for rung, value in item.intermediate_values.items()},
            reason=str(item.user_attrs.get("reason", "")),
        )

    def _pruned_at(self, storage: JournalStorage, number: int) -> int | None:
        return storage.get_all_trials(self._id(storage), deepcopy=False)[number].user_attrs.get(PRUNED)

    def _take(self, number: int) -> bool:
        self._lock = try_lock(self.folder / "trials" / f"{number:05d}.lock")
        return self._lock is not None


def study_folder(search: Search, space: Space) -> Path:
    """Return the folder of a search, beside its runs. The same ranges and settings, in any order, find it again.

    The datasets of the evaluation count as settings: a metric may be a mean over them.

    Raises:
        ConfigError: the configuration is invalid at one of the corners of the space, or names all runs alike.
    """
    lines = space.corner_lines()
    plain = with_digests(compose(lines[0]))
    if plain["name"] is not None and plain["name"] == compose(lines[-1])["name"]:
        raise ConfigError(
            f"name={plain['name']} would be the name of all runs of the search: give name=null, and each run is named "
            "by its overrides and a digest"
        )
    ranges = {key: dimension.description for key, dimension in space.dimensions.items()}
    evaluated = {key: plain["eval"].get(key) for key in ("_target_", *TASKS)}
    facts = [ranges, search.facts, evaluated, identity(plain)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    return run_folder(plain, lines[0]).parent / f"search-{digest}"


def description(search: Search, space: Space) -> dict[str, Any]:
    """Return what search.json holds."""
    return {
        "ranges": {key: dimension.description for key, dimension in space.dimensions.items()},
        "settings": search.facts,
        "overrides": list(space.overrides({key: "..." for key in space.dimensions})),
    }


class _NoLock:
    """The lock of the journal, which `Study` holds already."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _end_last_line(journal: Path) -> None:
    """Cut off a line that a killed process has written in part."""
    if not journal.exists():
        return
    with io.readable(journal, JOURNAL_BYTES), journal.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            file.truncate(file.seek(0) or file.read(size).rfind(b"\n") + 1)
