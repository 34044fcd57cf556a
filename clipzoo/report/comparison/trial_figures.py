"""Figures of a search or a sweep: parallel coordinates, importance of keys, best result against cost."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure

from clipzoo.errors import number_of
from clipzoo.report.comparison.trials import Trials, as_numbers, importance
from clipzoo.report.drawing import DPI, INK, MUTED, RIGHT, WRONG, label, style
from clipzoo.runs.search.trial import Trial

COLOURS = {"maximize": colormaps["viridis_r"], "minimize": colormaps["viridis"]}
"""From yellow, the worst, to violet."""
SINGLE = ListedColormap([INK])
"""Where all results are equal, or only one is known."""
LOGARITHMIC = 30
"""Ratio of the largest to the smallest number of a list above which an axis is logarithmic."""
LEAST_GAP = 0.04
"""Share of an axis between two labels that do not overlap."""
LONGEST = 18
"""Characters of a label on an axis."""
LONGEST_TITLE = 56
"""Characters of one line of a title."""


def figures(shown: Trials) -> Iterator[tuple[str, str, Figure]]:
    """Yield heading, description and figure of each picture."""
    yield "Parallel coordinates", "a line for each trial through its values and results", parallel_coordinates(shown)
    if shares := importance(shown):
        yield "Importance of keys", "share of the variance that each key explains", importance_bars(shown, shares)
    yield "Best result against cost", "results over minutes of training", progress(shown)
    if len(shown.metrics) > 1 and shown.finished:
        yield "Trade-off", "the first two metrics of all trials", trade_off(shown)


def parallel_coordinates(shown: Trials) -> Figure:
    """A line for each trial, coloured by the first metric; lines of pruned and failed trials end before the metrics."""
    columns = [*shown.keys, *shown.metrics]
    figure = Figure(figsize=(max(7.0, 1.9 * len(columns)), 4.2), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    trials = sorted(shown.trials, key=lambda trial: (trial.state == "finished", trial in shown.best))
    places = [_axis(panel, place, _column(shown, name), shown.scales.get(name)) for place, name in enumerate(columns)]
    first = [trial.results[0] for trial in shown.finished] or [0.0]
    several = min(first) < max(first)
    norm, colours = Normalize(min(first), max(first)), COLOURS[shown.directions[0]] if several else SINGLE
    for trial in trials:
        values = [str(trial.values.get(key, "")) for key in shown.keys] + [f"{value}" for value in trial.results]
        y = [place[value] for place, value in zip(places, values, strict=False)]
        best = trial in shown.best
        colour = colours(norm(trial.results[0])) if trial.results else WRONG if trial.state == "failed" else MUTED
        panel.plot(range(len(y)), y, color=colour, linewidth=2.6 if best else 1.0, alpha=1.0 if best else 0.75,
                   linestyle="-" if trial.results else ":", marker="*" if best else "", markersize=9)  # fmt: skip
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


def importance_bars(shown: Trials, shares: dict[str, float]) -> Figure:
    """A bar for each key."""
    figure = Figure(figsize=(7, 0.32 * len(shares) + 1.3), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    bars = panel.barh(range(len(shares)), list(shares.values()), 0.7, color=INK)
    panel.bar_label(bars, fmt="{:.0%}", fontsize=8, padding=2, color=INK)
    panel.set_yticks(range(len(shares)), list(shares), fontsize=8)
    panel.set_xlim(0, 1)
    panel.invert_yaxis()
    name, values = shown.compared
    label(panel, textwrap.fill(f"share of the variance of {name} ({number_of(len(values), 'trial')})", LONGEST_TITLE))
    style(panel, grid="x")
    return figure


def progress(shown: Trials) -> Figure:
    """The best result so far over minutes of training; with rungs also each trial's results during its training."""
    figure = Figure(figsize=(11 if shown.rungs else 7, 3.6), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, 2 if shown.rungs else 1, squeeze=False)[0]
    panel, better = panels[0], max if shown.directions[0] == "maximize" else min
    spent, best = 0.0, None
    costs, values = [], []
    for trial in shown.trials:
        spent += shown.minutes[trial.number]
        rungs = [value for _, value in sorted(trial.rungs.items())]
        if trial.results:
            best = trial.results[0] if best is None else better(best, trial.results[0])
            panel.plot(spent, trial.results[0], "o", color=INK, markersize=4)
        elif rungs:
            panel.plot(spent, rungs[-1], "x", color=MUTED, markersize=5)
        if best is not None:
            costs.append(spent)
            values.append(best)
    panel.step(costs, values, where="post", color=RIGHT, linewidth=2)
    panel.plot([], [], color=RIGHT, label="best so far")
    panel.plot([], [], "o", color=INK, label="finished")
    if any(trial.state == "pruned" for trial in shown.trials):
        panel.plot([], [], "x", color=MUTED, label="pruned, last rung")
    panel.legend(frameon=False, fontsize=8)
    panel.set_xlim(0, None)
    label(panel, "best result so far", "minutes of training, all trials", shown.metrics[0])
    style(panel)
    if shown.rungs:
        _rungs(panels[1], shown)
    return figure


def trade_off(shown: Trials) -> Figure:
    """The first two metrics of every finished trial, and those that no other one surpasses."""
    figure = Figure(figsize=(6, 4), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    panel.plot(*_pairs(shown.finished), "o", color=MUTED, markersize=5, label="finished")
    best = sorted(shown.best, key=lambda trial: trial.results[0])
    panel.plot(*_pairs(best), marker="*", color=RIGHT, markersize=11, linewidth=1, label="surpassed by no other")
    for trial in best:
        panel.annotate(f" {trial.number + 1}", (trial.results[0], trial.results[1]), fontsize=8, color=INK)
    panel.legend(frameon=False, fontsize=8)
    arrows = [f"{name} ({'higher' if way == 'maximize' else 'lower'} is better)"
              for name, way in zip(shown.metrics, shown.directions, strict=True)]  # fmt: skip
    label(panel, "trade-off", arrows[0], arrows[1])
    style(panel)
    return figure


def _rungs(panel: Axes, shown: Trials) -> None:
    for trial in shown.trials:
        points = [(shown.rungs[rung], value) for rung, value in sorted(trial.rungs.items())]
        points += [(1.0, trial.results[0])] if trial.results else []
        if points:
            best = trial in shown.best
            colour = RIGHT if best else INK if trial.results else MUTED
            panel.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, linewidth=2 if best else 1)
    for rung in shown.rungs:
        panel.axvline(rung, color=MUTED, linewidth=0.8, linestyle=":")
    label(panel, "results at the rungs", "share of the training", shown.metrics[0])
    style(panel)


def _pairs(trials: Sequence[Trial]) -> tuple[list[float], list[float]]:
    return [trial.results[0] for trial in trials], [trial.results[1] for trial in trials]


def _column(shown: Trials, name: str) -> list[str]:
    """Return the values of a key, or of a metric, as texts."""
    if name in shown.metrics:
        number = list(shown.metrics).index(name)
        return [str(trial.results[number]) for trial in shown.finished]
    return [str(trial.values.get(name, "")) for trial in shown.trials]


def _axis(panel: Axes, place: int, values: Sequence[str], log: bool | None) -> dict[str, float]:
    """Draw an axis with its labels; return the height of each value, from 0 to 1.

    log: True for a logarithmic axis; None: depends on the ratio of the values, see LOGARITHMIC.
    """
    panel.axvline(place, color=INK, linewidth=1)
    distinct = list(dict.fromkeys(values))
    numbers = as_numbers(distinct)
    if numbers is None:
        heights = {value: (index + 0.5) / len(distinct) for index, value in enumerate(distinct)}
        marks = dict(heights)
    else:
        low, high = min(numbers, default=0.0), max(numbers, default=1.0)
        log = low > 0 and high > LOGARITHMIC * low if log is None else log
        scaled = np.log(numbers) if log else np.asarray(numbers)
        if log:
            panel.text(place, 1.04, "logarithmic", fontsize=7, ha="center", color=MUTED)
        width = float(np.ptp(scaled)) if len(scaled) else 0.0
        shares = (scaled - scaled.min()) / width if width else np.full(len(scaled), 0.5)
        heights = dict(zip(distinct, map(float, shares), strict=True))
        few = len(distinct) <= 6 and np.all(np.diff(np.sort(shares)) > LEAST_GAP)
        ends = {f"{low:.4g}": 0.0, f"{high:.4g}": 1.0} if width else {f"{low:.4g}": 0.5}
        marks = {f"{float(value):.4g}": height for value, height in heights.items()} if few else ends
    for text, height in marks.items():
        shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        panel.text(place + 0.05, height, shown, fontsize=7.5, va="center",
                   bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.6})  # fmt: skip
    return heights
