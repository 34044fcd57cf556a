"""The page of a search or a sweep: its trials, and the comparison of their runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from clipzoo.report import render
from clipzoo.report.comparison.trial_figures import figures
from clipzoo.report.comparison.trials import Trials, trial_table
from clipzoo.report.tables_page import Section, write_pages
from clipzoo.runs.search.settings import Search
from clipzoo.runs.search.space import Space
from clipzoo.runs.search.trial import Trial

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
    page = write_pages(folders, [], folder, first=[section(shown, "The search")], labels=shown.labels, tested=False)
    best = [f"best: trial {trial.number + 1}: {command(trial)}" for trial in shown.best[:3]]
    return "\n".join([table, *best, f"the page of the search: {page}"])


def section(shown: Trials, title: str) -> Section:
    """Return the table of the trials, and their pictures, as a part of a page."""
    table = trial_table(shown)
    notes = "A star marks the best trial"
    if len(shown.metrics) > 1:
        notes = "A star marks the trials that no other one surpasses in every metric"
    if any(trial.state == "pruned" for trial in shown.trials):
        notes += "; in brackets: the last result of a pruned trial, which had less training"
    return Section(
        anchor="trials",
        title=title,
        short_title=title,
        lead=[f"{shown.summary}. {notes}."],
        tables=[table],
        pictures=[(heading, text, render.picture(part)) for heading, text, part in figures(shown)],
        latex=render.latex(table),
    )


def command(trial: Trial) -> str:
    """Return the command that trains a trial alone, or shows that it is finished."""
    return shlex.join(["clipzoo", "train", *trial.overrides])
