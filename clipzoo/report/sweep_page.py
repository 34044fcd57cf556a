"""The end of a sweep: a table of its points for the terminal, and the page that compares their runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from clipzoo.io import DamageLog
from clipzoo.report.comparison.scales import COSTS, columns
from clipzoo.report.comparison.sweep import LOSS
from clipzoo.report.comparison.trials import Trials
from clipzoo.report.paper_tables.collect import Run, collect
from clipzoo.report.render import terminal
from clipzoo.report.search_page import section
from clipzoo.report.table import Table, text_table
from clipzoo.report.tables_page import write_pages
from clipzoo.runs.search.trial import State, Trial
from clipzoo.runs.sweep import Point, points, sweep_folder

Measure = Callable[[Run], float | None]


def write_sweep(overrides: Sequence[str]) -> str:
    """Write the comparison of the runs of a sweep; return its table and the path of the page.

    Without a finished run there is no page.
    """
    swept = points(overrides)
    if not _finished(swept):
        return "no point of the sweep is finished: there is no table"
    folders = [folder for folder in dict.fromkeys(point.folder for point in swept) if folder.exists()]
    shown = _trials(swept)
    first = [section(shown, "The sweep")] if shown.keys and len(shown.trials) > 1 else []
    page = write_pages(folders, [], sweep_folder(swept, overrides), first=first, labels=shown.labels)
    return f"\n{terminal(overview(swept))}\n\nthe comparison of the runs: {page}"


def overview(points: Sequence[Point]) -> Table:
    """A row for each combination of swept values: mean and standard deviation over seeds, the highest mean with a star.

    Columns: for each task the mean over its datasets, or its only dataset; the last training loss; minutes.
    """
    finished = _finished(points)
    keys = [key for key in points[0].swept if key != "seed"]
    groups: dict[tuple[str, ...], dict[Path, Run | None]] = {}
    for point in points:
        values = tuple(point.swept[key] for key in keys)
        groups.setdefault(values, {})[point.folder] = finished.get(point.folder)
    tasks = {
        f"{task} ({parts[0].label})": (lambda run, column=parts[0]: column.value(run.metrics))
        for task, parts in columns(list(finished.values())).items()
    }
    measured = [_measured(groups, measure, starred=True) for measure in tasks.values()]
    measured += [_measured(groups, measure, starred=False) for measure in (_loss, _minutes)]
    counts = [_count(list(runs.values())) for runs in groups.values()]
    rows = [[*row] for row in zip(*(zip(*groups, strict=True) if keys else ()), *measured, counts, strict=True)]
    return text_table([*keys, *tasks, "loss", COSTS[0].label, "runs"], rows, left=len(keys))


def _trials(points: Sequence[Point]) -> Trials:
    """Return the points of a sweep, averaged over seeds, as trials: compared by the first task, or by the last loss."""
    finished = _finished(points)
    tasks = columns(list(finished.values()))
    task = next(iter(tasks), None)
    name = LOSS if task is None else f"{task} ({tasks[task][0].label})"
    groups: dict[tuple[tuple[str, str], ...], list[Point]] = {}
    for point in points:
        groups.setdefault(tuple(item for item in point.swept.items() if item[0] != "seed"), []).append(point)
    trials, folders = [], {}
    for number, (values, members) in enumerate(groups.items()):
        folders[number] = list(dict.fromkeys(point.folder for point in members))
        runs = [finished[folder] for folder in folders[number] if folder in finished]
        results = [_loss(run) if task is None else tasks[task][0].value(run.metrics) for run in runs]
        known = [value for value in results if value is not None]
        state: State = "finished" if known else _unfinished_state(folders[number])
        mean = (statistics.fmean(known),) if known else ()
        trials.append(Trial(number, dict(values), state, members[0].overrides, folders[number][0], mean))
    return Trials(trials, [name], ["minimize" if task is None else "maximize"], runs=folders)


def _unfinished_state(folders: Sequence[Path]) -> State:
    """Return the state of a point none of whose runs has a result: "running" also if all were killed."""
    if any(True for folder in folders for _ in folder.glob("clipzoo-error-*.log")):
        return "failed"
    return "running" if any(folder.exists() for folder in folders) else "not started"


def _finished(points: Sequence[Point]) -> dict[Path, Run]:
    damage = DamageLog()
    folders = dict.fromkeys(point.folder for point in points)
    runs = [run for folder in folders if folder.exists() for run in collect(folder, damage)[0]]
    return {run.folder: run for run in runs}


def _measured(
    groups: Mapping[tuple[str, ...], Mapping[Path, Run | None]], measure: Measure, starred: bool
) -> list[str]:
    """Return a cell for each group."""
    values = [
        [value for run in runs.values() if run is not None and (value := measure(run)) is not None]
        for runs in groups.values()
    ]
    means = [statistics.fmean(group) if group else None for group in values]
    best = max((mean for mean in means if mean is not None), default=None) if len(means) > 1 else None
    return [
        "-"
        if mean is None
        else f"{mean:.4g}"
        + (f" ± {statistics.stdev(group):.2g}" if len(group) > 1 else "")
        + ("*" if starred and mean == best else "")
        for mean, group in zip(means, values, strict=True)
    ]


def _count(runs: Sequence[Run | None]) -> str:
    count = sum(run is not None for run in runs)
    return str(count) if count == len(runs) else f"{count} of {len(runs)}"


def _loss(run: Run) -> float | None:
    return next((float(line["loss"]) for line in reversed(run.log.training) if "loss" in line), None)


def _minutes(run: Run) -> float | None:
    seconds = run.metrics.get(COSTS[0].key)
    return None if seconds is None else seconds * COSTS[0].factor
