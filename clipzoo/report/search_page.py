"""The page of a search or a sweep: its trials, and the comparison of their runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from clipzoo.report import render
from clipzoo.report.pages import write_pages
from clipzoo.report.trials import Trials, trial_sections, trial_table
from clipzoo.runs.search import Search, Space, Trial

MOST_ROWS = 30
"""Trials that the terminal shows."""


def write_search(folder: Path, search: Search, space: Space, trials: Sequence[Trial]) -> str:
    """Write index.html to the folder of a search; return the table of its trials, the best and the path of the page.

    Without a finished trial there is no page.
    """
    shown = Trials(trials, search.metrics, search.directions, search.rungs, scales=space.scales)
    table = f"\n{render.terminal(trial_table(shown, MOST_ROWS))}\n\n{shown.summary}"
    folders = [run for run in dict.fromkeys(trial.folder for trial in trials) if run.exists()]
    if not shown.finished or not folders:
        missing = "run of the search is left" if shown.finished else "trial of the search is finished"
        return f"{table}\nno {missing}: there is no page"
    page = write_pages(
        folders, [], folder, first=trial_sections(shown, "The search"), labels=shown.labels, tested=False
    )
    best = [f"best: trial {trial.number + 1}: {command(trial)}" for trial in shown.best[:3]]
    return "\n".join([table, *best, f"the page of the search: {page}"])


def command(trial: Trial) -> str:
    """Return the command that trains a trial alone, or shows that it is finished."""
    return shlex.join(["clipzoo", "train", *trial.overrides])
