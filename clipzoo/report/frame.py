"""One table of results: every number of every finished run, read from run directories.

`read_frame` reads runs; `comparison_rows` and `scale_rows` group seeds into the rows of a comparison; `fill` puts runs
next to the published numbers of a paper's table; `seed_means` averages.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from clipzoo import io
from clipzoo.config.groups import options
from clipzoo.config.trust import is_within
from clipzoo.errors import ConfigError, number_of
from clipzoo.report import published
from clipzoo.report.statistics import rank_sum, short_run_names
from clipzoo.runs.directory import config_of, is_finished
from clipzoo.runs.identity import flat, identity
from clipzoo.runs.record import AVERAGE, DEVIATION, PAPER_TASKS, MetricKey, RunRecord, TrainingLog, stored_arrays

PAPER = "paper"
"""Name of the scale of the papers."""
COLUMNS = (
    *("run", "seed", "group", "row", "scale", "encoder", "head", "objective", "cost"),
    *("task", "dataset", "protocol", "metric", "value", "key", "outcomes", "config", "record"),
)
TASK_KEYS = (
    ("zero-shot top-1", MetricKey("zero_shot", "", "", "top1")),
    ("linear probe before projection, top-1", MetricKey("linear_probe", "", "before", "top1")),
    ("linear probe after projection, top-1", MetricKey("linear_probe", "", "after", "top1")),
    ("image to text @1", MetricKey("retrieval", "", "image_to_text", "recall_at_1")),
    ("text to image @1", MetricKey("retrieval", "", "text_to_image", "recall_at_1")),
)
"""Compared metrics; the dataset is left open."""
COSTS = {
    "minutes": (MetricKey("training", "", "", "seconds"), 1 / 60),
    "minutes of evaluation": (MetricKey("training", "", "", "evaluation_seconds"), 1 / 60),
    "samples/s": (MetricKey("training", "", "", "samples_per_second"), 1.0),
    "peak GiB": (MetricKey("training", "", "", "peak_memory_mib"), 1 / 1024),
}
"""Compared costs of a training: by label, the metric and the factor from its unit to the label's."""
IGNORED = ("name", "runs", "seed", "row", "logger", "about", "data.workers", "data.prefetch", "trainer.device")
"""Keys that are not listed as differences of methods."""
ACCURACIES = {"top1": "top-1", "top5": "top-5", "mean_per_class": "mean per class"}
"""Metrics of every classification dataset."""
MANY = 12
"""Largest number of datasets of a task that are not divided by kind, and that fit into a table's head."""
MOST_NOTES = 3
"""Largest number of differences in the note of a run."""
ENCODER = re.compile(r"\*? RN\d+(x\d)?( \(\d+ epochs\))?$")
"""Encoder and epochs in a model's printed name, which do not hold at another scale."""


def read_frame(paths: Sequence[Path], damage: io.DamageLog | None = None) -> pd.DataFrame:
    """Read the finished runs of some folders as a tidy table, one row per run, task, dataset, protocol and metric.

    Columns:
        run: the run directory. seed. group: digest of the configuration without the seed: runs of one group are seeds
            of one method. row, scale: as in `row=` and `scale=`. encoder, head, objective: names of classes.
        cost: seconds of the training. Other costs are rows of the task "training".
        task, dataset, protocol, metric, value: see `MetricKey`, which is in `key`. A run without numbers has one row
            without them.
        outcomes: file with the answers to every sample; None without one.
        config, record: the configuration of the run and its `RunRecord`.

    paths: run directories, or folders of them. damage: records damaged runs, which are left out. Raises ConfigError if
    a path is not a folder.
    """
    damage = io.DamageLog() if damage is None else damage
    folders = [folder for folder in run_folders(paths) if is_finished(folder)]
    rows = [row for folder in folders for row in damage.read(partial(_rows, folder), list[dict[str, Any]]())]
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype=object).astype({"value": float, "cost": float})


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories of some folders, finished or not, each once. Raises ConfigError without a folder."""
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"there is no folder {path}")
        is_run = (path / "config.yaml").exists()
        folders |= dict.fromkeys([path] if is_run else [file.parent for file in sorted(path.rglob("config.yaml"))])
    return list(folders)


def read_logs(frame: pd.DataFrame, damage: io.DamageLog) -> dict[Path, TrainingLog]:
    """Return the training log of each run; empty for runs whose log cannot be read."""
    return {run: damage.read(partial(TrainingLog.read, run), TrainingLog()) for run in frame["run"].unique()}


def _rows(folder: Path) -> list[dict[str, Any]]:
    record = RunRecord.read(folder)
    config = record.resolved(config_of(folder))
    settings = {**identity(config), "seed": None}
    scale_names = [text.split("=", 1)[1] for text in record.overrides if text.startswith("scale=")]
    costs = {name: value for name, value in record.training.items() if isinstance(value, int | float)}
    facts = {
        "run": folder, "seed": config["seed"], "row": config.get("row"), "config": config, "record": record,
        "group": hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12],
        # An unknown scale counts as PAPER: `scale=` could name any file.
        "scale": scale_names[-1] if scale_names and scale_names[-1] in options("scale") else PAPER,
        **{part: config[part]["_target_"].rpartition(".")[2] for part in ("encoder", "head", "objective")},
        "cost": costs.get("seconds"),
    }  # fmt: skip
    if config["trainer"].get("epochs") and "seconds" in costs:
        costs["seconds_per_epoch"] = costs["seconds"] / config["trainer"]["epochs"]
    metrics = {**record.metrics, **{MetricKey("training", "", "", name): value for name, value in costs.items()}}
    rows = []
    for key, value in metrics.items():
        outcomes = None
        with suppress(io.DamagedFileError):  # a name that cannot be that of a file
            path = io.below(folder, f"evaluation/{key.task}/{key.dataset}.npz")
            outcomes = path if path.exists() else None
        rows.append({**facts, **vars(key), "value": float(value), "key": key, "outcomes": outcomes})
    return rows or [facts]


@cache
def names() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parent / "names.yaml").read_text())


def title_of(name: str) -> str:
    """Title of a task, a protocol or a metric."""
    return names()["titles"].get(name, name.replace("_", " "))


def task_title(task: str) -> str:
    """Title of a table of a task's metrics, with their unit."""
    return title_of(task) + ("" if task == "diagnosis" else ", %")


@cache
def kind_of(dataset: str) -> tuple[int, str]:
    """Place of a dataset in the kinds of names.yaml, and its kind; -1 and "other" without one."""
    patterns = [(pattern, kind) for kind, patterns in names()["kinds"].items() for pattern in patterns]
    places = ((place, kind) for place, (pattern, kind) in enumerate(patterns) if fnmatchcase(dataset, pattern))
    return next(places, (-1, "other"))


def columns_of(frame: pd.DataFrame, further: bool = False) -> dict[str, list[published.PaperColumn]]:
    """By task, the datasets that any run was evaluated on, in the order of their kinds.

    The mean over those that all of the task's runs have comes first, if there are several; with more than MANY datasets
    the mean of each kind comes before its datasets.

    further: metrics that are not in TASK_KEYS, by task, protocol and metric, without the categories of `choice`.
    """
    titles, by_task = {target: task for task, target in TASK_KEYS}, dict[str, list[MetricKey]]()
    for key in frame["key"].dropna().drop_duplicates():
        title = titles.get(replace(key, dataset="", protocol=key.protocol.removeprefix("paired_")))
        if further:
            is_detail = key.metric.endswith(DEVIATION) or key.task == "choice" and key.protocol
            is_common = key.task in PAPER_TASKS and (key.task != "zero_shot" or key.metric in ACCURACIES)
            is_listed = key.dataset and not is_detail and not is_common and key.task != AVERAGE
            places = ", ".join(title_of(part) for part in (key.task, key.protocol) if part)
            title = f"{places}: {title_of(key.metric)}" if is_listed else None
        if title is not None:
            by_task.setdefault(title, []).append(key)
    by_run = [set(keys) for _, keys in frame.groupby("run")["key"]]
    columns = {}
    for task in by_task if further else [task for task in titles.values() if task in by_task]:
        keys = sorted(by_task[task], key=lambda key: kind_of(key.dataset))
        shared = set(keys).intersection(*(measured for measured in by_run if not measured.isdisjoint(keys)))
        groups = {"mean": tuple((key,) for key in keys if key in shared)}
        for key in keys:
            if len(keys) > MANY:
                of_kind = (group for group in groups["mean"] if kind_of(group[0].dataset)[1] == kind_of(key.dataset)[1])
                groups.setdefault(f"{kind_of(key.dataset)[1]}, mean", tuple(of_kind))
            groups[key.dataset.replace("_", " ") + (" paired" if key.paired else "")] = ((key,),)
        columns[task] = [
            published.PaperColumn(task, label, group)
            for label, group in groups.items()
            if len(group) > 1 or not label.endswith("mean")
        ]
    return columns


def numbers(frame: pd.DataFrame) -> Iterator[tuple[Any, dict[MetricKey, float]]]:
    """Yield the first row of each run of a frame, and the metrics of the run by key."""
    for _, part in frame.groupby("run", sort=False):
        yield part.iloc[0], dict(zip(part["key"], part["value"], strict=True))


def seed_means(frame: pd.DataFrame, columns: Sequence[published.PaperColumn]) -> pd.DataFrame:
    """Average columns over the seeds of each group.

    Of several runs of a group with the same seed, the first counts.

    Returns a table indexed by group, task and column: `mean`; `deviation`, the standard deviation over seeds, or of a
    single run over draws of random features, NaN without either; `values`, one per seed. Columns that no run of a group
    measured are left out.
    """
    cells = []
    for group, part in frame.groupby("group", sort=False):
        runs = list(numbers(part))
        for column in columns:
            by_seed: dict[int, tuple[float, float | None]] = {}
            for run, metrics in runs:
                if (value := column.value(metrics)) is not None:
                    by_seed.setdefault(run["seed"], (value, column.deviation(metrics)))
            if by_seed:
                values = tuple(value for value, _ in by_seed.values())
                deviation = statistics.stdev(values) if len(values) > 1 else next(iter(by_seed.values()))[1]
                cells.append([group, column.heading, column.label, statistics.fmean(values), deviation, values])
    means = pd.DataFrame(cells, columns=["group", "task", "column", "mean", "deviation", "values"])
    return means.astype({"mean": float, "deviation": float}).set_index(["group", "task", "column"])


def cell(means: pd.DataFrame, group: str, column: published.PaperColumn) -> pd.Series | None:
    """Return the cell of a group in a column of `seed_means`; None if it was not measured."""
    place = (group, column.heading, column.label)
    return means.loc[place] if place in means.index else None


def mean_text(measured: pd.Series | None, digits: int = 2) -> str:
    """A mean with its deviation, if there is one; empty if it was not measured."""
    if measured is None:
        return ""
    deviation = "" if pd.isna(measured["deviation"]) else f" ± {measured['deviation']:.{digits}f}"
    return f"{measured['mean']:.{digits}f}{deviation}"


def cost_of(part: pd.DataFrame, label: str) -> float | None:
    """Return the mean of one of COSTS over the runs that recorded it."""
    key, factor = COSTS[label]
    recorded = part.loc[part["key"] == key, "value"]
    return float(recorded.mean()) * factor if len(recorded) else None


def chance(frame: pd.DataFrame, damage: io.DamageLog) -> dict[MetricKey, float]:
    """Accuracy of guessing, in percent, on each dataset whose number of classes or images the evaluation stored."""
    guessing: dict[MetricKey, float] = {}
    for run in frame["run"].unique():
        for name, content in stored_arrays(run, "zero_shot", ("class_names",), damage):
            keys = [replace(key, dataset=name) for _, key in TASK_KEYS if key.metric == "top1"]
            guessing |= dict.fromkeys(keys, 100 / max(1, len(content["class_names"])))
        for name, content in stored_arrays(run, "retrieval", ("gallery",), damage):
            keys = [replace(key, dataset=name) for _, key in TASK_KEYS if key.metric == "recall_at_1"]
            guessing |= dict.fromkeys(keys, 100 / int(content["gallery"]))
    return guessing


class Comparison:
    """The rows of a comparison with everything that its tables show.

    frame: runs, with the columns of `comparison_rows`. rows: part of the frame by group. columns, further: see
    `columns_of`. means: see `seed_means`. guessing: see `chance`. is_large: a task has MANY datasets or more.
    """

    def __init__(self, frame: pd.DataFrame, damage: io.DamageLog, scale: str = "") -> None:
        self.scale, self.frame, self.columns = scale, frame, columns_of(frame)
        self.rows: dict[str, pd.DataFrame] = dict(list(frame.groupby("group", sort=False)))
        self.further = columns_of(frame, further=True)
        self.means = seed_means(frame, [*chain(*self.columns.values(), *self.further.values())])
        self.guessing = chance(frame, damage)
        self.is_large = any(len(parts) > MANY + 1 for parts in self.columns.values())


def comparison_rows(frame: pd.DataFrame, given: Mapping[Path, str] | None = None) -> pd.DataFrame:
    """Return the frame of any runs with the columns `label`, `note`, `paper` and `variant` of a comparison's rows.

    Runs that differ only in their seed are one row. given: labels by run directory; without them the labels are the
    parts in which the directories' names differ, and the notes are the settings that differ.
    """
    firsts = frame.drop_duplicates("group")
    folders = [run.resolve() for run in firsts["run"]]
    common_folder = Path(os.path.commonpath([folder.parent for folder in folders]))
    names = short_run_names([str(folder.relative_to(common_folder)) for folder in folders])
    seeds = frame.groupby("group", sort=False)["run"].nunique()
    differing = [] if given else differing_keys(firsts)
    facts = {}
    for name, (_, first) in zip(names, firsts.iterrows(), strict=True):
        group, plain = first["group"], flat(first["config"])
        label = (given or {}).get(first["run"], name)
        label += f" ({seeds[group]} seeds)" if seeds[group] > 1 else ""
        settings = {key: plain[key] for key in differing if plain.get(key) is not None}
        setting_texts = [f"{key.removesuffix('._target_')}={setting_text(value)}" for key, value in settings.items()]
        note = ", ".join(setting_texts[:MOST_NOTES]) + (", ..." if len(setting_texts) > MOST_NOTES else "")
        variant = "" if first["scale"] == PAPER else f"scale={first['scale']}"
        facts[group] = {"label": label, "note": "" if note in label else note, "variant": variant}
    columns = pd.DataFrame([facts[group] for group in frame["group"]], index=frame.index)
    return frame.assign(row="", paper="", **columns)


def differing_keys(firsts: pd.DataFrame) -> list[str]:
    """Return the configuration keys in which runs differ: classes first, the rest in configuration order."""
    configurations = [flat(config) for config in firsts["config"]]
    keys = sorted(dict.fromkeys(chain(*configurations)), key=lambda key: not key.endswith("_target_"))
    keys = [key for key in keys if len({json.dumps(plain.get(key), default=str) for plain in configurations}) > 1]
    return [key for key in keys if not is_within(key, IGNORED)]


def setting_text(value: object) -> str:
    """A value of a configuration; the name of a class without its module."""
    text = str(value)
    return text.rpartition(".")[2] if text.startswith("clipzoo.") else shortened(value)


def shortened(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def scale_rows(frame: pd.DataFrame, scale: str) -> pd.DataFrame:
    """Return the frame of the runs of papers' rows at one scale, with the columns of `comparison_rows`.

    A row is labelled by the shortest of its names that no other row has.
    """
    at_scale = frame[frame["scale"] == scale]
    row_matches = pd.concat([matches(at_scale, row) for row in published.row_names()] or [matches(at_scale, "")])
    groups = dict(list(row_matches.groupby(["row", "variant"], sort=False)["run"]))
    names = {}
    for row, variant in groups:
        settings = variant.removeprefix(f"scale={scale}").removeprefix(", ")
        model, added = ENCODER.sub("", row.split("/", 2)[2]), f" ({settings})" if settings else ""
        names[row, variant] = settings, [model, f"{model}{added}", f"{row}{added}"]
    counts = Counter(name for _, candidates in names.values() for name in dict.fromkeys(candidates))
    parts = []
    for (row, variant), runs in groups.items():
        settings, candidates = names[row, variant]
        label = next((name for name in candidates if counts[name] == 1), candidates[-1])
        facts = {"row": row, "paper": published.PAPERS[row.split("/")[0]], "label": label, "variant": variant}
        facts |= {"group": f"{row} {variant}", "note": "" if settings in label else settings}
        parts += [at_scale[at_scale["run"] == run].assign(**facts) for run in runs]
    return pd.concat(parts) if parts else at_scale.assign(label="", note="", paper="", variant="")


def matches(frame: pd.DataFrame, row: str) -> pd.DataFrame:
    """Match the runs that name a row, and runs of other rows whose configuration is the same.

    Returns one row per run: `run`; `row`; `is_row`, True if the run may represent the row, and False for a variant;
    `variant`, the settings that distinguish the run from its row; `explanation`, a longer list of them; `point`, the
    settings that the paper searched.
    """
    row_matches = []
    for _, first in frame.drop_duplicates("run").iterrows() if row in published.experiments() else ():
        run_row = first["row"]
        # Composing an experiment is slow: only rows of the same pretraining dataset can be equal.
        config, record, scale, pretrain = first["config"], first["record"], first["scale"], row.split("/")[1]
        if run_row != row and (run_row is None or scale != PAPER or run_row.split("/")[1:2] != [pretrain]):
            continue
        experiment, search, settings = published.experiments()[row].name, published.search_of(row), flat(config)
        search_axes = published.axes(search.name) if search else {}
        differences = published.differences(config, experiment, scale, record.protocol)
        # Settings at another point of the paper's search do not count as departures from the row.
        moved = {key: seen for key, (_, seen) in differences.items() if seen in search_axes.get(key, ())}
        departures = {key: pair for key, pair in differences.items() if key not in moved}
        trainer, steps = config["trainer"], record.training.get("steps")
        if scale == PAPER and steps is not None and trainer.get("epochs") is not None:
            low, high = published.layout()["pairs"][pretrain]
            pairs = round(float(steps) * trainer["global_batch"] / trainer["epochs"])
            if not low <= pairs <= high:
                departures["training pairs"] = (f"{low:,} to {high:,}", f"{pairs:,}")
        if not (is_row := scale == PAPER and not departures) and run_row != row:
            continue
        parts = [f"scale={scale}"] * (scale != PAPER) + [f"{key}={shortened(value)}" for key, value in moved.items()]
        texts = [f"{key} {shortened(seen)} for {shortened(expected)}" for key, (expected, seen) in departures.items()]
        variant, explanation = (
            ", ".join([*parts, *texts[:most], *([f"{len(texts) - most} more"] if len(texts) > most else [])])
            for most in (4, 12)
        )
        point = {key: settings.get(key) for key in search_axes}
        row_matches.append([first["run"], row, is_row, variant, explanation, point])
    return pd.DataFrame(row_matches, columns=["run", "row", "is_row", "variant", "explanation", "point"])


@dataclass(frozen=True)
class FilledTable:
    """A paper's table with runs next to its published numbers.

    runs: frame of the runs, with the columns `place`, the printed names of the row, and `variant`: None for runs that
        represent the row, else the settings that distinguish them from it. A group has one place and variant.
    means: `seed_means` of the runs. selected: by place, how the best point of a search was selected.
    """

    table: published.PaperTable
    runs: pd.DataFrame
    means: pd.DataFrame
    selected: Mapping[str, str]

    def ours(self, row: published.PaperRow) -> pd.DataFrame:
        """Frame of the runs that represent a row; empty without any."""
        return self.runs[(self.runs["place"] == row.place) & self.runs["variant"].isna()]

    def variants(self, row: published.PaperRow) -> dict[str, pd.DataFrame]:
        """Frames of the other runs of a row, by the settings that distinguish them from it."""
        others = self.runs[(self.runs["place"] == row.place) & self.runs["variant"].notna()]
        return dict(list(others.groupby("variant", sort=False)))

    def measured(
        self, row: published.PaperRow, column: published.PaperColumn, variant: str | None = None
    ) -> pd.Series | None:
        """Mean over seeds in a column; None without one, and for costs of a variant at another scale."""
        if variant is not None and column.is_cost and any(self.variants(row)[variant]["scale"] != PAPER):
            return None
        return cell(self.means, row.group(variant), column)

    @property
    def is_measured(self) -> bool:
        return any(
            self.measured(row, column, variant) is not None
            for row, column in product(self.table.rows, self.table.columns)
            for variant in (None, *self.variants(row))
        )

    def difference(self, row: published.PaperRow, column: published.PaperColumn) -> float | None:
        ours, printed = self.measured(row, column), self.table.numbers.get((row, column))
        return ours["mean"] - printed.value if ours is not None and printed else None

    def p_value(self, row: published.PaperRow, column: published.PaperColumn) -> float | None:
        """Rank-sum test of our runs of the row against those of its baseline.

        None for the baseline itself, or if a side has a single seed.
        """
        baseline = self.table.baseline(row)
        first, second = self.measured(baseline, column), self.measured(row, column)
        if baseline == row or first is None or second is None or min(len(first["values"]), len(second["values"])) < 2:
            return None
        return rank_sum(first["values"], second["values"])


def fill(table: published.PaperTable, frame: pd.DataFrame) -> FilledTable:
    """Put runs next to the published numbers of a table; after a search, those of the best point."""
    parts, selected = [frame.iloc[:0].assign(place="", variant=None)], {}
    for row in table.rows:
        candidates = matches(frame, row.name)
        is_row = candidates["is_row"].astype(bool)
        of_row, search = candidates[is_row], published.search_of(row.name)
        ours = list(of_row["run"])
        if search is not None and ours:
            names = {
                run: ", ".join(f"{key}={shortened(value)}" for key, value in point.items())
                for run, point in zip(ours, of_row["point"], strict=True)
            }
            runs = pd.concat([frame[frame["run"] == run].assign(group=name) for run, name in names.items()])
            scores = seed_means(runs, [search.select])["mean"].droplevel(["task", "column"])
            best, reason = None, f"no point of the search can be selected: {search.by} was not measured"
            if len(set(names.values())) == 1:
                best, reason = names[ours[0]], "the only point run"
            elif len(scores):
                best, reason = scores.idxmax(), f"the best of {number_of(len(scores), 'point')} by {search.by}"
            source = f"of {prod(map(len, published.axes(search.name).values()))} that the paper searched"
            if search.followed:
                source = f"the paper took the best point of {search.followed}"
            ours = [run for run, name in names.items() if name == best]
            selected[row.place] = reason if best is None else f"{best}: {reason}; {source}"
        for variant, runs in [(None, ours), *candidates[~is_row].groupby("variant", sort=False)["run"]]:
            facts = {"place": row.place, "variant": variant, "group": row.group(variant)}
            parts += [frame[frame["run"] == run].assign(**facts) for run in runs]
    filled = pd.concat([part for part in parts if len(part)] or parts)
    return FilledTable(table, filled, seed_means(filled, table.columns), selected)
