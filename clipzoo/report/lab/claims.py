"""Differences between methods over fresh seeds, and what they say about the papers' claims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clipzoo.report.lab.records import ACCURACY, LOWER_IS_BETTER, SIMILARITY, TASKS, Compared, Lab, Method
from clipzoo.report.statistics.differences import SIGNIFICANT, holm, welch
from clipzoo.report.statistics.intervals import Interval, difference_over_seeds, paired_difference
from clipzoo.report.statistics.power import detectable_difference, seeds_for

MOST_SEEDS = 1000
"""Number of seeds above which the power analysis says "more"."""


@dataclass(frozen=True)
class Difference:
    """A method's metric less that of another method, over seeds.

    samples: interval over the same test samples, of outcomes averaged over the seeds; None for metrics without
    outcomes. p: Welch's, adjusted for all differences that are shown together. deviation: over seeds, pooled. level:
    5 % divided by the number of differences that are shown together, at which Holm's method tests the smallest p.
    """

    comparison: str
    method: str
    other: str
    metric: str
    interval: Interval
    samples: Interval | None
    p: float
    deviation: float
    seeds: int
    level: float = SIGNIFICANT

    @property
    def is_separated(self) -> bool:
        return self.p < SIGNIFICANT

    @property
    def detectable(self) -> float:
        """Smallest difference that as many seeds show with 80 % probability, at the corrected level."""
        return detectable_difference(self.deviation, self.seeds, significance=self.level)

    @property
    def seeds_needed(self) -> int | None:
        """Seeds of each method that would show the measured difference; None for more than MOST_SEEDS."""
        difference = abs(self.interval.estimate)
        if difference == 0 or detectable_difference(self.deviation, MOST_SEEDS, significance=self.level) > difference:
            return None
        return seeds_for(difference, self.deviation, significance=self.level)


def difference(compared: Compared, method: Method, other: Method, metric: str) -> Difference | None:
    """Return method - other; None with fewer than two seeds on a side. p is not adjusted yet."""
    after, before = method.values(metric), other.values(metric)
    if min(len(after), len(before)) < 2:
        return None
    pooled = math.sqrt(float(np.mean([np.var(side, ddof=1) for side in (after, before)])))
    return Difference(
        compared.name, method.name, other.name, metric, difference_over_seeds(before, after),
        _over_samples(method, other, metric), welch(before, after), pooled, min(len(after), len(before)),
    )  # fmt: skip


def adjusted(found: Sequence[Difference]) -> list[Difference]:
    """Adjust the p-values by Holm's method for all of them, and the level of the power analysis by their number."""
    level = SIGNIFICANT / max(1, len(found))
    return [replace(item, p=p, level=level) for item, p in zip(found, holm([item.p for item in found]), strict=True)]


def from_baseline(lab: Lab, metric: str = ACCURACY) -> list[Difference]:
    """Return the differences of all methods from the baseline of their comparison, adjusted together."""
    found = []
    for compared in lab.comparisons:
        base = compared.method(lab.baseline)
        others = [method for method in compared.methods if method is not base]
        found += [item for method in others if base and (item := difference(compared, method, base, metric))]
    return adjusted(found)


@dataclass(frozen=True)
class Verdict:
    """A claim of a paper and its difference, in the direction of the claim; None as long as trainings are missing."""

    says: str
    source: str
    better: str
    than: str
    comparison: str
    metric: str
    measured: Difference | None

    @property
    def gain(self) -> float:
        """The difference, positive where it agrees with the claim."""
        assert self.measured is not None
        sign = -1 if self.metric in LOWER_IS_BETTER else 1
        return sign * self.measured.interval.estimate

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured yet"
        if not self.measured.is_separated:
            return "cannot tell"
        return "holds" if self.gain > 0 else "the opposite holds"

    @property
    def power(self) -> str:
        """Smallest difference that the seeds can show, and the number of seeds for the measured one."""
        if self.measured is None:
            return ""
        unit = "points" if self.metric in TASKS else SIMILARITY[self.metric].partition(", ")[2]
        seen = f"{self.measured.seeds} seeds show {self.measured.detectable:.2g} {unit}".rstrip()
        if self.measured.is_separated:
            return seen
        needed = self.measured.seeds_needed
        return f"{seen}; this difference needs {f'over {MOST_SEEDS}' if needed is None else needed}"


def verdicts(lab: Lab) -> list[Verdict]:
    """Return the claims of a lab with their differences, adjusted for all claims together."""
    parts = {compared.name: compared for compared in lab.comparisons}
    pairs = [(claim, _measured(parts.get(claim["comparison"]), claim)) for claim in lab.facts["claims"]]
    measured = iter(adjusted([found for _, found in pairs if found]))
    return [
        Verdict(
            claim["says"], claim["source"], claim["better"], claim["than"], claim["comparison"], claim["metric"],
            next(measured) if found else None,
        )
        for claim, found in pairs
    ]  # fmt: skip


def _measured(compared: Compared | None, claim: Mapping[str, Any]) -> Difference | None:
    method, other = (compared.method(claim[side]) if compared else None for side in ("better", "than"))
    return difference(compared, method, other, claim["metric"]) if compared and method and other else None


def _over_samples(method: Method, other: Method, metric: str) -> Interval | None:
    """Return the paired bootstrap interval over test samples of outcomes averaged over seeds."""
    after, before = method.mean_outcomes, other.mean_outcomes
    tasks = list(after) if metric == ACCURACY else [metric] if metric in after else []
    if not tasks:
        return None
    # All outcomes of one image, or of its caption, are one cluster.
    clusters = np.concatenate([np.arange(len(after[task])) for task in tasks])
    first, second = (100 * np.concatenate([side[task] for task in tasks]) for side in (before, after))
    return paired_difference(first, second, clusters)
