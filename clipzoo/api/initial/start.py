"""The start of a run: its model takes the weights of `init`, and the user reads what became of each tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from clipzoo.distributed.environment import say
from clipzoo.distributed.world import World
from clipzoo.model import Model

if TYPE_CHECKING:
    from clipzoo.encoders.weights.matching import Row
    from clipzoo.training.parts import Parts

Rows: TypeAlias = "list[Row]"
"""A row for every tensor of the model: how it was initialised."""


def initialise(
    model: Model,
    folder: Path,
    plain: Mapping[str, Any],
    values: Mapping[str, Any],
    parts: Parts,
    trust: Collection[str],
    world: World,
) -> Rows:
    """Give a new run its start: its model the weights of `init`, its directory the checkpoint of `init.resume`.

    parts: of the run, its dataset opened. Returns what became of each tensor; empty without initial weights, and for a
    run that resumes from a checkpoint of its own.
    """
    has_weights, source = "digests" in values["init"], plain["init"].get("resume")
    if not has_weights and source is None:
        return []
    # Runs without a start do not wait for the readers of other formats to be imported.
    from clipzoo.api.build import part
    from clipzoo.api.initial.resume import copy_checkpoint
    from clipzoo.api.initial.weights import InitialWeights
    from clipzoo.training import checkpoint_files

    if world.run_on_first(lambda: checkpoint_files.newest(folder / "checkpoints")) is not None:
        return []
    rows = (
        part(values["init"], trust, InitialWeights).load(model, values, trust, parts.objective) if has_weights else []
    )
    if source is not None:
        world.run_on_first(lambda: copy_checkpoint(source, folder, plain, parts, trust))
    return rows


def report_initial_weights(rows: Rows, folder: Path) -> None:
    """Write the table of the initial weights, if there are any, and one line on the terminal."""
    if not rows:
        return
    from clipzoo.api.initial.weights import TABLE, summary, write_table

    write_table(rows, folder)
    say(f"{summary(rows)} ({folder / TABLE})")
