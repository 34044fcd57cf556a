"""Trials of a search or points of a sweep: the table, the importance of the searched keys, and figures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure

from clipzoo.errors import number_of
from clipzoo.io import DamageLog
from clipzoo.io.text import shorten
from clipzoo.report.figures import INK, MUTED, RIGHT, WRONG, as_numbers, label, panels
from clipzoo.report.render import Cell, Picture, Section, Table, text_table
from clipzoo.runs.directory import is_finished
from clipzoo.runs.record import RunRecord, TrainingLog
from clipzoo.runs.search import STATES, Trial, front

MOST_GROUPS = 4
"""Groups into which the values of a key are divided for its importance."""
LONGEST_VALUE, LONGEST, LONGEST_TITLE = 24, 18, 56
"""Characters of a value in the label of a run, of a label on an axis, and of a line of a title."""
COLOURS = {"maximize": colormaps["viridis_r"], "minimize": colormaps["viridis"]}
"""Colour maps from yellow (worst) to violet (best)."""


@dataclass(frozen=True)
class Trials:
    """Trials of a search with their metrics, for its page.

    trials: in the order of the draws. runs: run directories of trials that are means over seeds, by number.
    metrics, directions: compared values, "maximize" or "minimize" for each. rungs: shares of the training.
    scales: keys whose axis is logarithmic (True) or linear (False); other axes follow from their values.
    """

    trials: Sequence[Trial]
    metrics: Sequence[str]
    directions: Sequence[str]
    rungs: Sequence[float] = ()
    runs: Mapping[int, Sequence[Path]] = field(default_factory=dict)
    scales: Mapping[str, bool] = field(default_factory=dict)

    @cached_property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for trial in self.trials for key in trial.values))

    @property
    def labels(self) -> dict[Path, str]:
        """The searched values of each run, "peak=0.001 width=32". Keys are cut to their last parts if these differ."""
        names = {key: key.rpartition(".")[2] for key in self.keys}
        if len(set(names.values())) < len(names):
            names = {key: key for key in self.keys}
        labels: dict[Path, str] = {}
        for trial in self.trials:
            values = (f"{names[key]}={shorten(str(value), LONGEST_VALUE)}" for key, value in trial.values.items())
            labels |= dict.fromkeys(self.runs.get(trial.number, [trial.folder]), " ".join(values))
        return labels

    @cached_property
    def finished(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.state == "finished"]

    @cached_property
    def best(self) -> list[Trial]:
        """The best trial; with several metrics, all trials that no other surpasses in every metric."""
        return front(self.finished, self.directions)

    @cached_property
    def minutes(self) -> dict[int, float]:
        """Minutes of training of each trial, 0 where unknown."""
        minutes, damage = {}, DamageLog()
        for trial in self.trials:
            minutes[trial.number] = 0.0
            for run in self.runs.get(trial.number) or [trial.folder]:
                log = damage.read(partial(TrainingLog.read, run), TrainingLog())
                record = damage.read(partial(RunRecord.read, run), RunRecord()) if is_finished(run) else RunRecord()
                seconds = [float(line.get("seconds", 0.0)) for line in (*log.training, record.training)]
                minutes[trial.number] += max(seconds) / 60
        return minutes

    @property
    def compared(self) -> tuple[str, dict[int, float]]:
        """Name and values by trial of the first metric, final or, if more trials have it, at the first rung."""
        finished = {trial.number: trial.results[0] for trial in self.finished}
        early = {trial.number: trial.rungs[0] for trial in self.trials if 0 in trial.rungs}
        if len(early) > len(finished):
            return f"{self.metrics[0]} after {self.rungs[0]:.0%} of the training", early
        return self.metrics[0], finished

    @property
    def summary(self) -> str:
        counts = {state: sum(trial.state == state for trial in self.trials) for state in STATES}
        states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        minutes = sum(self.minutes.values())
        return f"{number_of(len(self.trials), 'trial')}: {states or 'none finished'}; {minutes:.3g} minutes of training"


def trial_table(shown: Trials, most: int | None = None) -> Table:
    """A row for each trial, the best with a star. most: number of rows, of the best trials."""
    trials = list(shown.trials)
    if most is not None and len(trials) > most:
        sign = -1 if shown.directions[0] == "maximize" else 1
        best_trials = sorted(shown.finished, key=lambda trial: sign * trial.results[0])[:most]
        trials = sorted(best_trials, key=lambda trial: trial.number)
    rows = []
    for trial in trials:
        is_best = trial in shown.best
        results = [f"{value:.4g}" for value in trial.results] or ["-"] * len(shown.metrics)
        if trial.state == "pruned" and trial.rungs:
            results[0] = f"({trial.rungs[max(trial.rungs)]:.4g})"
        results[0] += "*" * is_best
        state = f"{trial.state}: {trial.reason}" if trial.reason else trial.state
        values = [str(trial.values.get(key, "")) for key in shown.keys]
        texts = [str(trial.number + 1), *values, *results, f"{shown.minutes[trial.number]:.3g}", state]
        rows.append([Cell(text, bold=is_best) for text in texts])
    return text_table(["trial", *shown.keys, *shown.metrics, "minutes", "state"], rows, left=1 + len(shown.keys))


def importance(shown: Trials) -> dict[str, float]:
    """Share of the variance of the compared metric that each key explains by itself, the largest first.

    The values of a key are divided into at most MOST_GROUPS groups of neighbouring values; the share is the effect size
    epsilon squared of a one-way analysis of variance (Kelley 1935): the share that chance explains is subtracted. Keys
    with as many groups as values have no share.
    """
    _, values = shown.compared
    trials = [trial for trial in shown.trials if trial.number in values]
    results = pd.Series([values[trial.number] for trial in trials], dtype=float)
    shares = {}
    for key in shown.keys:
        parts = results.groupby(groups([trial.values[key] for trial in trials]))
        if parts.ngroups < 2 or len(results) <= parts.ngroups:
            continue
        total = float(np.square(results - results.mean()).sum())
        within = float(np.square(results - parts.transform("mean")).sum())
        chance = (parts.ngroups - 1) * within / (len(results) - parts.ngroups)
        shares[key] = max(0.0, (total - within - chance) / total) if total else 0.0
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def groups(values: Sequence[object]) -> list[int]:
    """Return a group number for each value; groups hold equal values, or neighbouring numbers if there are many."""
    distinct = list(dict.fromkeys(values))
    if (numbers := as_numbers(values)) is None or len(distinct) <= MOST_GROUPS:
        return [distinct.index(value) for value in values]
    ordered = sorted(numbers)
    return [ordered.index(number) * MOST_GROUPS // len(ordered) for number in numbers]


def trial_sections(shown: Trials, title: str) -> list[Section]:
    table = trial_table(shown)
    notes = "A star marks the best trial"
    if len(shown.metrics) > 1:
        notes = "A star marks the trials that no other one surpasses in every metric"
    if any(trial.state == "pruned" for trial in shown.trials):
        notes += "; in brackets: the last result of a pruned trial, which had less training"
    section = Section(title, [f"{shown.summary}. {notes}."], [table], list(figures(shown)), anchor="trials")
    return [section, Section(tables=[table], formats=["tex"])]


def figures(shown: Trials) -> Iterator[Picture]:
    lines = parallel_coordinates(shown)
    yield Picture("a line for each trial through its values and results", lines, "Parallel coordinates")
    if shares := importance(shown):
        figure, (panel,) = panels(7, 0.32 * len(shares) + 1.3)
        bars = panel.barh(range(len(shares)), list(shares.values()), 0.7, color=INK)
        panel.bar_label(bars, fmt="{:.0%}", fontsize=8, padding=2, color=INK)
        panel.set_yticks(range(len(shares)), list(shares), fontsize=8)
        panel.set_xlim(0, 1)
        panel.invert_yaxis()
        name, values = shown.compared
        title = f"share of the variance of {name} ({number_of(len(values), 'trial')})"
        label(panel, textwrap.fill(title, LONGEST_TITLE), grid="x")
        yield Picture("share of the variance that each key explains", figure, "Importance of keys")
    yield Picture("results over minutes of training", progress(shown), "Best result against cost")
    if len(shown.metrics) > 1 and shown.finished:
        # The first two metrics of every finished trial, and those that no other one surpasses.
        figure, (panel,) = panels(6, 4)
        best = sorted(shown.best, key=lambda trial: trial.results[0])
        finished, line = (np.array([trial.results[:2] for trial in trials]).T for trials in (shown.finished, best))
        panel.plot(*finished, "o", color=MUTED, markersize=5, label="finished")
        panel.plot(*line, marker="*", color=RIGHT, markersize=11, linewidth=1, label="surpassed by no other")
        for trial in best:
            panel.annotate(f" {trial.number + 1}", (trial.results[0], trial.results[1]), fontsize=8, color=INK)
        panel.legend(frameon=False, fontsize=8)
        arrows = [f"{name} ({'higher' if way == 'maximize' else 'lower'} is better)"
                  for name, way in zip(shown.metrics, shown.directions, strict=True)]  # fmt: skip
        label(panel, "trade-off", arrows[0], arrows[1], grid="y")
        yield Picture("the first two metrics of all trials", figure, "Trade-off")


def parallel_coordinates(shown: Trials) -> Figure:
    """A line for each trial, coloured by the first metric; lines of pruned and failed trials end before the metrics."""
    columns = [*shown.keys, *shown.metrics]
    figure, (panel,) = panels(max(7.0, 1.9 * len(columns)), 4.2)
    trials = sorted(shown.trials, key=lambda trial: (trial.state == "finished", trial in shown.best))
    texts = [[str(trial.values.get(key, "")) for trial in shown.trials] for key in shown.keys]
    texts += [[str(trial.results[number]) for trial in shown.finished] for number in range(len(shown.metrics))]
    places = []
    for place, (name, values) in enumerate(zip(columns, texts, strict=True)):
        # The axis of a column: the height of each value, from 0 to 1, and labels.
        panel.axvline(place, color=INK, linewidth=1)
        distinct = list(dict.fromkeys(values))
        numbers = as_numbers(distinct)
        if numbers is None:
            marks = heights = {value: (index + 0.5) / len(distinct) for index, value in enumerate(distinct)}
        else:
            low, high = min(numbers, default=0.0), max(numbers, default=1.0)
            is_log = shown.scales.get(name, low > 0 and high > 30 * low)
            scaled = np.log(numbers) if is_log else np.asarray(numbers)
            if is_log:
                panel.text(place, 1.04, "logarithmic", fontsize=7, ha="center", color=MUTED)
            width = float(np.ptp(scaled)) if len(scaled) else 0.0
            shares = (scaled - scaled.min()) / width if width else np.full(len(scaled), 0.5)
            heights = dict(zip(distinct, map(float, shares), strict=True))
            # Labels at shorter distances overlap.
            few = len(distinct) <= 6 and np.all(np.diff(np.sort(shares)) > 0.04)
            ends = {f"{low:.4g}": 0.0, f"{high:.4g}": 1.0} if width else {f"{low:.4g}": 0.5}
            marks = {f"{float(value):.4g}": height for value, height in heights.items()} if few else ends
        places.append(heights)
        for text, height in marks.items():
            short_text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
            panel.text(place + 0.05, height, short_text, fontsize=7.5, va="center",
                       bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.6})  # fmt: skip
    first = [trial.results[0] for trial in shown.finished] or [0.0]
    several = min(first) < max(first)
    norm = Normalize(min(first), max(first))
    colours = COLOURS[shown.directions[0]] if several else ListedColormap([INK])
    for trial in trials:
        values = [str(trial.values.get(key, "")) for key in shown.keys] + [f"{value}" for value in trial.results]
        y = [place[value] for place, value in zip(places, values, strict=False)]
        is_best = trial in shown.best
        colour = colours(norm(trial.results[0])) if trial.results else WRONG if trial.state == "failed" else MUTED
        panel.plot(range(len(y)), y, color=colour, linewidth=2.6 if is_best else 1.0, alpha=1.0 if is_best else 0.75,
                   linestyle="-" if trial.results else ":", marker="*" if is_best else "", markersize=9)  # fmt: skip
    panel.set_xticks(range(len(columns)), columns, fontsize=8)
    panel.set_yticks([])
    panel.set_xlim(-0.15, len(columns) - 0.55)
    panel.set_ylim(-0.06, 1.08)
    panel.spines[:].set_visible(False)
    if several:
        bar = figure.colorbar(ScalarMappable(norm, colours), ax=panel, pad=0.01)
        bar.set_label(shown.metrics[0], fontsize=8)
        bar.ax.tick_params(labelsize=8)
    return figure


def progress(shown: Trials) -> Figure:
    """The best result so far over minutes of training."""
    figure, (panel,) = panels(7, 3.6)
    spent = np.cumsum([shown.minutes[trial.number] for trial in shown.trials])
    results = pd.Series([trial.results[0] if trial.results else np.nan for trial in shown.trials], dtype=float)
    best = (results.cummax() if shown.directions[0] == "maximize" else results.cummin()).ffill()
    rungs = [np.nan if trial.results or not trial.rungs else trial.rungs[max(trial.rungs)] for trial in shown.trials]
    has_pruned = any(trial.state == "pruned" for trial in shown.trials)
    panel.step(spent, best, where="post", color=RIGHT, linewidth=2, zorder=3, label="best so far")
    panel.plot(spent, results, "o", color=INK, markersize=4, label="finished")
    panel.plot(spent, rungs, "x", color=MUTED, markersize=5, label="pruned, last rung" if has_pruned else None)
    panel.legend(frameon=False, fontsize=8)
    panel.set_xlim(0, None)
    label(panel, "best result so far", "minutes of training, all trials", shown.metrics[0], grid="y")
    return figure
