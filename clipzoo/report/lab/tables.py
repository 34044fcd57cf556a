"""Tables of a lab: results, differences, claims, agreement with the PMI, cost, searches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from clipzoo.report.lab.claims import Difference, Verdict
from clipzoo.report.lab.records import SIMILARITY, TASKS, Compared, Lab, Method
from clipzoo.report.statistics.intervals import Interval, over_seeds
from clipzoo.report.statistics.power import detectable_difference
from clipzoo.report.table import Cell, Table, text_table

PLANNED = (3, 5, 10, 20)
"""Numbers of seeds of the power analysis."""


def results(compared: Compared) -> Table:
    """Metrics of all methods with intervals over seeds, and what the PMI itself reaches."""
    best = {metric: max(over_seeds(method.values(metric)).estimate for method in compared.methods) for metric in TASKS}
    rows: list[list[str | Cell]] = []
    for method in compared.methods:
        intervals = {metric: over_seeds(method.values(metric)) for metric in TASKS}
        cells = [Cell(_percent(item), bold=item.estimate == best[name]) for name, item in intervals.items()]
        rows.append([method.name, str(len(method.seeds)), *cells])
    oracle = compared.facts["oracle"]
    rows.append(["the PMI itself", "", *(f"{oracle[metric]:.1f}" for metric in TASKS)])
    return text_table(["method", "seeds", *(f"{name}, %" for name in TASKS.values())], rows, left=1)


def similarity(compared: Compared) -> Table:
    """Agreement of the scores with the PMI, with intervals over seeds."""
    rows: list[list[str | Cell]] = [
        [method.name, *(_similarity(over_seeds(method.values(metric))) for metric in SIMILARITY)]
        for method in compared.methods
    ]
    rows.append(["the PMI itself", "1", "1", "0", "0"])
    return text_table(["method", *SIMILARITY.values()], rows, left=1)


def differences(found: Sequence[Difference], baseline: str) -> Table:
    """Differences from the baseline, each with its interval."""
    labels = ["comparison", "method", "difference", "95 % over seeds", "95 % over samples", "p (Holm)", "separated",
              "detectable"]  # fmt: skip
    rows: list[list[str | Cell]] = [
        [
            item.comparison, item.method, f"{item.interval.estimate:+.1f}", _ends(item.interval),
            "" if item.samples is None else _ends(item.samples), f"{item.p:.2g}",
            Cell("yes" if item.is_separated else "no", bold=item.is_separated), f"{item.detectable:.1f}",
        ]
        for item in found
    ]  # fmt: skip
    return text_table(labels, rows, left=2, title=f"accuracy less that of {baseline}, in percent points")


def claims(found: Sequence[Verdict]) -> Table:
    """The papers' claims and what was measured."""
    rows: list[list[str | Cell]] = [
        [
            item.says, item.source, item.comparison, f"{item.better} - {item.than}, {_name(item.metric)}",
            "" if item.measured is None else _signed(item.measured.interval, item.metric in TASKS),
            "" if item.measured is None else f"{item.measured.p:.2g}",
            Cell(item.verdict, bold=item.measured is not None and item.measured.is_separated), item.power,
        ]
        for item in found
    ]  # fmt: skip
    labels = ["claim", "source", "comparison", "compared", "difference and 95 % interval", "p (Holm)", "here", "power"]
    return text_table(labels, rows, left=len(labels))


def cost(compared: Compared, front: Sequence[Method]) -> Table:
    """Cost of a training and accuracy; a star marks methods that no cheaper one surpasses."""
    rows: list[list[str | Cell]] = [
        [
            f"{method.name} *" if method in front else method.name, f"{method.cost('flops') / 1e9:,.0f}",
            f"{method.cost('samples'):,.0f}", f"{method.cost('processor'):.1f}",
            f"{over_seeds(method.values('accuracy')).estimate:.1f}",
        ]
        for method in sorted(compared.methods, key=lambda method: method.cost("flops"))
    ]  # fmt: skip
    return text_table(["method", "GFLOPs", "samples", "CPU seconds", "accuracy, %"], rows, left=1)


def start(compared: Compared) -> Table:
    """Scores of a batch before the first step, as means over the seeds."""
    names = {"mean": "mean", "deviation": "deviation", "interaction": "of pairs", "loss": "loss",
             "encoder_gradient": "gradient of the towers"}  # fmt: skip
    rows: list[list[str | Cell]] = [
        [method.name, *(f"{np.mean([seed.start[name] for seed in method.seeds]):.3g}" for name in names)]
        for method in compared.methods
        if all(seed.start for seed in method.seeds)
    ]
    return text_table(["method", *names.values()], rows, left=1)


def searches(lab: Lab) -> Table:
    """Settings that the search of each method chose."""
    rows = list(_searches(lab))
    return text_table(["comparison", "method", "finished", "best, validation %", "seeds", "chosen"], rows, left=2)


def power(lab: Lab, found: Sequence[Difference]) -> Table:
    """Smallest differences in accuracy that numbers of seeds show, at the spread of each comparison."""
    rows: list[list[str | Cell]] = []
    for compared in lab.comparisons:
        spreads = [item.deviation for item in found if item.comparison == compared.name]
        if spreads:
            spread = math.sqrt(sum(value**2 for value in spreads) / len(spreads))
            sizes = [f"{detectable_difference(spread, count, significance=found[0].level):.1f}" for count in PLANNED]
            rows.append([compared.name, f"{spread:.1f}", *sizes])
    return text_table(["comparison", "deviation over seeds", *(f"{count} seeds" for count in PLANNED)], rows, left=1)


def pareto(methods: Sequence[Method], name: str) -> list[Method]:
    """Return the methods that no other one surpasses in accuracy at the same or a lower cost."""

    def point(method: Method) -> tuple[float, float]:
        return method.cost(name), -over_seeds(method.values("accuracy")).estimate

    return [
        method
        for method in methods
        if not any(
            point(other) != point(method)
            and all(theirs <= mine for theirs, mine in zip(point(other), point(method), strict=True))
            for other in methods
        )
    ]


def _searches(lab: Lab) -> Iterator[list[str | Cell]]:
    trials = lab.facts["trials"]
    for compared in lab.comparisons:
        for method in compared.methods:
            chosen = ", ".join(f"{_short(key)}={_value(value)}" for key, value in method.winner.items())
            best = f"{max(method.points):.1f}" if method.points else ""
            finished = f"{len(method.points)} of {trials}"
            seeds = str(len(method.seeds)) + (f", {method.failed} diverged" if method.failed else "")
            yield [compared.name, method.name, finished, best, seeds, Cell(chosen, code=True)]


def _short(key: str) -> str:
    return key.removeprefix("optim.schedule.").removeprefix("head.").removeprefix("objective.")


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _similarity(interval: Interval) -> str:
    if math.isinf(interval.low):
        return f"{interval.estimate:.2f}"
    return f"{interval.estimate:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _percent(interval: Interval) -> str:
    if math.isinf(interval.low):
        return f"{interval.estimate:.1f}"
    low, high = max(0.0, interval.low), min(100.0, interval.high)
    return f"{interval.estimate:.1f} [{low:.1f}, {high:.1f}]"


def _ends(interval: Interval) -> str:
    return f"{interval.low:+.1f} to {interval.high:+.1f}"


def _signed(interval: Interval, percent: bool) -> str:
    digits = 1 if percent else 3
    low, high = f"{interval.low:+.{digits}f}", f"{interval.high:+.{digits}f}"
    return f"{interval.estimate:+.{digits}f} [{low}, {high}]"


def _name(metric: str) -> str:
    return {**TASKS, **SIMILARITY}[metric]
