"""The start of a run: its model takes the weights of `init`, and the user reads what became of each tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipzoo.distributed.environment import say
from clipzoo.distributed.world import World
from clipzoo.model import Model

if TYPE_CHECKING:
    from clipzoo.api.build import RunParts
    from clipzoo.encoders.weights.matching import Row


def initialise(
    model: Model, folder: Path, values: Mapping[str, Any], trust: Collection[str], world: World
) -> list[Row]:
    """Fill the model with the weights of `init`; return what became of each tensor. Empty if the run will resume."""
    if "digests" not in values["init"]:
        return []
    # Runs without initial weights do not wait for the readers of other formats to be imported.
    from clipzoo.api.build import part
    from clipzoo.api.initial.weights import InitialWeights
    from clipzoo.training.checkpoints import checkpoint

    if world.run_on_first(lambda: checkpoint.newest(folder / "checkpoints")) is not None:
        return []
    return part(values["init"], trust, InitialWeights).load(model, values, trust)


def continue_other_run(
    folder: Path, plain: Mapping[str, Any], parts: RunParts, trust: Collection[str], world: World
) -> None:
    """Copy the checkpoint of `init.resume`, if it is given, to a new run directory, which then resumes from it."""
    source = plain["init"].get("resume")
    if source is None:
        return
    from clipzoo.api.initial.resume import copy_checkpoint

    world.run_on_first(lambda: copy_checkpoint(source, folder, plain, parts, trust))


def report_initial_weights(rows: list[Row], folder: Path) -> None:
    """Write the table of the initial weights, if there are any, and one line on the terminal."""
    if not rows:
        return
    from clipzoo.api.initial.weights import TABLE, summary, write_table

    write_table(rows, folder)
    say(f"{summary(rows)} ({folder / TABLE})")
