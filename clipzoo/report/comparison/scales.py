"""Runs of several rows at one scale, side by side on the sets that they share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clipzoo.report.paper_tables.collect import PAPER, Match, Run, matches
from clipzoo.report.paper_tables.published import PAPERS, Column, table, table_names
from clipzoo.report.paper_tables.tables import Group, described
from clipzoo.report.run_page.examples import load

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
    ("peak GiB", "training/peak_memory_mib", 1 / 1024),
)
ENCODER = re.compile(r"\*? RN\d+(x\d)?( \(\d+ epochs\))?$")
"""What a model's printed name says of its encoder and training: at another scale it is untrue."""


@dataclass(frozen=True)
class Compared:
    """The runs of one row.

    label: what the paper calls it, without encoder and epochs; where several rows or variants of one are so called,
    with what tells them apart. apart: all that sets the runs apart from the row's experiment at this scale.
    """

    paper: str
    label: str
    apart: str
    group: Group

    @property
    def named(self) -> str:
        return self.label if self.apart in self.label else f"{self.label} ({self.apart})"

    def cost(self, key: str, factor: float) -> float | None:
        found = [match.run.metrics[key] * factor for match in self.group.runs if key in match.run.metrics]
        return sum(found) / len(found) if found else None


@dataclass(frozen=True)
class Comparison:
    """columns: by task, the sets that all or some of the runs were judged on; where several, their mean comes first.

    chance: what guessing comes to, by metric, where the evaluation left the number of classes or pictures.
    """

    scale: str
    rows: tuple[Compared, ...]
    columns: dict[str, tuple[Column, ...]]
    chance: Mapping[str, float]


def comparisons(runs: Sequence[Run]) -> list[Comparison]:
    """One for each scale but the papers' own, whose runs stand in the papers' tables."""
    found = []
    for scale in dict.fromkeys(run.scale for run in runs if run.row and run.scale != PAPER):
        some = [run for run in runs if run.scale == scale]
        rows = [(row, extra, group) for row in _rows() for extra, group in _groups(some, row, scale)]
        if rows:
            found.append(Comparison(scale, tuple(_labelled(rows)), _columns(some), _chance(some)))
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
    """With the shortest names that tell the rows from each other."""

    def names(row: str, extra: str) -> list[str]:
        model, added = ENCODER.sub("", row.split("/", 2)[2]), f" ({extra})" if extra else ""
        return [model, f"{model}{added}", f"{row}{added}"]

    counts = Counter(name for row, extra, _ in rows for name in dict.fromkeys(names(row, extra)))
    for row, extra, group in rows:
        label = next((name for name in names(row, extra) if counts[name] == 1), names(row, extra)[-1])
        yield Compared(PAPERS[row.split("/")[0]], label, extra, group)


def _chance(runs: Sequence[Run]) -> dict[str, float]:
    found: dict[str, float] = {}
    for run in runs:
        for path in sorted((run.folder / "evaluation" / "zero_shot").glob("*.npz")):
            classes = len(load(path)["class_names"])
            found |= {f"zero_shot/{path.stem}/top1": 100 / classes}
            found |= {f"linear_probe/{path.stem}/{where}/top1": 100 / classes for where in ("before", "after")}
        for path in sorted((run.folder / "evaluation" / "retrieval").glob("*.npz")):
            ways = ("image_to_text", "text_to_image")
            pictures = int(load(path)["gallery"])
            found |= {f"retrieval/{path.stem}/{way}/recall_at_1": 100 / pictures for way in ways}
    return found


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
