"""Runs of several rows at one scale, side by side on the sets that they share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from clipzoo.report.collect import PAPER, Match, Run, matches
from clipzoo.report.published import PAPERS, Column, table, table_names
from clipzoo.report.tables import Group, described

TASKS = (
    ("zero-shot top-1", "zero_shot/", "/top1"),
    ("linear probe before projection, top-1", "linear_probe/", "/before/top1"),
    ("linear probe after projection, top-1", "linear_probe/", "/after/top1"),
    ("image to text @1", "retrieval/", "/image_to_text/recall_at_1"),
    ("text to image @1", "retrieval/", "/text_to_image/recall_at_1"),
)
COSTS = (
    ("minutes", "training/seconds", 1 / 60),
    ("samples/s", "training/samples_per_second", 1.0),
    ("peak memory, GiB", "training/peak_memory_mib", 1 / 1024),
)
ENCODER = re.compile(r"\*? RN\d+(x\d)?( \(\d+ epochs\))?$")
"""What a model's printed name says of its encoder and training: at another scale it is untrue."""


@dataclass(frozen=True)
class Compared:
    """The runs of one row. label: what the paper calls it, without encoder and epochs, and what else sets it apart."""

    paper: str
    label: str
    group: Group

    def cost(self, key: str, factor: float) -> float | None:
        found = [match.run.metrics[key] * factor for match in self.group.runs if key in match.run.metrics]
        return sum(found) / len(found) if found else None


@dataclass(frozen=True)
class Comparison:
    """columns: by task, the sets that all or some of the runs were judged on; where several, their mean comes first."""

    scale: str
    rows: tuple[Compared, ...]
    columns: dict[str, tuple[Column, ...]]


def comparisons(runs: Sequence[Run]) -> list[Comparison]:
    """One for each scale but the papers' own, whose runs stand in the papers' tables."""
    found = []
    for scale in dict.fromkeys(run.scale for run in runs if run.row and run.scale != PAPER):
        some = [run for run in runs if run.scale == scale]
        rows = [(row, extra, group) for row in _rows() for extra, group in _groups(some, row, scale)]
        if rows:
            found.append(Comparison(scale, tuple(_labelled(rows)), _columns(some)))
    return found


def _rows() -> list[str]:
    """All rows in the order of the papers' tables."""
    return list(dict.fromkeys(row.name for name in table_names() for row in table(name).rows))


def _groups(runs: Sequence[Run], row: str, scale: str) -> Iterator[tuple[str, Group]]:
    """What sets runs of the row apart beside the scale, and those runs, a group for all seeds."""
    groups: dict[str, list[Match]] = {}
    for match in matches(runs, row):
        groups.setdefault(described(match).removeprefix(f"scale={scale}").removeprefix(", "), []).append(match)
    for extra, group in groups.items():
        yield extra, Group(extra, tuple(group))


def _labelled(rows: Sequence[tuple[str, str, Group]]) -> Iterator[Compared]:
    def label(row: str, extra: str, short: bool) -> str:
        model = row.split("/", 2)[2]
        model = ENCODER.sub("", model) if short else row
        return f"{model} ({extra})" if extra else model

    counts = Counter(label(row, extra, True) for row, extra, _ in rows)
    for row, extra, group in rows:
        yield Compared(PAPERS[row.split("/")[0]], label(row, extra, counts[label(row, extra, True)] == 1), group)


def _columns(runs: Sequence[Run]) -> dict[str, tuple[Column, ...]]:
    keys: dict[str, Any] = dict.fromkeys(key for run in runs for key in run.metrics)
    found = {}
    for task, start, end in TASKS:
        sets = [key[len(start) : -len(end)] for key in keys if key.startswith(start) and key.endswith(end)]
        sets = [each for each in sets if "/" not in each]
        if sets:
            groups = tuple((f"{start}{each}{end}",) for each in sets)
            single = [Column(task, each.replace("_", " "), (group,)) for each, group in zip(sets, groups, strict=True)]
            found[task] = tuple([Column(task, "mean", groups), *single] if len(sets) > 1 else single)
    return found
