"""Which rows of a comparison differ from the first by more than chance: intervals and p-values, corrected for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from clipzoo.errors import number_of
from clipzoo.io import below
from clipzoo.report.comparison.scales import ComparedRow, Comparison
from clipzoo.report.paper_tables.collect import Run
from clipzoo.report.paper_tables.published import PaperColumn
from clipzoo.report.statistics.differences import SIGNIFICANT, holm, mcnemar, sign_flip, welch
from clipzoo.report.statistics.intervals import Interval, difference_over_seeds, paired_difference
from clipzoo.report.statistics.power import detectable_difference
from clipzoo.report.table import Cell, Table, text_table
from clipzoo.runs.arrays import read_arrays
from clipzoo.runs.metric_key import MetricKey

SEPARATION = (
    "Intervals hold the true difference with 95 % probability. With two seeds or more on both sides they are Welch's "
    "over seeds; otherwise they are bootstrapped over the samples that both runs answered (captions of one picture "
    "together), and say nothing about other seeds. p is Welch's, McNemar's or, for captions, a permutation test's, "
    "adjusted by Holm's method for all lines of the table. Detectable: by as many seeds, with 80 % probability, at 5 % "
    "divided by the number of lines, the level at which Holm's method tests the smallest p."
)

ANSWERS = {
    ("zero_shot", ""): ("all_predictions", "all_labels"),
    ("linear_probe", "before"): ("all_before", "all_labels"),
    ("linear_probe", "after"): ("all_after", "all_labels"),
    ("retrieval", "text_to_image"): ("all_places", "all_owners"),
    ("retrieval", "image_to_text"): ("all_image_places", ""),
}
"""By task and protocol: the array of answers, and that of the right ones or, for captions, of their images."""


@dataclass(frozen=True)
class Difference:
    """A row's metric less that of the first row, in percent.

    p: adjusted for all differences of the comparison. basis: what was resampled. deviation: over seeds, pooled; None
    without several seeds. seeds: of the side with fewer. detectable: smallest difference that as many seeds show with
    80 % probability, see SEPARATION; None without several seeds.
    """

    task: str
    column: PaperColumn
    row: ComparedRow
    interval: Interval
    p: float
    basis: str
    deviation: float | None = None
    seeds: int = 0
    detectable: float | None = None

    @property
    def is_separated(self) -> bool:
        return self.p < SIGNIFICANT


def differences(compared: Comparison) -> list[Difference]:
    """Compare every row with the first on each dataset; means over datasets have none."""
    first, *others = compared.rows
    found = [
        difference
        for task, columns in compared.columns.items()
        for column in columns
        if column.label != "mean"
        for row in others
        if (difference := _over_seeds(task, column, first, row) or _over_samples(task, column, first, row))
    ]
    adjusted = holm([difference.p for difference in found])
    return [
        replace(difference, p=p, detectable=_detectable(difference, SIGNIFICANT / len(found)))
        for difference, p in zip(found, adjusted, strict=True)
    ]


def separation_table(compared: Comparison) -> Table | None:
    """Differences from the first row; None if no two rows can be compared."""
    found = differences(compared)
    if not found:
        return None
    labels = ["metric", "run", "difference", "95 % interval", "p (Holm)", "separated", "over", "detectable"]
    rows: list[list[str | Cell]] = [
        [
            f"{difference.task}, {difference.column.label}", difference.row.label,
            f"{difference.interval.estimate:+.1f}",
            f"{difference.interval.low:+.1f} to {difference.interval.high:+.1f}",
            f"{difference.p:.2g}", Cell("yes" if difference.is_separated else "no", bold=difference.is_separated),
            difference.basis, "" if difference.detectable is None else f"{difference.detectable:.1f}",
        ]
        for difference in found
    ]  # fmt: skip
    title = f"Differences from {compared.rows[0].label}, in percent points"
    return text_table(labels, rows, left=2, title=title)


def _over_seeds(task: str, column: PaperColumn, first: ComparedRow, row: ComparedRow) -> Difference | None:
    sides = [side.group.measurement(column) for side in (first, row)]
    before, after = (() if side is None else side.values for side in sides)
    if min(len(before), len(after)) < 2:
        return None
    pooled = float(np.sqrt(np.mean([np.var(side, ddof=1) for side in (before, after)])))
    return Difference(
        task, column, row, difference_over_seeds(before, after), welch(before, after),
        f"{len(before)} and {number_of(len(after), 'seed')}", pooled, min(len(before), len(after)),
    )  # fmt: skip


def _detectable(difference: Difference, level: float) -> float | None:
    if difference.deviation is None:
        return None
    return detectable_difference(difference.deviation, difference.seeds, significance=level)


def _over_samples(task: str, column: PaperColumn, first: ComparedRow, row: ComparedRow) -> Difference | None:
    key, *more = column.keys
    of_first, of_row = (_outcomes(side.group.runs[0].run, key) for side in (first, row))
    if more or of_first is None or of_row is None:
        return None
    (before, clusters), (after, others) = of_first, of_row
    if not np.array_equal(clusters, others):
        return None
    interval = paired_difference(100 * before, 100 * after, clusters)
    unique = len(np.unique(clusters))
    if unique == len(before):
        return Difference(task, column, row, interval, mcnemar(before > 0, after > 0), number_of(unique, "sample"))
    basis = f"{number_of(len(before), 'caption')} of {number_of(unique, 'image')}"
    return Difference(task, column, row, interval, sign_flip(after - before, clusters), basis)


def _outcomes(run: Run, key: MetricKey) -> tuple[np.ndarray, np.ndarray] | None:
    """Return 1 for each right and 0 for each wrong answer of a run, and the cluster of each sample.

    None if the evaluation left no answers, as those of earlier versions for image to text and probes.
    """
    names = ANSWERS.get((key.task, key.protocol))
    path = below(run.folder, f"evaluation/{key.task}/{key.dataset}.npz")
    if names is None or not path.exists():
        return None
    arrays = run.damage.read(partial(read_arrays, path), dict[str, np.ndarray]())
    if not {name for name in names if name} <= {*arrays}:  # damaged, or of an earlier version
        return None
    answers, others = arrays[names[0]], arrays[names[1]] if names[1] else None
    if key.task != "retrieval":
        return (answers == others).astype(np.float64), np.arange(len(answers))
    return (answers < 1).astype(np.float64), np.arange(len(answers)) if others is None else others
