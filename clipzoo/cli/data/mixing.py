"""Evaluation of interpolations between two runs, `clipzoo evaluate run=... mix_with=... mix=[...]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clipzoo import io
from clipzoo.distributed.launch import say
from clipzoo.report import render
from clipzoo.report.render import Cell, Table, text_table
from clipzoo.runs.record import parsed

if TYPE_CHECKING:
    from clipzoo.distributed.world import World
    from clipzoo.evaluation.suite import Suite
    from clipzoo.loading import LoadedModel

FOLDER = "mix"
SHOWN = ("top1", "mean_per_class", "recall_at_1")
"""Metrics that the table shows."""


def evaluate_mixes(
    first: LoadedModel, second: LoadedModel, mixes: Sequence[float], suite: Suite, folder: Path, world: World
) -> dict[str, float]:
    """Evaluate (1 - mix) first + mix second for all mixes; write <folder>/mix/metrics.json and mix.md.

    Returns:
        The metrics of the last mix.
    """
    from clipzoo.loading import interpolate

    output = folder / FOLDER
    results: dict[float, dict[str, float]] = {}
    for mix in mixes:
        model = interpolate(first, second, mix).to(world.device)
        results[mix] = suite.run(model, output / f"{mix:g}", world)

    def write() -> None:
        table = mix_table(results)
        io.write_json(output / "metrics.json", {f"{mix:g}": metrics for mix, metrics in results.items()})
        io.write_whole(output / "mix.md", f"# Weights between two runs\n\n{render.markdown(table)}\n")
        say(f"{render.terminal(table)}\n{output / 'mix.md'}")

    world.run_on_first(write)
    return results[mixes[-1]]


def mix_table(results: Mapping[float, Mapping[str, float]]) -> Table:
    """A row for each mix, its metrics in columns; the best of a column is bold."""
    columns = [str(key) for key in parsed(next(iter(results.values()))) if key.metric in SHOWN]
    best = {column: max(metrics[column] for metrics in results.values()) for column in columns}
    rows: list[list[str | Cell]] = [
        [f"{mix:g}", *(Cell(f"{metrics[column]:.2f}", bold=metrics[column] == best[column]) for column in columns)]
        for mix, metrics in results.items()
    ]
    return text_table(["mix", *columns], rows, left=1)
