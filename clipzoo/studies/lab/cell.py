"""A method in a comparison: its search, then its fresh seeds. Any number of processes works on it.

<folder>/search.json, journal.log, trials/   the search, see `clipzoo.runs.search.study`
<folder>/points/<n>.json                     record of a finished trial
<folder>/seeds/<seed>.json                   record of the winner with a fresh seed
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from clipzoo import io
from clipzoo.errors import TrainingError, first_line
from clipzoo.runs.lock import try_lock
from clipzoo.runs.record import revision
from clipzoo.runs.search.settings import Search
from clipzoo.runs.search.space import space_of
from clipzoo.runs.search.study import Study
from clipzoo.runs.search.trial import Trial
from clipzoo.studies.lab.data import LabData
from clipzoo.studies.lab.judge import ACCURACY
from clipzoo.studies.lab.settings import Comparison, LabSettings, facts
from clipzoo.studies.lab.training import StoppedEarlyError, settings_of, train_once

SEARCH_SEED = 0
"""Seed of all trainings of a search; the winner's fresh seeds begin behind it."""
Say = Callable[[str], None]


@dataclass
class Cell:
    """A method of a comparison. folder: of the lab."""

    lab: LabSettings
    comparison: Comparison
    method: str
    data: LabData
    root: Path
    study: Study = field(init=False)

    def __post_init__(self) -> None:
        settings = self.lab.search
        search = Search(
            sampler="quasi_random", trials=settings.trials, maximize=[ACCURACY], minimize=[], seed=settings.seed,
            startup=settings.trials, rungs=settings.rungs, keep=settings.keep, launcher=None,
        )  # fmt: skip
        self.study = Study(self.folder, search, space_of([], self.comparison.methods[self.method]))

    @property
    def folder(self) -> Path:
        """Named by comparison, method and a digest of all settings: other settings never mix with these."""
        described = facts(self.comparison, self.method, self.lab.search, self.lab.evaluations)
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:8]
        slug = "".join(letter if letter.isalnum() else "-" for letter in self.method.lower())
        return io.below(self.root, f"{self.comparison.name}/{slug}-{digest}")

    def require_valid(self) -> None:
        """Raise ConfigError if the configuration of a trial is not valid, or names a class that is not trusted."""
        settings_of(self.study.space.overrides(self.study.space.corners()[0]), self.lab.trust)

    def work(self, say: Say) -> bool:
        """Do one training that no other process does; return False if there is none."""
        trial = self.study.claim()
        if trial is not None:
            self._search(trial, say)
            return True
        winner = self.winner()
        return winner is not None and self._train_seed(winner, say)

    def winner(self) -> Trial | None:
        """Return the finished trial with the best validation accuracy; None before all trials have ended."""
        trials = self.study.trials()
        if any(trial.state == "running" for trial in trials) or not trials:
            return None
        finished = [trial for trial in trials if trial.state == "finished"]
        return max(finished, key=lambda trial: (trial.results[0], -trial.number), default=None)

    def is_done(self) -> bool:
        """Return True if nothing is left to train."""
        trials = self.study.trials()
        if len(trials) < self.lab.search.trials or any(trial.state == "running" for trial in trials):
            return False
        return self.winner() is None or all(self._seed_path(seed).exists() for seed in self._seeds())

    def _search(self, trial: Trial, say: Say) -> None:
        name = f"{self.comparison.name}, {self.method}, trial {trial.number + 1} of {self.lab.search.trials}"
        rungs = list(self.lab.search.rungs)

        def passes(share: float, accuracy: float) -> bool:
            reached = [number for number, rung in enumerate(rungs) if abs(rung - share) < 1e-9]
            return not reached or self.study.passes(trial.number, reached[0], accuracy)

        try:
            trained = train_once(trial.overrides, self.data, SEARCH_SEED, self.lab.evaluations, passes, self.lab.trust)
        except StoppedEarlyError:
            self.study.finish(trial, "pruned")
            return say(f"{name}: stopped early")
        except TrainingError as error:
            self.study.finish(trial, "failed", reason=first_line(error))
            return say(f"{name}: {first_line(error)}")
        io.write_json(self.folder / "points" / f"{trial.number}.json", {**trained.record(), "values": trial.values})
        self.study.finish(trial, "finished", [trained.validation.metrics[ACCURACY]])
        say(f"{name}: {_summary(trained.validation.metrics[ACCURACY], trained.processor)}")

    def _train_seed(self, winner: Trial, say: Say) -> bool:
        """Train the winner with the first seed that is neither recorded nor in work."""
        (self.folder / "seeds").mkdir(parents=True, exist_ok=True)
        for seed in self._seeds():
            path = self._seed_path(seed)
            if path.exists() or (lock := try_lock(path.with_suffix(".lock"))) is None:
                continue
            try:
                if not path.exists():
                    self._record_seed(winner, seed, path, say)
                    return True
            finally:
                os.close(lock)
        return False

    def _record_seed(self, winner: Trial, seed: int, path: Path, say: Say) -> None:
        name = f"{self.comparison.name}, {self.method}, seed {seed}"
        described = {"seed": seed, "values": winner.values, "overrides": list(winner.overrides), "revision": revision()}
        try:
            trained = train_once(winner.overrides, self.data, seed, self.lab.evaluations, trust=self.lab.trust)
        except TrainingError as error:
            io.write_json(path, {**described, "failed": first_line(error)})
            return say(f"{name}: {first_line(error)}")
        io.write_json(path, {**described, **trained.record()})
        say(f"{name}: {_summary(trained.test.metrics[ACCURACY], trained.processor)}")

    def _seed_path(self, seed: int) -> Path:
        return self.folder / "seeds" / f"{seed}.json"

    def _seeds(self) -> range:
        return range(SEARCH_SEED + 1, SEARCH_SEED + 1 + self.lab.seeds)


def cells(lab: LabSettings, root: Path) -> list[Cell]:
    """Return all methods of all comparisons, in the order of the settings."""
    worlds: dict[str, LabData] = {}
    build = partial(Cell, lab)
    return [
        build(part, method, worlds.setdefault(part.world_name, LabData(part.world)), root)
        for part in lab.comparisons
        for method in part.methods
    ]


def _summary(accuracy: float, processor: float) -> str:
    return f"accuracy {accuracy:.1f} %, {processor:.1f} s of CPU time"
