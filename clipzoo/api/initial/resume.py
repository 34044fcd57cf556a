"""A run that continues from a checkpoint of another run: a cooldown that branches off a stable phase.

The run is the one that its configuration states: it equals a run that was trained from its first step. Hence the two
runs may differ in their length and their schedule only, and their learning rates must be equal up to the checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clipzoo import io
from clipzoo.api.build import part
from clipzoo.distributed.environment import say
from clipzoo.errors import ConfigError, number_of
from clipzoo.io.weights import is_checkpoint, mark_of, run_of, step_of
from clipzoo.runs.directory import LENGTH, config_of
from clipzoo.runs.identity import differing, identity
from clipzoo.runs.variables import with_variables
from clipzoo.training import checkpoint_files
from clipzoo.training.parts import Optimizer, Parts
from clipzoo.training.settings import Length
from clipzoo.types import Progress

SCHEDULE = "optim.schedule."
BESIDE = ("metrics.jsonl", "frozen.pt", "frozen.json")
"""Other files that a run needs to resume; the logger removes later lines from metrics.jsonl."""


def copy_checkpoint(
    source: str, folder: Path, plain: Mapping[str, Any], parts: Parts, trust: Collection[str] = ()
) -> None:
    """Copy a checkpoint of another run into a run directory without one, which then resumes from it. On the first rank.

    source: a run directory, whose newest checkpoint that serves is taken, or one of its checkpoints. plain: the
    configuration of the new run. parts: of the new run, its dataset opened.

    Raises:
        ConfigError: there is no such checkpoint, or a run of this configuration would not have reached it.
    """
    run, chosen = run_and_step(source)
    stored = config_of(run)
    before, now = identity(stored), identity(plain)
    different = [key for key in differing(before, now) if key not in LENGTH and not key.startswith(SCHEDULE)]
    if different:
        shown = ", ".join(f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in different[:6])
        raise ConfigError(
            f"init.resume={source} is a run of another configuration ({shown}): only its length and its schedule may "
            "differ"
        )
    if parts.objective.depends_on_length and _length(stored) != _length(plain):
        raise ConfigError(
            f"init.resume={source}: the steps of this objective depend on the length of the training: train anew"
        )
    equal = equal_steps(stored, plain, parts, trust)
    if chosen is not None and chosen > equal:
        raise ConfigError(
            f"init.resume={source}: the learning rates of the two runs differ after step {equal}: give the run, or a "
            "checkpoint before"
        )
    path = checkpoint_files.newest(run / "checkpoints", at_most=equal if chosen is None else chosen)
    if path is None or (chosen is not None and step_of(path) != chosen):
        raise ConfigError(
            f"init.resume={source}: {run / 'checkpoints'} has no valid checkpoint of at most "
            f"{number_of(equal, 'step')}, up to "
            "which the learning rates of the two runs are equal: train that run with a larger trainer.keep"
        )
    with io.explained(folder):
        for name in BESIDE:
            if (run / name).exists():
                _copy(run / name, folder / name)
        for file in (path, mark_of(path)):
            # The mark last: an interruption leaves an incomplete copy, which is replaced.
            target = io.below(folder, f"checkpoints/{file.name}")
            if target.is_dir():
                shutil.rmtree(target)
            target.unlink(missing_ok=True)
            io.make_folder(target.parent)
            if file.is_dir():
                shutil.copytree(file, target, copy_function=_link)
            else:
                _link(file, target)
    say(f"{folder} continues from step {step_of(path)} of {run}")


def equal_steps(stored: Mapping[str, Any], plain: Mapping[str, Any], parts: Parts, trust: Collection[str] = ()) -> int:
    """Return the number of first steps with equal learning rates in two runs, less than the length of the new one."""
    samples = parts.dataset.samples
    recipes: list[Optimizer] = [part(with_variables(stored["optim"]), trust, Optimizer), parts.optimizer]
    # A schedule sets its rate on an optimizer.
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    totals = [_length(config).total_steps(samples) for config in (stored, plain)]
    batch = plain["trainer"]["global_batch"]

    def same(step: int) -> bool:
        before, now = (Progress(step, total, samples, batch) for total in totals)
        rates = [recipe.set_rate(optimizer, at) for recipe, at in zip(recipes, (before, now), strict=True)]
        after = [replace(at, step=step + 1) for at in (before, now)]
        entered = [parts.averaging(at) for at in after] if parts.averaging else [0.0, 0.0]
        return rates[0] == rates[1] and entered[0] == entered[1]

    last = min(totals[0], totals[1] - 1)
    return next((step for step in range(last) if not same(step)), last)


def run_and_step(source: str) -> tuple[Path, int | None]:
    """Return the run directory, and the number of steps of its checkpoint if the source names one."""
    path = Path(with_variables(source))
    run = run_of(path)
    if not (run / "config.yaml").exists():
        raise ConfigError(f"init.resume={source} is not a run: there is no {run / 'config.yaml'}")
    if not path.exists():
        raise ConfigError(f"init.resume={source} does not exist: the run's checkpoints are in {run / 'checkpoints'}")
    return run, step_of(path) if is_checkpoint(path) else None


def _length(config: Mapping[str, Any]) -> Length:
    trainer = config["trainer"]
    return Length(trainer["global_batch"], trainer["epochs"], trainer["steps"])


def _link(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, which costs no space; copy it where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        _copy(Path(source), Path(target))


def _copy(source: Path, target: Path) -> None:
    with io.readable(source, io.ANY_SIZE) as content, io.whole(target) as file:
        shutil.copyfileobj(content, file)
