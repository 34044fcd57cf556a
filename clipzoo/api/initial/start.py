"""The start of a run: its model takes the weights of `init`, and the user reads what became of each tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipzoo.distributed.environment import say
from clipzoo.distributed.world import World
from clipzoo.model import Model

if TYPE_CHECKING:
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


def report_initial_weights(rows: list[Row], folder: Path) -> None:
    """Write the table of the initial weights, if there are any, and one line on the terminal."""
    if not rows:
        return
    from clipzoo.api.initial.weights import TABLE, summary, write_table

    write_table(rows, folder)
    say(f"{summary(rows)} ({folder / TABLE})")
