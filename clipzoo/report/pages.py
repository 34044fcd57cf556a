"""Pages of one run, its profile, many runs with the papers' tables, a sweep, a search, and the explorer."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from clipzoo import io
from clipzoo.data.captions import CaptionCounts, described
from clipzoo.errors import ConfigError, number_of
from clipzoo.io.text import save_figure, shorten
from clipzoo.report import figures, frame as frames, render, scaling as laws, sections as parts
from clipzoo.report.published import Metrics, experiments, layout, table, table_names
from clipzoo.report.render import Cell, Picture, Section, Span, Table, Text, capitalised, text_table, write
from clipzoo.report.statistics import over_answers
from clipzoo.report.trials import Trials, trial_sections, trial_table
from clipzoo.runs.directory import CAPTIONS, config_of, departs, is_finished
from clipzoo.runs.record import (
    ENDED_EARLY,
    VALIDATION_LOSS,
    MetricKey,
    RunRecord,
    TrainingLog,
    parsed,
    revision,
    split,
    stored_arrays,
)
from clipzoo.runs.search import LOSS, Search, Space, State, Trial
from clipzoo.runs.sweep import Point, points, sweep_name

ZERO_SHOT = ("confusion", "class_names", "images", "labels", "predictions")
RETRIEVAL = ("captions", "place", "found", "owner", "images", "gallery")
EMBEDDING = ("map", "spectrum_image", "spectrum_text", "occurrences_image_to_text", "occurrences_text_to_image")
"""Arrays that the evaluation writes and the page shows, for each task."""
EMBEDDING_TEXT = (
    "A flat spectrum uses all dimensions; two clouds in the map are a gap between the modalities; a vector near to "
    "very many queries is a hub."
)
MOST_IN_MATRIX = 100
"""Largest number of classes whose confusion matrix can still be read as a picture."""
MOST_RESULTS = 10
"""Largest number of metrics on the card of a run."""
PROFILE, TRACE, SNAPSHOT = "profile", "trace.json.gz", "memory_snapshot.pickle"
PROFILE_FIGURE = "time of each part of a step and allocated memory"
PROFILE_TEXT = (
    'A part does not include its subparts: "communication" is taken out of the part that waits for it, but the '
    'exchange of gradients that runs during the backward pass is in "backward". Scores that the objective asks for '
    'are in "objective", encoding again for the backward pass of a micro-batch in the towers. "other" is what a '
    "step does beside its parts, such as logging."
)
LEAD = (
    "Our runs with the numbers that the papers print. A run represents a row only if its configuration is that of "
    "the row's experiment, apart from seeds and paths; any other run is shown as a variant, with its differences."
)


def write_report(run: Path, record: RunRecord | None = None) -> Path:
    """Write the page of a run: report.md with its figures in report/, and report.html with the figures in it.

    Returns the path of report.md. The page is made from config.yaml, metrics.jsonl, results.json and evaluation/; parts
    without content are left out, and damaged files are named.

    record: results that are not written yet; None reads results.json.
    """
    io.require_no_links(run)
    damage = io.DamageLog()
    if record is None and is_finished(run):
        record = damage.read(partial(RunRecord.read, run), None)
    log = damage.read(partial(TrainingLog.read, run), TrainingLog())
    config: dict[str, Any] = damage.read(partial(config_of, run), {}) if (run / "config.yaml").exists() else {}
    missing = {name: str(reason) for name, reason in _json(run / "evaluation" / "missing.json", damage).items()}
    # An unfinished run has the metrics of its newest evaluation.
    metrics = record.metrics if record else {}
    if not metrics:
        newest = _json(run / "evaluation" / "metrics.json", damage) or (log.evaluations[-1] if log.evaluations else {})
        metrics = parsed({name: value for name, value in newest.items() if isinstance(value, int | float)})
    is_recorded, record = record is not None, record or RunRecord(seed=config.get("seed"))
    content = [Section(facts=_facts(run, config, record, metrics, damage))]

    # Results.
    if published := parts.published_tables(metrics, missing, record.row):
        content.append(Section(f"Compared with {record.row}, %", tables=published))
    for metric_values, heading in ((metrics, "{}"), (split(metrics)[1], "Averaged weights: {}")):
        for result_table in parts.result_tables(metric_values):
            title = result_table.title if metric_values is metrics else result_table.title.lower()
            content.append(Section(heading.format(title), tables=[replace(result_table, title="")]))
    if record.not_converged:
        names = [part for name in record.not_converged for part in (", ", Span(name, "code"))][1:]
        start = "The final fit of these linear probes did not converge, so their accuracies are approximate: "
        content.append(Section(text=[(start, *names, ".")]))
    if record.published:
        source = "; ".join(dict.fromkeys(str(number["source"]) for number in record.published.values()))
        agreement, note = parts.agreement_table(record.published), f"Published by {source}."
        content.append(Section("Published numbers, %", tables=[agreement], notes=[note]))
    if missing:
        items: list[Text] = [(Span(name, "strong"), ": ", Span(reason, "code")) for name, reason in missing.items()]
        content.append(Section("Missing datasets", items=items))

    # Training.
    if log.training:
        cost = {name: value for name, value in record.training.items() if name != ENDED_EARLY}
        unit, value_log = (figures.objective_constant(config, name) for name in ("loss_unit", "value_log"))
        figure = figures.training_figure(log.training, unit, log.evaluations, value_log or "loss")
        costs = [table for table in (parts.cost_table(cost), parts.phase_table(cost)) if table.rows]
        content.append(Section("Training", tables=costs, figures=[_picture("training curves", "training", figure)]))
    content += damage.read(partial(_profile_sections, run), list[Section]())
    if (spikes := parts.spike_table(run, damage)).rows:
        content.append(Section("Spikes", tables=[spikes], level=3))
    if len(log.evaluations) > 1 and figures.evaluation_curves(log.evaluations):
        figure = figures.evaluation_figure(log.evaluations)
        content.append(Section(figures=[_picture("evaluations during training", "evaluations", figure)]))

    content += _outcome_sections(run, metrics, damage)
    if is_recorded:
        facts: list[str | Span] = ["Revision ", Span(record.revision, "code"), "; "] if record.revision else []
        versions = ", ".join(f"{name} {number}" for name, number in record.versions.items() if number)
        command = [Span(record.command, "command")] if record.overrides else []
        content.append(Section("Provenance", [*command, (*facts, f"{versions}.")]))
    if damage.faults:
        text = "These files could not be read. What they hold is missing on this page."
        faults = [f"{fault.path.relative_to(run)} {fault.fault}" for fault in damage.faults]
        content.insert(1, Section("Damaged files", [text], items=faults))
    return write(run.name, [run / "report.md", run / "report.html"], content)


def write_card(run: Path, record: RunRecord) -> str:
    """Write card.txt of an ended run, one screen of plain text, and return it. record: not written yet."""
    damage, cost, config = io.DamageLog(), record.training, config_of(run)
    facts = _facts(run, config, record, {}, damage)
    data = config["data"]
    facts["Data"] = str(data.get("shards") or data.get("path") or data["_target_"])
    facts["Samples"] = f"{int(cost['steps']) * config['trainer']['global_batch']:,} seen in {cost['steps']} steps"
    facts["Speed"] = f"{cost['samples_per_second']:,.0f} samples/s, {cost['ranks']} x {cost['device']}"
    stops = f"{number_of(int(cost['restarts']), 'restart')}, {number_of(int(cost['lost_steps']), 'lost step')}"
    facts["Goodput"] = f"{cost['goodput']:.1%} of {cost['wall_seconds']:,.1f} s; {stops}"
    facts |= {"Energy": f"{cost['energy_kwh']:,.3g} kWh"} if "energy_kwh" in cost else {}
    facts |= {"Price": f"{cost['price']:,.2f}"} if "price" in cost else {}
    rows = [
        [name, shorten(text.text if isinstance(text, Span) else str(text), 58, " ...")] for name, text in facts.items()
    ]
    results = []
    for key, value in list(record.metrics.items())[:MOST_RESULTS]:
        interval = damage.read(partial(over_answers, key, run / "evaluation"), None)
        ends = "" if interval is None else f"[{interval.low:.{key.decimals}f}, {interval.high:.{key.decimals}f}]"
        results.append([str(key), f"{value:.{key.decimals}f}", ends])
    if (more := len(record.metrics) - MOST_RESULTS) > 0:
        results.append([f"and {more} more in report.md", "", ""])
    name = shlex.quote(str(run))
    commands = [f"evaluate run={name} eval=datacomp", f"report {name}", f"explore {name} --images FOLDER",
                f"export {name} --to hub --output FOLDER"]  # fmt: skip
    tables = [text_table(["", ""], rows, left=2), parts.phase_table(cost),
              text_table(["result", "", "95 % interval"], results, left=1)]  # fmt: skip
    lines = [f"{run} is finished after {cost['steps']} steps; pass name=NEW to train again."]
    lines += [f"{render.terminal(table)}\n" for table in tables if table.rows]
    lines += [f"report: {run / 'report.md'}", *(f"next: clipzoo {command}" for command in commands)]
    io.write_whole(run / "card.txt", "\n".join([*lines, ""]))
    return "\n".join(lines)


def _facts(
    run: Path, config: Mapping[str, Any], record: RunRecord, metrics: Metrics, damage: io.DamageLog
) -> dict[str, Text]:
    """Name and value of the facts at the top, without those that are unknown."""
    components = {name: config[name] for name in ("encoder", "head", "objective") if name in config}
    towers = {name: config.get("encoder", {}).get(name) for name in ("image_tower", "text_tower")}
    classes = {
        name: part["_target_"].rsplit(".", 1)[-1]
        for name, part in {**components, **towers}.items()
        if isinstance(part, dict) and "_target_" in part
    }
    if towers.keys() <= classes.keys():
        classes["encoder"] = f"{classes['image_tower']}, {classes['text_tower']}"
    trainer = config.get("trainer", {})
    facts = {
        "Experiment": None if departs(record.overrides) else record.experiment,
        "Paper row": record.row,
        **{name.capitalize(): Span(classes[name], "code") for name in components if name in classes},
        "Global batch size": trainer.get("global_batch"),
        "Epochs": trainer.get("epochs"),
        "Ended early": record.training.get(ENDED_EARLY),
        "Precision": trainer.get("precision"),
        "Evaluated in": ", ".join(f"{part} {kind}" for part, kind in record.precision.items()) or None,
        "Seed": record.seed,
    }

    if (run / CAPTIONS).exists():
        fields = dict.fromkeys(CaptionCounts().figures(0), (int, float))
        facts["Captions"] = damage.read(lambda: described(io.read_json(run / CAPTIONS, io.MB, fields=fields)), None)
    if VALIDATION_LOSS in metrics:
        facts["Validation loss"] = f"{metrics[VALIDATION_LOSS]:.4f}"
    if (average := metrics.get(MetricKey("datacomp", "", "", "average"))) is not None:
        count = metrics.get(MetricKey("datacomp", "", "", "datasets"), 0.0)
        facts["DataComp average"] = f"{average:.2f} % over {number_of(int(count), 'dataset')}"
    return {name: value for name, value in facts.items() if value is not None}


def _outcome_sections(run: Path, metrics: Metrics, damage: io.DamageLog) -> Iterator[Section]:
    """Errors and retrieved images on each dataset, then per-sample statistics with their extreme samples."""
    for number, (name, content) in enumerate(stored_arrays(run, "zero_shot", ZERO_SHOT, damage)):
        if number == 0:
            yield Section("Zero-shot errors")
        top1 = metrics.get(MetricKey("zero_shot", name, "", "top1"))
        text: list[Text] = [] if top1 is None else [("Top-1: ", Span(f"{top1:.1f} %", "strong"))]
        confusions, matrix = parts.confusions(content), list[Picture]()
        if len(content["class_names"]) <= MOST_IN_MATRIX:
            figure = figures.confusion_matrix(content)
            matrix = [_picture(f"confusion matrix of {name}", f"confusion_{name}", figure)]
        yield Section(name, text, [confusions] if confusions.rows else [], matrix, level=3)
        if len(content["images"]):
            lead = "The most confident errors, with the predicted class in red and the true class in green:"
            figure = figures.mistakes(content)
            yield Section(text=[lead], figures=[_picture(f"errors on {name}", f"mistakes_{name}", figure)])
    for name, content in stored_arrays(run, "retrieval", RETRIEVAL, damage):
        recall = metrics.get(MetricKey("retrieval", name, "text_to_image", "recall_at_1"))
        text = [] if recall is None else [("Text to image, recall@1: ", Span(f"{recall:.1f} %", "strong"))]
        text.append(
            f"Images retrieved by a few captions among {int(content['gallery']):,}, best first; the caption's own "
            "image is framed."
        )
        figure = figures.retrieved(content)
        yield Section(f"Retrieval: {name}", text, figures=[_picture("retrieved images", f"retrieval_{name}", figure)])
    for name, content in stored_arrays(run, "diagnosis", EMBEDDING, damage):
        picture = _picture("spectra, map and hubs", f"diagnosis_{name}", figures.embedding_diagnosis(content))
        yield Section(f"Diagnosis of the embedding: {name}", [EMBEDDING_TEXT], figures=[picture])
    path, folder = run / "evaluation" / "samples.json", run / "evaluation" / "samples"
    summary: dict[str, Any] = damage.read(partial(figures.read_statistics, path), {}) if path.exists() else {}
    if summary:
        figure = figures.sample_histograms(summary)
        yield Section("Per-sample statistics", figures=[_picture("histograms", "samples", figure)])
    for name in summary if (folder / "captions.json").exists() else ():
        if (extremes := damage.read(partial(figures.extreme_samples, summary[name], folder), None)) is not None:
            lead = f"{capitalised(name.replace('_', ' '))}: samples with the highest and the lowest values."
            yield Section(text=[lead], figures=[_picture(name, f"samples_{name}", extremes)])


def _profile_sections(run: Path) -> list[Section]:
    """Write the pages of a run's profile, and return their section of the run's page; without a profile, none."""
    folder = run / PROFILE
    path = folder / "summary.json"
    if not path.exists():
        return []
    summary = io.read_json(path, io.MB, "profile the run again")
    fields = {"steps": list, "device": str, "ranks": int, "host_ms": dict, "device_ms": dict}
    io.require_fields(path, summary, {**fields, "operations": list, "memory": list})
    (first, last), host, device = summary["steps"], summary["host_ms"], summary["device_ms"]
    total, figure = sum(host.values()), figures.profile_figure(summary)
    times = [
        [part, f"{time:.2f}", f"{time / total:.1%}", *([f"{device.get(part, 0.0):.2f}"] if device else [])]
        for part, time in host.items()
    ]
    operations: list[list[str | Cell]] = [
        [Cell(part["name"], code=True), f"{part['calls']:.1f}", f"{part['ms']:.2f}"] for part in summary["operations"]
    ]
    snapshot: Text = "no memory snapshot: torch records one on a GPU only"
    if (folder / SNAPSHOT).exists():
        description = ": every allocation on the GPU with its Python stack, for https://pytorch.org/memory_viz"
        snapshot = (Span(SNAPSHOT, "link", SNAPSHOT), description)
    trace = ": the trace of torch.profiler, for https://ui.perfetto.dev or chrome://tracing"
    lead = (
        f"First of {summary['ranks']} {'rank' if summary['ranks'] == 1 else 'ranks'}, {summary['device']}: {total:.1f} "
        "ms a step while it was profiled, which is slower than without."
    )
    labels = ["part", "ms a step", "share", *(["GPU ms a step"] if device else [])]
    heads = ["operation", "calls a step", f"{'GPU ' if device else ''}ms a step"]
    content = [
        Section(text=[lead], figures=[Picture(PROFILE_FIGURE, figure, file="profile.png")]),
        Section(tables=[text_table(labels, times, left=1)]),
        Section(text=[PROFILE_TEXT]),
        Section("Operations with the most time", tables=[text_table(heads, operations, left=1)]),
        Section("Files", items=[(Span(TRACE, "link", TRACE), trace), snapshot]),
    ]
    files = [folder / "profile.md", folder / "profile.html"]
    write(f"Profile of {run.name}, steps {first} to {last}", files, content)
    link = Span(f"Profile of steps {first} to {last}", "page", f"{PROFILE}/profile")
    picture = Picture(PROFILE_FIGURE, figure, file=f"{PROFILE}/profile.png")
    return [Section(text=[(link, f": {total:.1f} ms a step.")], figures=[picture])]


def _picture(text: str, name: str, figure: Figure) -> Picture:
    """A figure in the folder report; characters that file names should not have become "_"."""
    name = re.sub(r"[^\w.-]", "_", name)
    return Picture(text, figure, file=f"report/{name}.png")


def _json(path: Path, damage: io.DamageLog) -> dict[str, Any]:
    """Content of a JSON file; empty without one, or if it is damaged."""
    return damage.read(partial(io.read_json, path, io.MB), {}) if path.exists() else {}


def write_pages(
    folders: Sequence[Path],
    names: Sequence[str],
    output: Path,
    note: str | None = None,
    first: Sequence[Section] = (),
    scaling: Sequence[str] = (),
    labels: Mapping[Path, str] | None = None,
    tested: bool = True,
) -> Path:
    """Write index.html, tables.md, tables.csv and tables.tex for the runs below `folders`; return index.html.

    The runs of a single folder are in the papers' tables if they name a row. All others are compared with each other.

    folders: run directories, or folders of them. labels: names of runs by their directory.
    names: tables to show; empty for all tables with a measured value.
    note: additional paragraph at the top. first: sections before all others.
    scaling: axes of scaling fits, see `laws.curves`; each also has scaling_AXIS.png and scaling_AXIS.csv.
    tested: False for trials of a search, among which the best was selected: a test of their differences is biased.

    Raises ConfigError if there is nothing to show.
    """
    damage = io.DamageLog()
    frame = frames.read_frame(folders, damage)
    unfinished = [folder for folder in frames.run_folders(folders) if not is_finished(folder)]
    if frame.empty and not names:
        damaged = f" ({len(damage.faults)} with damaged files)" if damage.faults else ""
        raise ConfigError(
            f"no finished run in {', '.join(map(str, folders))}{damaged}: train one first, or give --table wpse/1 for "
            "an empty table"
        )
    of_papers = frame["row"].notna() & (frame["row"] != "") if len(folders) == 1 else frame["row"].isna() & False
    runs, other_runs = frame[of_papers], frame[~of_papers]
    default_names = [name for name in table_names() if not layout()["tables"][name].get("repeats")]
    filled = [frames.fill(table(name), runs) for name in names or default_names]
    filled = [part for part in filled if names or part.is_measured]
    other_scales = runs.loc[runs["scale"] != frames.PAPER, "scale"].unique()
    by_scale = {scale: frames.scale_rows(runs, scale) for scale in other_scales}
    scales = [frames.Comparison(rows, damage, scale) for scale, rows in by_scale.items() if len(rows)]
    logs = frames.read_logs(frame, damage)
    fits = {axis: laws.curves(laws.trainings(frame, logs), axis) for axis in scaling}
    content: list[Section] = []
    for axis, curves in fits.items():
        # The table and the figure are written to separate files too.
        fitted, title, figure = laws.table(curves), f"Scaling with {axis}", laws.figure(curves, axis)
        io.write_whole(io.below(output, f"scaling_{axis}.csv"), render.csv(fitted))
        save_figure(figure, io.below(output, f"scaling_{axis}.png"), dpi=figures.DPI)
        text = (
            f"{laws.lead(axis, curves)} The training loss is the mean of the losses logged in the last tenth "
            "of a training; it is that of new samples only if no sample is repeated. An error is 100 % less accuracy."
        )
        picture = Picture(f"runs and power laws in {axis}", figure)
        content.append(Section(title, [text], [fitted], [picture], anchor=f"scaling-{axis}"))
        content.append(Section(tables=[replace(fitted, title=title)], formats=["tex"]))
    content += [section for part in scales for section in parts.scale_sections(part, logs, bool(filled))]
    content += [section for part in filled for section in parts.table_sections(part)]
    compared = frames.Comparison(frames.comparison_rows(other_runs, labels), damage) if len(other_runs) else None
    if compared:
        content += parts.comparison_sections(compared, logs, damage, bool(scales or filled), tested)
    lines = [line for part in (*scales, compared) if part for line in parts.comparison_lines(part)]
    lines += [line for part in filled for line in parts.table_lines(part)]
    faults = {"unfinished": len(unfinished), "damaged files": len(damage.faults)}
    facts: dict[str, Text] = {"finished runs": str(frame["run"].nunique())}
    facts |= {name: str(count) for name, count in faults.items() if count}
    facts |= {f"rows at scale={part.scale}": str(part.frame["group"].nunique()) for part in scales}
    if filled:
        rows = [bool(len(part.ours(row))) for part in filled for row in part.table.rows]
        facts |= {"tables": str(len(filled)), "rows filled": f"{sum(rows)} of {len(rows)}"}
    # Commands and costs of the rows that have runs only at another scale.
    at_full_size = set(runs.loc[runs["scale"] == frames.PAPER, "row"])
    full_size: list[list[str | Cell]] = []
    for row in runs["row"].unique():
        if row not in at_full_size and (experiment := experiments().get(row)) is not None:
            tables = ", ".join(name for name in table_names() if any(other.name == row for other in table(name).rows))
            full_size.append([row, tables, Cell(experiment.command, code=True), experiment.cost])
    full_size_table = text_table(["row", "tables", "command", "estimated cost"], full_size, left=4, wrap=True)
    # All runs, the rows that they name, and whether each run represents its row.
    heads, run_rows = ["run", "row", "seed", "scale", "represents the row", "revision"], []
    for _, run in frame.drop_duplicates("run").iterrows():
        state, name = "", run["row"]
        if name is not None:
            row_match = frames.matches(frame[frame["run"] == run["run"]], name)
            state = "no such row" if row_match.empty else "yes" if row_match["is_row"].iloc[0] else ""
            state = state or f"no: {row_match['explanation'].iloc[0]}"
        commit = run["record"].revision or ""
        commit = commit[:9] + "+" * commit.endswith("+")
        run_rows.append([run["run"].name, name or "", str(run["seed"]), run["scale"] if name else "", state, commit])
    run_rows += [[folder.name, "", "", "", "unfinished", ""] for folder in unfinished]
    run_rows += [[str(fault.path), "", "", "", f"damaged: {fault.fault}", ""] for fault in damage.faults]
    lead = LEAD if filled else parts.SMALL if scales else parts.COMPARISON_LEAD
    sections = [
        Section(text=[lead, *([note] if note else [])]),
        Section(facts=facts, formats=["html"]),
        *first,
        *content,
        *([Section("Rows at full size", tables=[full_size_table])] if full_size else []),
        Section("Runs", tables=[text_table(heads, run_rows, left=6, wrap=True)], anchor="runs"),
    ]
    code = revision()
    version_note = f"Made by clipzoo {version('clipzoo')}{f', revision {code}' if code else ''}."
    sections.append(Section(notes=[version_note], formats=["html"]))
    cells = pd.DataFrame(lines, columns=list(parts.CSV_COLUMNS)).astype({"runs": "Int64"})
    io.write_whole(output / "tables.csv", cells.to_csv(index=False, float_format="%.4f", lineterminator="\n"))
    files = [output / name for name in ("index.html", "tables.md", "tables.tex")]
    return write("The papers' tables" if scales or filled else "Comparison of runs", files, sections)


def write_sweep(overrides: Sequence[str]) -> str:
    """Write the comparison of the runs of a sweep, if any is finished; return its table and the path of the page."""
    swept = points(overrides)
    folders = [folder for folder in dict.fromkeys(point.folder for point in swept) if folder.exists()]
    if not any(is_finished(folder) for folder in folders):
        return "no point of the sweep is finished: there is no table"
    table, trials = sweep_results(swept)
    first = trial_sections(trials, "The sweep") if trials.keys and len(trials.trials) > 1 else []
    output = swept[0].folder.parent / sweep_name(overrides)
    page = write_pages(folders, [], output, first=first, labels=trials.labels)
    return f"\n{render.terminal(table)}\n\nthe comparison of the runs: {page}"


def sweep_results(swept: Sequence[Point]) -> tuple[Table, Trials]:
    """Average the points of a sweep over seeds, a row or a trial for each combination of swept values.

    The table has the mean of each task over its datasets, the highest with a star, the last training loss, and minutes.
    The trials are compared by the first task, or by the last loss.
    """
    damage, folders_once = io.DamageLog(), dict.fromkeys(point.folder for point in swept)
    frame = frames.read_frame([folder for folder in folders_once if folder.exists()], damage)
    tasks = {f"{task} ({columns[0].label})": columns[0] for task, columns in frames.columns_of(frame).items()}
    logs, minutes = frames.read_logs(frame, damage), next(iter(frames.COSTS))
    numbers = {}
    for run, metrics in frames.numbers(frame):
        cost = frames.cost_of(frame[frame["run"] == run["run"]], minutes)
        means = (column.value(metrics) for column in tasks.values())
        numbers[run["run"]] = [*means, logs[run["run"]].last_loss, cost]
    columns = [*tasks, LOSS, minutes]
    finished = pd.DataFrame.from_dict(numbers, orient="index", columns=columns, dtype=float)

    # Run directories by swept values without the seed, in the order of the command line.
    keys, groups = [key for key in swept[0].swept if key != "seed"], dict[tuple[str, ...], list[Path]]()
    for point in swept:
        folders = groups.setdefault(tuple(point.swept[key] for key in keys), [])
        folders += [point.folder] if point.folder not in folders else []
    best = pd.DataFrame([finished.reindex(folders)[list(tasks)].mean() for folders in groups.values()]).max()
    rows, trials = [], []
    for number, (values, folders) in enumerate(groups.items()):
        results, texts = finished.reindex(folders), []
        for name in columns:
            measured, is_best = results[name].dropna(), len(groups) > 1 and results[name].mean() == best.get(name)
            text = f"{measured.mean():.4g}" if len(measured) else "-"
            text += f" ± {measured.std():.2g}" if len(measured) > 1 else ""
            texts.append(text + "*" * bool(is_best))
        count = sum(folder in finished.index for folder in folders)
        rows.append([*values, *texts, str(count) if count == len(folders) else f"{count} of {len(folders)}"])

        scores = results[columns[0]].dropna().to_list()
        state: State = "finished"
        if not scores:
            # Killed runs count as running.
            started = any(folder.exists() for folder in folders)
            failed = any(True for folder in folders for _ in folder.glob("clipzoo-error-*.log"))
            state = "failed" if failed else "running" if started else "not started"
        mean = (statistics.fmean(scores),) if scores else ()
        overrides = next(point.overrides for point in swept if point.folder == folders[0])
        trials.append(Trial(number, dict(zip(keys, values, strict=True)), state, overrides, folders[0], mean))
    table = text_table([*keys, *columns, "runs"], rows, left=len(keys))
    direction = "maximize" if tasks else "minimize"
    return table, Trials(trials, columns[:1], [direction], runs=dict(enumerate(groups.values())))


def explorer_page(answers: Mapping[str, Any] | None = None) -> str:
    """Render the explorer. answers: answers and pictures by path, for a page without a server; None asks the server.

    The content security policy allows only the script of this page, and nothing from another host.
    """
    script = (render.TEMPLATES / "explorer.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    content = {"title": "clipzoo explore", "policy": policy, "script": Markup(script), "answers": answers}
    return render.from_template("explorer.html.j2", **content)


def write_search(folder: Path, search: Search, space: Space, trials: Sequence[Trial]) -> str:
    """Write index.html to the folder of a search; return the table of its trials, the best and the path of the page.

    Without a finished trial there is no page.
    """
    page_trials = Trials(trials, search.metrics, search.directions, search.rungs, scales=space.scales)
    table = f"\n{render.terminal(trial_table(page_trials, most=30))}\n\n{page_trials.summary}"
    folders = [run for run in dict.fromkeys(trial.folder for trial in trials) if run.exists()]
    if not page_trials.finished or not folders:
        missing = "run of the search is left" if page_trials.finished else "trial of the search is finished"
        return f"{table}\nno {missing}: there is no page"
    page = write_pages(
        folders, [], folder, first=trial_sections(page_trials, "The search"), labels=page_trials.labels, tested=False
    )
    lines = [table]
    for trial in page_trials.best[:3]:
        lines.append(f"best: trial {trial.number + 1}: {shlex.join(['clipzoo', 'train', *trial.overrides])}")
    return "\n".join([*lines, f"the page of the search: {page}"])
