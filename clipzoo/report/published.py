"""The papers' tables, their printed numbers, and the experiment that fills each row. Needs no pandas."""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from clipzoo import io
from clipzoo.config.compose import compose
from clipzoo.config.groups import CONF
from clipzoo.config.trust import read
from clipzoo.errors import ConfigError, nearest
from clipzoo.evaluation.datasets.dataset import catalogue
from clipzoo.runs.directory import EXEMPT
from clipzoo.runs.identity import identity
from clipzoo.runs.record import TWO_LISTS, MetricKey, Setting, protocol_settings
from clipzoo.runs.sweep import searched

FOLDER, OPEN_CLIP = (Path(__file__).parent / name for name in ("papers", "open_clip"))
PAPERS = {"wpse": "WPSE", "kme": "KME-CLIP", "cloob": "CLOOB", "nuclr": "NUCLR"}
COSTS = {
    "training_time_s_per_epoch": ("seconds per epoch", "seconds_per_epoch"),
    "gpus_for_training": ("GPUs", "ranks"),
    "inference_time_s_two_gpus": ("inference on two GPUs, s", None),
}
DIRECTIONS = ("image_to_text", "text_to_image")

Metrics = Mapping[MetricKey, float]


@dataclass(frozen=True)
class PaperNumber:
    """A published value, its standard deviation if there is one, and its printed digits."""

    value: float
    deviation: float | None
    printed: str

    def text(self, digits: str) -> str:
        """The number as printed, with its deviation in a format such as ".2f"."""
        return self.printed + ("" if self.deviation is None else f" ± {self.deviation:{digits}}")


@dataclass(frozen=True)
class PaperColumn:
    """A column of a paper's table.

    heading: task. label: dataset and cut-off. groups: metric keys; the column is the mean over groups of the mean
    within each group. Empty if clipzoo does not measure the metric.
    """

    heading: str
    label: str
    groups: tuple[tuple[MetricKey, ...], ...]

    @property
    def keys(self) -> list[MetricKey]:
        return [key for group in self.groups for key in group]

    @property
    def text(self) -> str:
        """Label, of a mean with the number of its parts."""
        return f"{self.label} of {len(self.groups)}" if len(self.groups) > 1 else self.label

    @property
    def datasets(self) -> set[str]:
        return {key.dataset for key in self.keys}

    @property
    def is_cost(self) -> bool:
        return self.heading == layout()["headings"]["cost"]

    def value(self, metrics: Metrics) -> float | None:
        """The column's number, or None unless all of its metrics are measured."""
        if not self.groups or not all(key in metrics for key in self.keys):
            return None
        return statistics.fmean(statistics.fmean(metrics[key] for key in group) for group in self.groups)

    def deviation(self, metrics: Metrics) -> float | None:
        """Standard deviation over draws of random features, for a column of a single group."""
        return metrics.get(self.keys[0].deviation) if len(self.groups) == 1 else None


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table. pretrain, model: as printed. name: the `row` of the experiment that fills it."""

    pretrain: str
    model: str
    name: str

    @property
    def place(self) -> str:
        """Printed names, unique in a table."""
        return f"{self.pretrain}/{self.model}"

    def group(self, variant: str | None) -> str:
        """Group of the runs that represent the row (None), or of a variant."""
        return self.place if variant is None else f"{self.place}: {variant}"


@dataclass(frozen=True)
class PaperTable:
    """One table of a paper. paper: key, such as "wpse". numbers: printed cells by row and column."""

    name: str
    paper: str
    short_heading: str
    title: str
    rows: tuple[PaperRow, ...]
    columns: tuple[PaperColumn, ...]
    numbers: Mapping[tuple[PaperRow, PaperColumn], PaperNumber] = field(repr=False)
    note: str | None = None
    without_numbers: str | None = None

    @property
    def heading(self) -> str:
        return f"{self.short_heading}: {self.title}"

    def digits(self, column: PaperColumn) -> int:
        """Number of decimals that the paper prints in the column."""
        printed = [number.printed for (_, place), number in self.numbers.items() if place == column]
        return max((len(text.partition(".")[2]) for text in printed), default=2)

    def baseline(self, row: PaperRow) -> PaperRow:
        """Row that `row` is tested against: as tables.yaml states, else the first of its pretraining dataset."""
        baseline_model = layout()["tables"][self.name].get("against", {}).get(row.place)
        candidates = [other for other in self.rows if other.pretrain == row.pretrain]
        return next((other for other in candidates if other.model == baseline_model), candidates[0])


@dataclass(frozen=True)
class Search:
    """A paper's hyperparameter search. name: option of conf/search. by: the criterion in words; select: its column.

    followed: the row whose selected point an ablation takes; None for a row that was searched itself.
    """

    name: str
    by: str
    select: PaperColumn
    followed: str | None


@cache
def table(name: str) -> PaperTable:
    """Return the table "wpse/1". Raises ConfigError with the known names."""
    if name not in layout()["tables"]:
        raise ConfigError(f"there is no table {name}: the tables are {', '.join(table_names())}")
    facts = layout()["tables"][name]
    aliases, (paper, number) = facts.get("rows", {}), name.split("/")

    def row(pretrain: str, model: str) -> PaperRow:
        return PaperRow(pretrain, model, aliases.get(f"{pretrain}/{model}", f"{paper}/{pretrain}/{model}"))

    numbers: dict[tuple[PaperRow, PaperColumn], PaperNumber] = {}
    for file in facts.get("numbers", ()):
        for cell in read_numbers(file):
            deviation = float(cell["std"]) if cell["std"] else None
            place = row(cell["pretrain_data"], cell["model"]), _column(cell)
            numbers[place] = PaperNumber(float(cell["value"]), deviation, cell["value"])
    rows: Iterable[PaperRow] = dict.fromkeys(row for row, _ in numbers)
    columns: Iterable[PaperColumn] = dict.fromkeys(column for _, column in numbers)
    if "numbers" not in facts:
        rows = [row(pretrain, model) for pretrain, models in facts["models"].items() for model in models]
        columns = [_column(cell) for cell in facts["columns"]]
    kind = {"logs": "the authors' logs", "figure4": "figure 4"}.get(number, f"table {number}")
    return PaperTable(
        name, paper, f"{PAPERS[paper]}, {kind}", facts["title"], tuple(rows), tuple(columns), numbers,
        facts.get("note"), facts.get("without_numbers"),
    )  # fmt: skip


def table_names() -> list[str]:
    return list(layout()["tables"])


def row_names() -> list[str]:
    """Names of all rows, in the order of the papers' tables."""
    return list(dict.fromkeys(row.name for name in table_names() for row in table(name).rows))


def require_row(name: str) -> None:
    """Raise ConfigError if no paper's table has this row."""
    if name not in row_names():
        raise ConfigError(f"no paper has the row {name}{nearest(name, row_names())}")


def search_of(row: str) -> Search | None:
    """Return the search that selects the settings of a row, or of the row that it follows."""
    for name, facts in layout()["searches"].items():
        follow = facts.get("follow", {})
        if row in facts["rows"] or row in follow:
            return Search(name, facts["by"], _column(facts["select"]), follow.get(row))
    return None


def not_measured(key: MetricKey) -> str | None:
    """Return the reason why the evaluation does not measure a metric; None if it does."""
    for entry in layout()["not_measured"]:
        if (entry["task"], entry["dataset"], entry.get("metric", key.metric)) == (key.task, key.dataset, key.metric):
            return entry["reason"]
    return None


@cache
def layout(path: Path = FOLDER / "tables.yaml") -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


@cache
def titles() -> dict[str, str]:
    """Names of the evaluation datasets by their printed titles."""
    return {facts["title"]: name for name, facts in catalogue().items()}


def read_numbers(file: str, folder: Path = FOLDER) -> list[dict[str, str]]:
    with (folder / file).open(newline="") as lines:
        return list(csv.DictReader(lines))


def expected_numbers(given: str | None, own: str, prompts: str | None) -> tuple[dict[MetricKey, PaperNumber], str]:
    """Return the published numbers of a model by metric, in percent, and their source.

    given: "MODEL/TAG" of open_clip's tables, or a .json file of numbers by metric, as evaluation/metrics.json of a run.
    own: MODEL/TAG of the evaluated model, which has no numbers if it is not in the tables; used if `given` is None.
    prompts: setting of the evaluation; ImageNet's numbers are left out if its templates are others.
    Raises ConfigError if there is no such model or file.
    """
    name = given or own
    if name.endswith(".json"):
        values = io.read_json(Path(name), io.MB)
        io.require_fields(Path(name), values, dict.fromkeys(values, io.NUMBER))
        return {MetricKey.parse(key): PaperNumber(value, None, str(value)) for key, value in values.items()}, name
    facts = layout(OPEN_CLIP / "columns.yaml")
    cells: dict[str, dict[str, str]] = {}
    for row in (row for file in facts["files"] for row in read_numbers(file, OPEN_CLIP)):
        model, tag, *_ = row.values()
        cells.setdefault(f"{model}/{tag}", {}).update(row)
    if name not in cells and given is None:
        return {}, ""
    if name not in cells:
        hint = nearest(name, list(cells), most=3)
        raise ConfigError(f"published={name} is neither a .json file nor MODEL/TAG of open_clip's tables{hint}")
    numbers = {
        key: PaperNumber(100 * float(value), None, f"{100 * float(value):.2f}")
        for column, value in cells[name].items()
        if (key := open_clip_metric(column)) is not None
    }
    if prompts != facts["prompts"]:
        numbers = {key: number for key, number in numbers.items() if key.dataset not in TWO_LISTS}
    return numbers, facts["citation"]


def open_clip_metric(column: str) -> MetricKey | None:
    """Return the metric of a column of open_clip's tables: as columns.yaml states, else that of the titled dataset."""
    for pattern, key in layout(OPEN_CLIP / "columns.yaml")["columns"].items():
        if match := re.fullmatch(pattern, column):
            return MetricKey.parse(match.expand(key))
    name = titles().get(column, "")
    metric = catalogue().get(name, {}).get("metric")
    return None if metric is None else MetricKey("zero_shot", name, "", metric)


def _column(cell: Mapping[str, Any]) -> PaperColumn:
    """The column of a cell's task, metric and dataset; the mean over datasets where there are several."""
    task, metric, datasets = cell["task"], cell["metric"], cell["dataset"]
    heading = layout()["headings"][task]
    if metric in COSTS:
        label, cost = COSTS[metric]
        return PaperColumn(heading, label, ((MetricKey("training", "", "", cost),),) if cost else ())
    if task == "mean_of_four":
        four = [("retrieval", "mean_recall@1", name) for name in ("MSCOCO", "Flickr30k")]
        four += [("zero_shot_classification", "top1", name) for name in ("CIFAR100", "ImageNet1k")]
        return PaperColumn(heading, "mean of four", tuple(_keys(*part) for part in four))
    if metric == "average":
        metrics = {name: catalogue()[titles()[name]]["metric"] for name in layout()["thirteen"]}
        return PaperColumn(heading, "average of 13", tuple(_keys(task, metrics[name], name) for name in metrics))
    # Columns of one dataset differ in the cut-off of recall, or of accuracy other than top-1.
    cut = metric.removesuffix("_percent").removeprefix("mean_recall@").removeprefix("top")
    suffix = f" top-{cut}" if cut.isdigit() and cut != "1" else ""
    if metric == "mean_recall_1_5_10":
        suffix = " @1, 5, 10"
    elif task.startswith("retrieval"):
        suffix = f" @{cut}"
    names = [datasets] if isinstance(datasets, str) else list(datasets)
    return PaperColumn(heading, " and ".join(names) + suffix, tuple(_keys(task, metric, name) for name in names))


def _keys(task: str, metric: str, dataset: str) -> tuple[MetricKey, ...]:
    """Metric keys averaged into one cell of a paper's table."""
    name = layout()["sets"].get(dataset) or titles()[dataset]
    metric = metric.removesuffix("_percent").removesuffix("_acc")
    if task == "zero_shot_classification":
        return (MetricKey("zero_shot", name, "", metric),)
    if task.startswith("linear"):
        protocol = "before" if task.endswith("before_projection") else "after"
        return (MetricKey("linear_probe", name, protocol, metric),)
    cuts: Sequence[str] = ("1", "5", "10")
    if metric != "mean_recall_1_5_10":
        cuts = (metric.rpartition("@")[2].removeprefix("top"),)
    directions = {
        "retrieval": DIRECTIONS,
        # KME-CLIP's galleries have one caption per image.
        "retrieval_image_to_text": ("paired_image_to_text",),
        "retrieval_text_to_image": ("text_to_image",),
    }.get(task, ("paired_image_to_text", "text_to_image"))
    return tuple(
        MetricKey("retrieval", name, direction, f"recall_at_{cut}") for direction in directions for cut in cuts
    )


@dataclass(frozen=True)
class Experiment:
    """An option of `experiment=` that fills a row, with its `about` node.

    hours: estimated device hours of one run. device: "H100". runs: number of runs for seeds and searched points.
    """

    name: str
    row: str
    command: str
    hours: float
    device: str
    runs: int

    @property
    def cost(self) -> str:
        """Estimated cost of all runs, in words."""
        runs = f", {self.runs} runs" if self.runs > 1 else ""
        return f"{self.hours * self.runs:,.0f} {self.device} hours{runs}"


@cache
def experiments() -> Mapping[str, Experiment]:
    """Experiments by row. Files are read one by one, without composing them: that would take seconds."""
    by_row = {}
    for path in sorted((CONF / "experiment").glob("*/*.yaml")):
        content = yaml.safe_load(path.read_text())
        if "row" in content:
            about, name = content["about"], f"{path.parent.name}/{path.stem}"
            cost, sweep = about["cost"], about.get("sweep", "")
            command = f"clipzoo train -m experiment={name} {sweep}" if sweep else f"clipzoo train experiment={name}"
            # The number of points of a search is stated; seeds are counted.
            runs = cost.get("runs", sweep.count(",") + 1)
            by_row[content["row"]] = Experiment(name, content["row"], command, cost["hours"], cost["device"], runs)
    return by_row


def differences(
    plain: Mapping[str, Any],
    experiment: str,
    scale: str,
    protocol: Mapping[str, Mapping[str, Setting]] = MappingProxyType({}),
) -> dict[str, tuple[Any, Any]]:
    """Keys of a run's configuration, and evaluation settings, whose values differ from the experiment's.

    protocol: settings by task and dataset, of the run's record; those of the experiment's datasets are compared.
    Returns the expected and the actual value by key; None for an absent key.
    """
    expected_plain = composed(experiment, scale)
    run_settings, expected = (
        {key: value for key, value in identity(config).items() if key not in EXEMPT}
        for config in (plain, expected_plain)
    )
    return {
        key: (expected.get(key), run_settings.get(key))
        for key in sorted({*expected, *run_settings})
        if expected.get(key) != run_settings.get(key) or (key in expected) != (key in run_settings)
    } | {
        f"eval.{name} of {place}": (value, settings[name])
        for place, settings in protocol.items()
        for task, _, dataset in [place.partition("/")]
        if dataset in expected_plain["eval"].get(task, ())
        for name, value in protocol_settings(expected_plain["eval"], task, dataset).items()
        if settings.get(name, value) != value
    }


@cache
def axes(search: str) -> Mapping[str, list[Any]]:
    """Keys that an option of conf/search varies, with their values."""
    return {
        override.key_or_group: [
            yaml.safe_load(value) if isinstance(value, str) else value for value in override.sweep_iterator()
        ]
        for override in map(read, searched(search))
    }


def total_cost(rows: Iterable[Experiment]) -> str:
    """Sum of device hours by device, in words."""
    by_device: dict[str, float] = {}
    for experiment in rows:
        by_device[experiment.device] = by_device.get(experiment.device, 0.0) + experiment.hours * experiment.runs
    return ", ".join(f"{hours:,.0f} {device}" for device, hours in by_device.items())


@cache
def composed(experiment: str, scale: str) -> Mapping[str, Any]:
    """Configuration of an experiment at a scale. Composing takes tenths of a second."""
    return compose([f"experiment={experiment}", f"scale={scale}"])
