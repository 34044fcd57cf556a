"""Comparison of any runs: grouped over seeds, labelled by their directories, with what differs between them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipzoo.report.comparison.labels import distinct
from clipzoo.report.comparison.scales import ComparedRow, Comparison, chance, columns
from clipzoo.report.paper_tables.collect import Match, Run, shortened
from clipzoo.report.paper_tables.filled import SeedGroup
from clipzoo.report.table import Cell, Heading, Row, Table
from clipzoo.runs.identity import flat, identity

IGNORED = ("name", "runs", "seed", "row", "logger", "about", "data.workers", "data.prefetch", "trainer.device")
"""Keys that say nothing about a method; they are not listed as differences."""
MOST_NOTES = 3
"""Differences that are written out below a run's label."""


def comparison(runs: Sequence[Run], given: Mapping[Path, str] | None = None) -> Comparison:
    """Compare runs; those that differ only in their seed form one row.

    given: labels by run directory; without them the labels are what tells the directories' names apart.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        settings = {**identity(run.plain), "seed": None}
        key = json.dumps(settings, sort_keys=True, default=str)
        groups.setdefault(key, []).append(run)
    labels = _labels(list(groups.values()), given or {})
    different = _differing_keys([group[0] for group in groups.values()])
    rows = []
    for label, group in zip(labels, groups.values(), strict=True):
        plain = flat(group[0].plain)
        shown = [] if given else [key for key in different if plain.get(key) is not None]
        own = [f"{_name(key)}={_value(plain[key])}" for key in shown]
        note = ", ".join(own[:MOST_NOTES]) + (", ..." if len(own) > MOST_NOTES else "")
        matches = tuple(Match(run, "", run.scale, {}, {}, {}) for run in group)
        rows.append(ComparedRow("", label, note, SeedGroup(label, matches)))
    return Comparison("", tuple(rows), columns(runs), chance(runs))


def settings_table(compared: Comparison) -> Table:
    """Configuration keys whose values differ, a column per row of the comparison; absent keys are empty."""
    firsts = [row.group.runs[0].run for row in compared.rows]
    configurations = [flat(run.plain) for run in firsts]
    headings = (Heading("key", "left"), *(Heading(row.label, "left", wrap=True) for row in compared.rows))
    return Table(
        headings,
        tuple(
            Row(
                (
                    Cell(_name(key), code=True),
                    *(Cell(_value(plain[key]) if key in plain else "") for plain in configurations),
                )
            )
            for key in _differing_keys(firsts)
        ),
        "Settings that differ",
    )


def _labels(groups: Sequence[Sequence[Run]], given: Mapping[Path, str]) -> list[str]:
    """Return the given labels of the groups, or the parts of their directories' names that differ; number of seeds."""
    folders = [Path(group[0].folder).resolve() for group in groups]
    common = Path(os.path.commonpath([folder.parent for folder in folders]))
    names = distinct([str(folder.relative_to(common)) for folder in folders])
    names = [given.get(group[0].folder, name) for group, name in zip(groups, names, strict=True)]
    return [
        f"{name} ({len(group)} seeds)" if len(group) > 1 else name for name, group in zip(names, groups, strict=True)
    ]


def _differing_keys(runs: Sequence[Run]) -> list[str]:
    configurations: list[Mapping[str, Any]] = [flat(run.plain) for run in runs]
    keys = list(dict.fromkeys(key for plain in configurations for key in plain))
    # A class stands before its arguments, and choices before the keys that follow from them.
    keys.sort(key=lambda key: not key.endswith("_target_"))
    return [
        key
        for key in keys
        if len({json.dumps(plain.get(key), default=str) for plain in configurations}) > 1
        and not any(key == ignored or key.startswith(f"{ignored}.") for ignored in IGNORED)
    ]


def _name(key: str) -> str:
    return key.removesuffix("._target_")


def _value(value: object) -> str:
    text = str(value)
    return text.rpartition(".")[2] if text.startswith("clipzoo.") else shortened(value)
