"""Sections of the pages: results of a run, comparisons of runs, tables of papers, sweeps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from clipzoo.config.groups import CONF
from clipzoo.io import MB, DamageLog, read_json, require_fields
from clipzoo.report import frame as frames, published
from clipzoo.report.figures import Arrays, comparison_figures, disagreement_figure
from clipzoo.report.published import Metrics, PaperColumn, PaperNumber
from clipzoo.report.render import Cell, Heading, Picture, Row, Section, Table, capitalised, text_table, turned
from clipzoo.report.statistics import SIGNIFICANT, Difference, differences_of, disagreements
from clipzoo.runs.identity import flat
from clipzoo.runs.record import AVERAGE, DEVIATION, PAIRED, VALIDATION, WALL_PHASES, MetricKey, TrainingLog

SMALL = (
    "Rows of the papers' tables, trained at a small scale: each has its paper's head and objective, and all share one "
    "recipe, except for the settings named with a row. The numbers compare methods on this data and at this budget; "
    "they say nothing about the numbers that the papers print."
)
COMPARISON_LEAD = (
    "Runs that differ only in their seed are one line. A difference between two lines is "
    "due to all the settings that differ, and to chance: compare several seeds before you believe a small one."
)
SELECTED = (
    "The trials of a search are not tested against each other: the best of many runs owes a part of its result to "
    "chance. To compare it with other settings, train both with several new seeds (-m seed=1,2,3)."
)
SEPARATION = (
    "Intervals hold the true difference with 95 % probability. With two seeds or more on both sides they are Welch's "
    "over seeds; otherwise they are bootstrapped over the samples that both runs answered (captions of one picture "
    "together), and say nothing about other seeds. p is Welch's, McNemar's or, for captions, a permutation test's, "
    "adjusted by Holm's method for all lines of the table. Detectable: by as many seeds, with 80 % probability, at 5 % "
    "divided by the number of lines, the level at which Holm's method tests the smallest p."
)
CSV_COLUMNS = (
    *("table", "pretrain_data", "model", "row", "experiment", "task", "column", "published", "published_std", "state"),
    *("ours", "ours_std", "runs", "difference", "p_value"),
)
SPIKE_VALUES = "loss", "largest_loss", "gradient_norm", "largest_gradient_norm"
SPIKE_OUTCOMES = {"report": "trained on", "stop": "ended the run", "skip": "left out", "rewind": "left out, rewound"}
MOST_CONFUSIONS = 8
MOST_DISAGREEMENTS = 24


def scale_sections(compared: frames.Comparison, logs: Mapping[Path, TrainingLog], lead: bool) -> list[Section]:
    """Runs of papers' rows at a small scale. lead: explain small scales, where the page's lead does not."""
    scale, tables = compared.scale, task_tables(compared)
    about = yaml.safe_load((CONF / "scale" / f"{scale}.yaml").read_text())["about"]["title"]
    titled = [replace(part, title=f"{part.title}, scale={scale}") for part in tables[:-1]]
    heading = Section(f"At scale={scale}", [SMALL, about] if lead else [about], anchor=f"scale-{scale}")
    results = _comparison_results(compared, tables, (), list(comparison_figures(compared, logs)))
    return [heading, *results, Section(tables=titled, formats=["tex"])]


def comparison_sections(
    compared: frames.Comparison, logs: Mapping[Path, TrainingLog], damage: DamageLog, lead: bool, tested: bool
) -> list[Section]:
    """Compare any runs. lead: explain the comparison, where the page's lead does not. tested: test the differences."""
    tables, text, further_tables = task_tables(compared), [COMPARISON_LEAD] if lead else [], []
    figures = list(comparison_figures(compared, logs))
    if not tested:
        text.append(SELECTED)
    elif len(compared.rows) > 1:
        if differences := differences_of(compared, damage):
            text.append(SEPARATION)
            further_tables.append(separation_table(differences, compared.frame["label"].iloc[0]))
        if (settings := settings_table(compared.frame)).rows:
            further_tables.append(settings)
        if pairs := list(disagreements(compared.frame, damage)):
            # Samples that one run, both or neither classify correctly, and the p-value of the difference.
            rows = []
            for pair in pairs:
                one, two = pair.right
                counts = [f"{part.sum():,}" for part in (one & two, one & ~two, two & ~one, ~(one | two))]
                rows.append([pair.title, *pair.runs, *counts, f"{pair.p_value:.2g}"])
            heads = ["dataset", "first run", "second run", "both right", "only first", "only second", "both wrong", "p"]
            title = "Samples that one run classifies correctly and the other does not"
            further_tables.append(text_table(heads, rows, left=3, title=title, wrap=True))
        for pair in sorted(pairs, key=lambda pair: pair.p_value)[:MOST_DISAGREEMENTS]:
            if (figure := disagreement_figure(pair)) is not None:
                heading = f"{pair.title}: one run right, the other wrong"
                figures.append(Picture("samples and wrong predictions", figure, heading))
    return [
        Section("Runs compared", text, anchor="own-runs"),
        *_comparison_results(compared, tables, further_tables, figures),
        Section(tables=tables[:-1], formats=["tex"]),
    ]


def _comparison_results(
    compared: frames.Comparison, tables: Sequence[Table], further_tables: Sequence[Table], figures: Sequence[Picture]
) -> list[Section]:
    """The tables of a comparison by task in Markdown; in HTML all in one, with probes and other tasks folded below.

    If a task has many datasets, HTML has the means over datasets, the figures, and folded tables.
    """
    columns, further = compared.columns, turned_tables(compared, compared.further)
    if compared.is_large:
        ranked = {task: parts[:1] for task, parts in (columns | compared.further).items() if parts[0].keys[0].is_ranked}
        means = turned(comparison_table(compared, ranked, title="Means over datasets"))
        folded = [*tables[:-1], *further, *further_tables, tables[-1]]
        return [Section(tables=[means], figures=figures), *map(_folded, folded), Section(tables=folded, formats=["md"])]
    probes = {task: parts for task, parts in columns.items() if task.startswith("linear probe")}
    columns = {task: parts[:1] if task in probes else parts for task, parts in columns.items()}
    has_details = any(len(parts) > 1 for parts in probes.values())
    folded = [comparison_table(compared, probes, title="Linear probes by dataset")] * has_details + further
    return [
        Section(tables=[*tables, *further], formats=["md"]),
        Section(tables=[comparison_table(compared, columns, frames.COSTS)], formats=["html"]),
        *map(_folded, folded),
        Section(tables=further_tables, figures=figures),
    ]


def _folded(table: Table) -> Section:
    return Section(tables=[replace(table, title="")], fold=capitalised(table.title), formats=["html"])


def task_tables(compared: frames.Comparison) -> list[Table]:
    """A table per task and one of costs, titled."""
    if compared.is_large:
        tables = turned_tables(compared, compared.columns)
    else:
        tasks = compared.columns.items()
        tables = [comparison_table(compared, {task: parts}, (), f"{task}, %") for task, parts in tasks]
    return [*tables, comparison_table(compared, {}, frames.COSTS, "Training")]


def turned_tables(compared: frames.Comparison, columns: Mapping[str, Sequence[PaperColumn]]) -> list[Table]:
    """A titled table per task of `MetricKey`, with a row per dataset, protocol and metric."""
    by_task: dict[str, dict[str, Sequence[PaperColumn]]] = {}
    for task, parts in columns.items():
        by_task.setdefault(parts[0].keys[0].task, {})[task] = parts
    return [turned(comparison_table(compared, tasks, title=frames.task_title(name))) for name, tasks in by_task.items()]


def comparison_table(
    compared: frames.Comparison,
    tasks: Mapping[str, Sequence[PaperColumn]],
    costs: Collection[str] = (),
    title: str = "",
) -> Table:
    """Means over seeds in the columns of some tasks, and costs; the best mean of a column is marked."""
    columns, of_papers = list(chain(*tasks.values())), any(compared.frame["paper"] != "")
    names = ("model", "paper") if of_papers else ("run",)
    headings = [Heading(name, "left", wrap=not of_papers) for name in names]
    headings += [Heading(column.text, group=task) for task, parts in tasks.items() for column in parts]
    headings += [Heading(cost, group="training") for cost in costs]
    by_column = compared.means["mean"].groupby(["task", "column"], sort=False)
    lowest, highest = (part[by_column.size() > 1] for part in (by_column.min(), by_column.max()))
    rows = []
    for group, runs in compared.rows.items():
        first = runs.iloc[0]
        cells = [Cell(first["label"], note=first["note"]), *([Cell(first["paper"])] if of_papers else [])]
        for column in columns:
            ours, key = frames.cell(compared.means, group, column), column.keys[0]
            best = (lowest if key.lower_is_better else highest).get((column.heading, column.label))
            is_best = key.is_ranked and ours is not None and bool(ours["mean"] == best)
            marks = ["mean"] * (len(column.groups) > 1) + ["best"] * is_best
            cells.append(Cell(frames.mean_text(ours, key.decimals), mark=" ".join(marks)))
        for cost in costs:
            value = frames.cost_of(runs, cost)
            cells.append(Cell("" if value is None else format(value, ",.3g" if value < 100 else ",.0f")))
        rows.append(Row(tuple(cells)))
    guessing = [column.value(compared.guessing) for column in columns]
    if any(guessing):
        texts = ["" if value is None else f"{value:.1f}" for value in guessing]
        row = ["chance", *[""] * of_papers, *texts, *("" for _ in costs)]
        rows.append(Row(tuple(map(Cell, row)), kind="published"))
    return Table(tuple(headings), tuple(rows), title)


def comparison_lines(compared: frames.Comparison) -> Iterator[dict[str, Any]]:
    """Lines of the CSV, each row a variant in the table "scale=<name>" or "runs"."""
    for group, runs in compared.rows.items():
        first = runs.iloc[0]
        line = {"table": "runs", "model": first["label"], "state": f"variant: {first['variant']}"}
        if row := first["row"]:
            _, pretrain, model = row.split("/", 2)
            line |= {"table": f"scale={compared.scale}", "pretrain_data": pretrain, "model": model, "row": row}
            line["experiment"] = published.experiments()[row].name
        for column in chain(*compared.columns.values()):
            if (ours := frames.cell(compared.means, group, column)) is not None:
                yield {**line, "task": column.heading, "column": column.label, **_csv_numbers(ours)}


def _csv_numbers(ours: pd.Series) -> dict[str, Any]:
    return {"ours": ours["mean"], "ours_std": ours["deviation"], "runs": len(ours["values"])}


def separation_table(differences: Sequence[Difference], baseline: str) -> Table:
    labels = ["metric", "run", "difference", "95 % interval", "p (Holm)", "separated", "over", "detectable"]
    rows: list[list[str | Cell]] = [
        [
            item.metric, item.label, f"{item.interval.estimate:+.1f}",
            f"{item.interval.low:+.1f} to {item.interval.high:+.1f}", f"{item.p:.2g}",
            Cell("yes" if item.is_separated else "no", bold=item.is_separated), item.basis,
            "" if item.detectable is None else f"{item.detectable:.1f}",
        ]
        for item in differences
    ]  # fmt: skip
    return text_table(labels, rows, left=2, title=f"Differences from {baseline}, in percent points", wrap=True)


def settings_table(frame: pd.DataFrame) -> Table:
    """Configuration keys whose values differ, a column per row of the comparison; absent keys are empty."""
    firsts = frame.drop_duplicates("group")
    configurations = [flat(config) for config in firsts["config"]]
    headings = (Heading("key", "left"), *(Heading(label, "left", wrap=True) for label in firsts["label"]))
    rows = []
    for key in frames.differing_keys(firsts):
        values = [Cell(frames.setting_text(plain[key]) if key in plain else "") for plain in configurations]
        rows.append(Row((Cell(key.removesuffix("._target_"), code=True), *values)))
    return Table(headings, tuple(rows), "Settings that differ", wrap=True)


def table_sections(filled: frames.FilledTable) -> list[Section]:
    """A paper's table, one for each task if it has over nine columns, and its rows without runs."""
    table, columns = filled.table, filled.table.columns
    tasks = dict.fromkeys(column.heading for column in columns)
    tables = [_paper_table(filled, columns)]
    if len(tasks) > 1 and len(columns) > 9:
        tables = [_paper_table(filled, [part for part in columns if part.heading == task], task) for task in tasks]
    titles = [table.heading + (f" ({part.title})" if part.title else "") for part in tables]
    titled = [replace(part, title=title, rotate=True) for part, title in zip(tables, titles, strict=True)]
    anchor = table.name.replace("/", "-")
    sections = [
        Section(table.heading, (), tables, notes=remarks(filled), anchor=anchor, short_title=table.short_heading),
        Section(tables=titled, formats=["tex"]),
    ]
    # Rows without runs, with command and cost, and rows whose runs have no value in any column.
    missing: list[list[str | Cell]] = []
    for row in table.rows:
        ours, experiment = filled.ours(row), published.experiments().get(row.name)
        if ours.empty:
            reason = published.layout()["without_experiment"].get(row.name) or "no experiment"
            command, cost = (experiment.command, experiment.cost) if experiment else ("", reason)
            missing.append([row.pretrain, row.model, Cell(command, code=True), cost])
        elif all(filled.measured(row, column) is None for column in table.columns):
            command = f"clipzoo evaluate run={ours['run'].iloc[0]} eval={table.paper}"
            missing.append([row.pretrain, row.model, Cell(command, code=True), "evaluation of a trained run"])
    if missing:
        listed = text_table(["after", "model", "command", "estimated cost"], missing, left=4, wrap=True)
        fold = f"Missing: {len(missing)} of {len(table.rows)} rows"
        sections.append(Section(text=["Missing:"], tables=[listed], fold=fold))
    return sections


def _paper_table(filled: frames.FilledTable, columns: Sequence[PaperColumn], title: str = "") -> Table:
    """Published numbers, ours, their difference and variants. title: task of all columns; empty: columns name it."""
    table, rows = filled.table, []
    several = len({column.heading for column in columns}) > 1
    labels = [f"{column.heading}: {column.label}" if several else column.label for column in columns]
    digits = [table.digits(column) for column in columns]

    def add(kind: str, name: str, numbers: Iterable[Cell], pretrain: str = "", model: str = "") -> None:
        names = Cell(pretrain), Cell(model), Cell(name, mark="wrap what")
        rows.append(Row((*names, *numbers), kind, starts=bool(model)))

    for row in table.rows:
        printed = [table.numbers.get((row, column)) for column in columns]
        texts = ["" if number is None else number.text(".2f") for number in printed]
        add("published", "published", map(Cell, texts), row.pretrain, row.model)
        for variant, runs in [(None, filled.ours(row)), *filled.variants(row).items()]:
            ours = [filled.measured(row, column, variant) for column in columns]
            if all(measured is None for measured in ours):
                continue
            seed_numbers = sorted(set(runs["seed"]))
            seeds = f"{len(seed_numbers)} seeds" if len(seed_numbers) > 1 else f"seed {seed_numbers[0]}"
            texts = [frames.mean_text(measured, count) for measured, count in zip(ours, digits, strict=True)]
            if variant is not None:
                add("variant", f"variant: {variant}, {seeds}", map(Cell, texts))
                continue
            p_values = [filled.p_value(row, column) for column in columns]
            stars = ["*" if p_value is not None and p_value < SIGNIFICANT else "" for p_value in p_values]
            add("ours", f"ours, {seeds}", [Cell(text + star) for text, star in zip(texts, stars, strict=True)])
            changes = []
            for column, count in zip(columns, digits, strict=True):
                if (change := filled.difference(row, column)) is None:
                    changes.append(Cell(""))
                elif rounded := round(change, count):
                    changes.append(Cell(f"{change:+.{count}f}", mark="up" if rounded > 0 else "down"))
                else:  # zero has no sign
                    changes.append(Cell(f"{0:.{count}f}"))
            if any(change.text for change in changes):
                add("difference", "difference", changes)
    headings = [Heading(label, "left") for label in ("after", "model", "")]
    return Table((*headings, *(Heading(label, wrap=True) for label in labels)), tuple(rows), title)


def remarks(filled: frames.FilledTable) -> list[str]:
    """Sentences below a paper's table."""
    table, lines = filled.table, []
    if table.note:
        lines.append(table.note)
    if table.without_numbers:
        lines.append(f"No published numbers: {table.without_numbers}.")
    for column in table.columns:
        # Means over several datasets are skipped: the columns of their datasets give the reason.
        is_single = len({(key.task, key.dataset) for key in column.keys}) == 1
        if is_single and (reason := published.not_measured(column.keys[0])):
            lines.append(f"{column.label}, {column.heading}: not measured; {reason}.")
    tests = []
    for row in table.rows:
        name = f"{row.pretrain}, {row.model}"
        if row.place in filled.selected:
            lines.append(f"{name}: {filled.selected[row.place]}.")
        for run_row in filled.ours(row)["row"].unique():
            if run_row != row.name:
                lines.append(f"{name}: includes runs of {run_row}, whose configuration is the same.")
        for column in table.columns:
            if (p_value := filled.p_value(row, column)) is not None:
                tests.append(f"{row.model}, {column.label}: p = {p_value:.3f}")
    if tests:
        lines.append(
            "* differs at 5 % from the baseline of its pretraining dataset (two-sided unpaired Wilcoxon test over "
            f"seeds): {'; '.join(tests)}"
        )
    return lines


def table_lines(filled: frames.FilledTable) -> Iterator[dict[str, Any]]:
    """Lines of the CSV: one per cell of a row, with runs (state "row") or without ("missing"), and one per variant."""
    for row in filled.table.rows:
        experiment = published.experiments().get(row.name)
        for column in filled.table.columns:
            number = filled.table.numbers.get((row, column))
            line = {
                "table": filled.table.name, "pretrain_data": row.pretrain, "model": row.model, "row": row.name,
                "experiment": experiment and experiment.name, "task": column.heading, "column": column.label,
                "published": number and number.printed, "published_std": number and number.deviation,
            }  # fmt: skip
            for variant in (None, *filled.variants(row)):
                ours = filled.measured(row, column, variant)
                if ours is not None and variant is None:
                    tested = {"difference": filled.difference(row, column), "p_value": filled.p_value(row, column)}
                    yield {**line, "state": "row", **_csv_numbers(ours), **tested}
                elif ours is not None:
                    yield {**line, "state": f"variant: {variant}", **_csv_numbers(ours)}
                elif number and variant is None:
                    yield {**line, "state": "missing"}


def result_tables(metrics: Metrics) -> list[Table]:
    """A table per task of a run's metrics, a row per dataset, in the order of the evaluation; without empty tables.

    A task with many columns, or of mteb, has a row per dataset and protocol.
    """
    tables = []
    for task in dict.fromkeys(key.task for key in metrics if key.dataset and key.task not in (VALIDATION, AVERAGE)):
        keys = [key for key in metrics if key.task == task and not key.metric.endswith(DEVIATION)]
        ways = {key: key.protocol.removeprefix("paired_") for key in keys}
        is_long = task == "mteb" or len({(way, key.metric) for key, way in ways.items()}) > frames.MANY
        cells: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
        for key, way in ways.items():
            side, column = (way, ("", key.metric)) if is_long else ("", (way, key.metric))
            cells.setdefault((key.dataset + PAIRED * key.paired, side), {})[column] = _measurement(metrics, key)
        columns = sorted(dict.fromkeys(chain(*cells.values())), key=lambda column: column[1] not in frames.ACCURACIES)
        labels = [", ".join(frames.title_of(part) for part in (name, way) if part) for way, name in columns]
        rows = [
            [dataset, *[frames.title_of(side)] * is_long, *(row.get(column, "") for column in columns)]
            for (dataset, side), row in cells.items()
        ]
        heads = ["dataset", *[""] * is_long, *labels]
        tables.append(text_table(heads, rows, left=1 + is_long, title=capitalised(frames.task_title(task))))
    return tables


def _measurement(metrics: Metrics, key: MetricKey) -> str:
    """A metric with its standard deviation, if there is one."""
    deviation, digits = metrics.get(key.deviation), key.decimals
    return f"{metrics[key]:.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation is not None else "")


def published_tables(metrics: Metrics, missing: Mapping[str, str], row: str | None) -> list[Table]:
    """A titled table per task: ours, the numbers that papers print for a row, the difference; tasks with ours only.

    metrics: in percent. missing: reasons why datasets were not evaluated, by name.
    """
    lines: dict[PaperColumn, tuple[PaperNumber, str]] = {}
    for name in published.table_names():
        for (paper_row, column), printed in published.table(name).numbers.items():
            if paper_row.name == row and not column.is_cost and column.groups:
                lines.setdefault(column, (printed, name))
    rows: dict[str, list[list[str]]] = {}
    for column, (number, source) in lines.items():
        ours, difference = "missing" if len(column.datasets) == 1 and column.datasets <= set(missing) else "", ""
        if (value := column.value(metrics)) is not None:
            ours = _measurement(metrics, column.keys[0]) if len(column.keys) == 1 else f"{value:.2f}"
            difference = f"{value - number.value:+.2f}"
        rows.setdefault(column.heading, []).append([column.label, ours, number.text("g"), difference, source])
    heads = ["dataset", "ours", "paper", "difference", "table"]
    measured = {heading: part for heading, part in rows.items() if any(ours for _, ours, *_ in part)}
    return [text_table(heads, part, left=1, title=capitalised(heading)) for heading, part in measured.items()]


def agreement_table(published: Mapping[str, Mapping[str, Any]]) -> Table:
    """Measured and published numbers, see `RunRecord.published`; the difference is bold if it exceeds the interval."""
    rows: list[list[str | Cell]] = []
    for name, part in published.items():
        difference = Cell(f"{part['difference']:+.2f}", bold=not part["low"] <= part["value"] <= part["high"])
        numbers = f"{part['value'] + part['difference']:.2f}", f"{part['value']:.2f}"
        rows.append([name, *numbers, difference, f"{part['low']:.2f} to {part['high']:.2f}"])
    return text_table(["metric", "measured", "published", "difference", "95 % interval"], rows, left=1)


def cost_table(cost: Mapping[str, float | str]) -> Table:
    """Costs of the training in a single row; unknown names are shown as they are."""
    forms = {
        "seconds": ("minutes", "{:.1f}", 60), "evaluation_seconds": ("minutes of evaluation", "{:.1f}", 60),
        "samples_per_second": ("samples/s", "{:,.0f}", 1), "data_wait": ("waiting for data", "{:.0%}", 1),
        **{part: (part, "{:.0%}", 1) for part in ("forward", "backward", "optimizer")},
        "flops_utilisation": ("model FLOPs utilization", "{:.1%}", 1), "flops": ("model FLOPs", "{:.3g}", 1),
        "peak_memory_mib": ("peak memory", "{:.2f} GiB", 1024), "goodput": ("goodput", "{:.1%}", 1),
        "energy_kwh": ("kWh", "{:,.3g}", 1), "price": ("price", "{:,.2f}", 1),
    }  # fmt: skip
    labels, row = [], []
    for name, value in cost.items():
        if name.endswith("_seconds") and name not in forms:
            continue  # in `phase_table`
        label, form, unit = forms.get(name, (name.replace("_", " "), "{:,}", None))
        labels.append(label)
        row.append(form.format(value if unit is None else value / unit) if isinstance(value, int | float) else value)
    return text_table(labels, [row] if row else [], left=1)


def phase_table(cost: Mapping[str, float | str]) -> Table:
    """Wall time of a run by phase, in seconds and as shares, with bars; empty for a run of an earlier version."""
    wall, rows = float(cost.get("wall_seconds", 0)), list[list[str]]()
    for name in WALL_PHASES if wall else ():
        if seconds := float(cost.get(f"{name}_seconds", 0)):
            rows.append([name, "#" * round(36 * seconds / wall), f"{seconds:,.1f}", f"{seconds / wall:.1%}"])
    return text_table(["phase", "of the wall time", "seconds", "share"], rows, left=2)


def spike_table(run: Path, damage: DamageLog) -> Table:
    """Steps whose loss or gradient norm stood out, with their limits and the file that lists their samples."""
    fields: dict[str, Any] = {"step": int, "policy": str, **dict.fromkeys(SPIKE_VALUES, (int, float))}
    rows: list[list[str | Cell]] = []

    def read(path: Path) -> None:
        if spike := read_json(path, MB):
            require_fields(path, spike, fields)
            outcome, file = SPIKE_OUTCOMES.get(spike["policy"], spike["policy"]), str(path.relative_to(run))
            numbers = (f"{spike[name]:.4g}" for name in SPIKE_VALUES)
            rows.append([str(spike["step"]), *numbers, outcome, Cell(file, code=True)])

    for path in sorted((run / "spikes").glob("step_*.json")):
        damage.read(partial(read, path), None)
    return text_table(["step", "loss", "limit", "gradient norm", "limit", "batch", "samples"], rows, left=0)


def confusions(arrays: Arrays) -> Table:
    """The pairs of classes that are confused most often."""
    counts, names = arrays["confusion"].copy(), arrays["class_names"]
    sizes = counts.sum(axis=1)
    np.fill_diagonal(counts, 0)
    order = np.argsort(-counts, axis=None, kind="stable")[:MOST_CONFUSIONS]
    rows = [
        [str(names[true]), str(names[chosen]), f"{count} of {int(sizes[true])}"]
        for true, chosen in zip(*np.unravel_index(order, counts.shape), strict=True)
        if (count := int(counts[true, chosen]))
    ]
    return text_table(["class", "predicted as", "images"], rows, left=1)
