"""The papers' tables: their rows, their columns as our metrics, and the numbers printed in them."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from clipzoo.errors import ConfigError

FOLDER = Path(__file__).parent / "published"
PAPERS = {"wpse": "WPSE", "kme": "KME-CLIP", "cloob": "CLOOB", "nuclr": "NUCLR"}
HEADINGS = {
    "zero_shot_classification": "zero-shot",
    "linear_classification": "linear probe after projection",
    "linear_classification_before_projection": "linear probe before projection",
    "linear_probing": "linear probe",
    "retrieval_image_to_text": "image to text",
    "retrieval_text_to_image": "text to image",
    "retrieval": "retrieval, both ways",
    "retrieval_mean_of_directions": "retrieval, both ways",
    "mean_of_four": "mean",
    "cost": "cost",
}
COSTS = {
    "training_time_s_per_epoch": ("seconds an epoch", "training/seconds_per_epoch"),
    "gpus_for_training": ("GPUs", "training/ranks"),
    "inference_time_s_two_gpus": ("inference on two GPUs, s", None),
}
DIRECTIONS = ("image_to_text", "text_to_image")


@dataclass(frozen=True)
class Number:
    """A published value, its deviation where there is one, and how it is printed."""

    value: float
    deviation: float | None
    printed: str


@dataclass(frozen=True)
class Column:
    """groups: our metrics; the column is the mean over groups of the mean inside each. None: we measure nothing."""

    heading: str
    label: str
    groups: tuple[tuple[str, ...], ...] | None

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """None unless every metric is there."""
        if self.groups is None or not all(key in metrics for group in self.groups for key in group):
            return None
        return statistics.fmean(statistics.fmean(metrics[key] for key in group) for group in self.groups)

    def deviation(self, metrics: Mapping[str, float]) -> float | None:
        """Over the draws of random features, where the column is one metric."""
        return metrics.get(f"{self.groups[0][0]}_std") if self.groups and len(self.groups) == 1 else None


@dataclass(frozen=True)
class Row:
    """pretrain, model: as printed. name: the row of experiments that fills it."""

    pretrain: str
    model: str
    name: str


@dataclass(frozen=True)
class Table:
    """One table of a paper. numbers: by row and column, for the cells that the paper fills."""

    name: str
    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    numbers: Mapping[tuple[Row, Column], Number] = field(repr=False)
    note: str | None = None
    without_numbers: str | None = None

    @property
    def paper(self) -> str:
        return PAPERS[self.name.split("/")[0]]

    @property
    def heading(self) -> str:
        number = self.name.split("/")[1]
        kind = {"logs": "the authors' logs", "figure4": "figure 4"}.get(number, f"table {number}")
        return f"{self.paper}, {kind}: {self.title}"


@dataclass(frozen=True)
class Search:
    """What a paper searched for some rows: the option of conf/search, and the column by which a point is chosen.

    followed: the row whose point an ablation takes; None for rows that were searched themselves.
    """

    name: str
    by: str
    select: Column
    followed: str | None


def table(name: str) -> Table:
    """The table "wpse/1". Raises ConfigError with the known names."""
    if name not in layout()["tables"]:
        raise ConfigError(f"there is no table {name}: the tables are {', '.join(table_names())}")
    return _load(name)


def table_names() -> list[str]:
    return list(layout()["tables"])


def search_of(row: str) -> Search | None:
    """The search that the row, or the row that it follows, is the best point of."""
    for name, facts in layout()["searches"].items():
        follow = facts.get("follow", {})
        if row in facts["rows"] or row in follow:
            return Search(name, facts["by"], _column(facts["select"]), follow.get(row))
    return None


def not_measured(metric: str) -> str | None:
    """Why our evaluation has no such metric, where it has not."""
    reasons = layout()["not_measured"]
    return next((reason for place, reason in reasons.items() if f"{metric}/".startswith(f"{place}/")), None)


@cache
def layout() -> dict[str, Any]:
    """tables.yaml."""
    return yaml.safe_load((FOLDER / "tables.yaml").read_text())


@cache
def _load(name: str) -> Table:
    facts = layout()["tables"][name]
    paper = name.split("/")[0]
    aliases = facts.get("rows", {})

    def row(pretrain: str, model: str) -> Row:
        return Row(pretrain, model, aliases.get(f"{pretrain}/{model}", f"{paper}/{pretrain}/{model}"))

    numbers: dict[tuple[Row, Column], Number] = {}
    if "numbers" in facts:
        for file in facts["numbers"]:
            for cell in read_numbers(file):
                place = row(cell["pretrain_data"], cell["model"]), _column(cell)
                deviation = float(cell["std"]) if cell["std"] else None
                numbers[place] = Number(float(cell["value"]), deviation, cell["value"])
        rows: Iterable[Row] = dict.fromkeys(each for each, _ in numbers)
        columns: Iterable[Column] = dict.fromkeys(each for _, each in numbers)
    else:
        rows = [row(pretrain, model) for pretrain, models in facts["models"].items() for model in models]
        columns = [_column(each) for each in facts["columns"]]
    return Table(
        name, facts["title"], tuple(rows), tuple(columns), numbers, facts.get("note"), facts.get("without_numbers")
    )


def read_numbers(file: str) -> list[dict[str, str]]:
    with (FOLDER / file).open(newline="") as lines:
        return list(csv.DictReader(lines))


def _column(cell: Mapping[str, Any]) -> Column:
    """The column of a cell's task, metric and data set (or several, whose mean it is)."""
    task, metric, sets = cell["task"], cell["metric"], cell["dataset"]
    heading = HEADINGS[task]
    if metric in COSTS:
        label, key = COSTS[metric]
        return Column(heading, label, ((key,),) if key else None)
    if task == "mean_of_four":
        four = [("retrieval", "mean_recall@1", name) for name in ("MSCOCO", "Flickr30k")]
        four += [("zero_shot_classification", "top1", name) for name in ("CIFAR100", "ImageNet1k")]
        return Column(heading, "mean of four", tuple(_keys(*each) for each in four))
    if metric == "average":
        thirteen = layout()["thirteen"].items()
        return Column(heading, "average of 13", tuple(_keys(task, each, name) for name, each in thirteen))
    names = [sets] if isinstance(sets, str) else list(sets)
    groups = tuple(_keys(task, metric, name) for name in names)
    return Column(heading, " and ".join(names) + _suffix(task, metric), groups)


def _suffix(task: str, metric: str) -> str:
    """What tells columns of one data set apart: the cut-off of recall, or of accuracy where it is not 1."""
    if metric == "mean_recall_1_5_10":
        return " @1, 5, 10"
    cut = metric.removesuffix("_percent").removeprefix("mean_recall@").removeprefix("top")
    if task.startswith("retrieval"):
        return f" @{cut}"
    return f" top-{cut}" if cut.isdigit() and cut != "1" else ""


def _keys(task: str, metric: str, dataset: str) -> tuple[str, ...]:
    """Our metrics whose mean a paper's cell is."""
    name = layout()["sets"][dataset]
    metric = metric.removesuffix("_percent")
    if task == "zero_shot_classification":
        return (f"zero_shot/{name}/{_accuracy(metric)}",)
    if task.startswith("linear"):
        where = "before" if task.endswith("before_projection") else "after"
        return (f"linear_probe/{name}/{where}/{_accuracy(metric)}",)
    if task == "retrieval":
        cuts: Sequence[str] = ("1", "5", "10") if metric == "mean_recall_1_5_10" else (metric.rpartition("@")[2],)
        return tuple(f"retrieval/{name}/{way}/recall_at_{cut}" for way in DIRECTIONS for cut in cuts)
    # KME-CLIP has one caption an image in the gallery at a time.
    cut = metric.removeprefix("top")
    paired = f"retrieval/{name}_paired/image_to_text/recall_at_{cut}", f"retrieval/{name}/text_to_image/recall_at_{cut}"
    return {"retrieval_image_to_text": paired[:1], "retrieval_text_to_image": paired[1:]}.get(task, paired)


def _accuracy(metric: str) -> str:
    return {"mean_per_class_acc": "mean_per_class"}.get(metric, metric)
