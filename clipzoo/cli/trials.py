"""Trials of a search, each trained in a separate process."""

from __future__ import annotations

import ctypes
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from clipzoo import io
from clipzoo.distributed import launch
from clipzoo.distributed.launch import EXIT_CODE, say
from clipzoo.errors import ConfigError, TrainingError, first_names, number_of
from clipzoo.runs.directory import is_finished
from clipzoo.runs.lock import RunLock
from clipzoo.runs.search import Search, Space, State, Study, Trial, measured, results_of, study_folder

if TYPE_CHECKING:
    from clipzoo.distributed.watchdog import Watchdog
    from clipzoo.distributed.world import World
    from clipzoo.training.parts import Hook
    from clipzoo.types import Progress

VARIABLE = "CLIPZOO_TRIAL"
"""Environment variable of a trial's process: the folder of its study, its number and the settings of the search."""
KILLS = 3
"""Number of kills of a trial's process after which the trial counts as failed."""


def run_search(search: Search, space: Space) -> None:
    """Train trials until none is left to draw, then write the page of the search.

    Several processes may do so at once: each draws its own. Raises TrainingError at the end if trials have failed.
    """
    _launcher(search)
    launch.hand_on_cores()
    study = Study(study_folder(search, space), search, space)
    try:
        while (trial := study.claim()) is not None:
            total = f" of {min(search.trials or space.count, space.count)}"
            values = "  ".join(f"{key}={value}" for key, value in trial.values.items())
            say(f"trial {trial.number + 1}{total}: {values}")
            for _ in range(KILLS):
                code = 0 if is_finished(trial.folder) else _train(study, trial)
                if code >= 0:
                    break
                say(f"the process of trial {trial.number + 1} was killed by signal {-code}")
            if code in (EXIT_CODE, io.WriteError.exit_code):
                # The trial stays unfinished: a stop or a full disk is not a result of its point.
                say("clipzoo: the search is stopped; run the same command to resume")
                sys.exit(code)
            state: State = "finished"
            results: list[float] = []
            reason = ""
            if code:
                state, reason = "failed", f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            elif study.trials()[trial.number].pruned_at is not None:
                state = "pruned"
            else:
                try:
                    results = measured(search.metrics, results_of(trial.folder))
                except io.DamagedFileError as error:
                    state, reason = "failed", str(error)
                except ConfigError as error:
                    raise ConfigError(
                        f"{trial.folder} is finished, and {error}. Evaluate it (clipzoo evaluate run={trial.folder}), "
                        "or give another metric"
                    ) from None
                if not all(map(math.isfinite, results)):
                    state, results, reason = "failed", [], f"a metric is not finite: {results}"
            study.finish(trial, state, results, reason, run=trial.folder)
    finally:
        study.release()
    show_search(study)
    trials = study.trials()
    if failed := [f"{trial.folder.name} ({trial.reason})" for trial in trials if trial.state == "failed"]:
        raise TrainingError(
            f"{len(failed)} of {number_of(len(trials), 'trial')} of the search have failed, see their messages above: "
            f"{first_names(failed)}"
        )


def show_search(study: Study) -> None:
    """Write the page of a search; print its table and the path of the page."""
    pages = import_module("clipzoo.report.pages")
    print(pages.write_search(study.folder, study.search, study.space, study.trials()), flush=True)


def hooks(watchdog: Watchdog, world: World) -> list[Hook]:
    """Return the hooks of a training: for a trial, the rungs at which it may be pruned; else none."""
    if VARIABLE not in os.environ:
        return []
    from clipzoo.training.train import Rungs

    folder, number, settings = json.loads(os.environ[VARIABLE])
    search = Search(**settings)
    # This process draws no trials: its study needs no ranges.
    study, rungs = Study(Path(folder), search, Space({}, ())), search.rungs

    def passes(rung: int, metrics: Mapping[str, float]) -> bool:
        (value,) = measured(search.metrics[:1], metrics)
        return study.passes(number, rung, value)

    def stop(progress: Progress) -> None:
        watchdog.exit_all(0, f"clipzoo: pruned after step {progress.step} of {progress.total_steps}")

    return [Rungs(rungs, passes, stop, world)]


def _train(study: Study, trial: Trial) -> int:
    """Run the training of a trial and return its exit code, below 0 after a signal.

    A request to stop is passed on. When this process is killed, the kernel sends SIGTERM to the run, which saves.
    """
    if trial.folder.exists():
        # A run whose search was killed a moment ago may still be saving its state.
        with RunLock(trial.folder) as lock:
            lock.acquire(math.inf)
    command = [*_launcher(study.search), sys.executable, "-m", "clipzoo.cli", "train", *trial.overrides]
    trial_settings = json.dumps([str(study.folder), trial.number, asdict(study.search)])
    variables = {**os.environ, VARIABLE: trial_settings, "CLIPZOO_SWEEP": study.folder.name}
    library, parent = ctypes.CDLL(None), os.getpid()

    def end_with_parent() -> None:
        library.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(EXIT_CODE)

    stopped = []
    process = subprocess.Popen(command, env=variables, preexec_fn=end_with_parent)

    def stop(number: int, frame: object) -> None:
        stopped.append(number)
        process.terminate()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return EXIT_CODE if stopped else code


def _launcher(search: Search) -> list[str]:
    """Return the words before the command of a run. Commands of the environment need not be on the path."""
    words = shlex.split(search.launcher or "")
    if not words:
        return []
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)))
    if (command := shutil.which(words[0], path=path)) is None:
        raise ConfigError(f"search.launcher: there is no command {words[0]}")
    return [command, *words[1:]]
