"""Runs of several rows at one scale, compared on the datasets that they share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from clipzoo.report.paper_tables.collect import PAPER, Run, matches
from clipzoo.report.paper_tables.filled import SeedGroup, grouped
from clipzoo.report.paper_tables.published import PAPERS, Metrics, PaperColumn, row_names
from clipzoo.runs.arrays import read_arrays
from clipzoo.runs.metric_key import MetricKey

DIRECTIONS = ("image_to_text", "text_to_image")
TASKS = (
    ("zero-shot top-1", MetricKey("zero_shot", "", "", "top1")),
    ("linear probe before projection, top-1", MetricKey("linear_probe", "", "before", "top1")),
    ("linear probe after projection, top-1", MetricKey("linear_probe", "", "after", "top1")),
    ("image to text @1", MetricKey("retrieval", "", "image_to_text", "recall_at_1")),
    ("text to image @1", MetricKey("retrieval", "", "text_to_image", "recall_at_1")),
)
"""Compared metrics; the dataset is left open."""
ENCODER = re.compile(r"\*? RN\d+(x\d)?( \(\d+ epochs\))?$")
"""Encoder and epochs in a model's printed name, which are untrue at another scale."""


@dataclass(frozen=True)
class Cost:
    """A cost of training: its label, its metric, and the factor from the metric's unit to the label's."""

    label: str
    key: MetricKey
    factor: float


COSTS = (
    Cost("minutes", MetricKey("training", "", "", "seconds"), 1 / 60),
    Cost("minutes of evaluation", MetricKey("training", "", "", "evaluation_seconds"), 1 / 60),
    Cost("samples/s", MetricKey("training", "", "", "samples_per_second"), 1.0),
    Cost("peak GiB", MetricKey("training", "", "", "peak_memory_mib"), 1 / 1024),
)


@dataclass(frozen=True)
class ComparedRow:
    """Runs of one row at the scale.

    label: name in the paper without encoder and epochs, extended by what tells it from other rows. settings: overrides
    that distinguish the runs from the row's experiment at this scale.
    """

    paper: str
    label: str
    settings: str
    group: SeedGroup

    @property
    def note(self) -> str:
        """The settings, unless the label has them."""
        return "" if self.settings in self.label else self.settings

    def cost(self, cost: Cost) -> float | None:
        """Mean cost over the runs that recorded it."""
        values = [
            match.run.metrics[cost.key] * cost.factor for match in self.group.runs if cost.key in match.run.metrics
        ]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class Comparison:
    """Rows compared at one scale.

    columns: by task, the datasets that any run was evaluated on; their mean comes first if there are several.
    chance: accuracy of guessing, where the evaluation left the number of classes or images.
    """

    scale: str
    rows: tuple[ComparedRow, ...]
    columns: Mapping[str, Sequence[PaperColumn]]
    chance: Metrics


def comparisons(runs: Sequence[Run]) -> list[Comparison]:
    """Compare the runs of each scale; runs at the papers' scale belong to the papers' tables."""
    compared = []
    for scale in dict.fromkeys(run.scale for run in runs if run.row and run.scale != PAPER):
        chosen = [run for run in runs if run.scale == scale]
        groups = [(row, group) for row in row_names() for group in grouped(matches(chosen, row))]
        if groups:
            compared.append(Comparison(scale, tuple(_labelled(groups, scale)), columns(chosen), chance(chosen)))
    return compared


def _labelled(groups: Sequence[tuple[str, SeedGroup]], scale: str) -> Iterator[ComparedRow]:
    """Give each row the shortest of its names that no other row has."""
    settings = [group.label.removeprefix(f"scale={scale}").removeprefix(", ") for _, group in groups]
    names = [_names(row, extra) for (row, _), extra in zip(groups, settings, strict=True)]
    counts = Counter(name for candidates in names for name in dict.fromkeys(candidates))
    for (row, group), extra, candidates in zip(groups, settings, names, strict=True):
        label = next((name for name in candidates if counts[name] == 1), candidates[-1])
        yield ComparedRow(PAPERS[row.split("/")[0]], label, extra, group)


def _names(row: str, settings: str) -> list[str]:
    model, added = ENCODER.sub("", row.split("/", 2)[2]), f" ({settings})" if settings else ""
    return [model, f"{model}{added}", f"{row}{added}"]


def chance(runs: Sequence[Run]) -> dict[MetricKey, float]:
    """Accuracy of guessing on each dataset whose number of classes or images the evaluation left."""
    guessing: dict[MetricKey, float] = {}
    for run in runs:
        for path in sorted((run.folder / "evaluation" / "zero_shot").glob("*.npz")):
            content = run.damage.read(partial(read_arrays, path, ("class_names",)), None)
            if content is None:
                continue
            accuracy = 100 / max(1, len(content["class_names"]))
            guessing[MetricKey("zero_shot", path.stem, "", "top1")] = accuracy
            guessing |= {MetricKey("linear_probe", path.stem, side, "top1"): accuracy for side in ("before", "after")}
        for path in sorted((run.folder / "evaluation" / "retrieval").glob("*.npz")):
            content = run.damage.read(partial(read_arrays, path, ("gallery",)), None)
            if content is None:
                continue
            recall = 100 / int(content["gallery"])
            guessing |= {MetricKey("retrieval", path.stem, way, "recall_at_1"): recall for way in DIRECTIONS}
    return guessing


def columns(runs: Sequence[Run]) -> dict[str, list[PaperColumn]]:
    """By task, the datasets that any run was evaluated on; their mean comes first if there are several."""
    measured: Iterable[MetricKey] = dict.fromkeys(key for run in runs for key in run.metrics)
    by_task = {}
    for task, wanted in TASKS:
        keys = [key for key in measured if replace(key, dataset="", protocol=_direction(key)) == wanted]
        single = [PaperColumn(task, _label(key), ((key,),)) for key in keys]
        mean = [PaperColumn(task, "mean", tuple((key,) for key in keys))] if len(keys) > 1 else []
        if keys:
            by_task[task] = [*mean, *single]
    return by_task


def _direction(key: MetricKey) -> str:
    return key.protocol.removeprefix("paired_")


def _label(key: MetricKey) -> str:
    return key.dataset.replace("_", " ") + (" paired" if key.paired else "")
