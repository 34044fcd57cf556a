"""Confidence intervals over seeds (Student's t) and over samples (bootstrap, of clusters where samples share one)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

LEVEL = 0.95
"""Probability with which an interval contains the true value."""
RESAMPLES = 2000
"""Bootstrap resamples. The ends of a 95 % interval then vary by a few hundredths of its length."""
_AT_ONCE = 4_000_000
"""Largest number of resampled values in memory."""


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its confidence interval."""

    estimate: float
    low: float
    high: float

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def is_separated(self) -> bool:
        """True if the interval, of a difference, does not contain 0."""
        return not self.contains(0.0)

    @property
    def text(self) -> str:
        """The estimate with the ends in brackets, such as "31.2 [29.8, 32.6]"."""
        return f"{self.estimate:.4g} [{self.low:.4g}, {self.high:.4g}]"


def over_seeds(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Return Student's t interval of the mean over runs that differ in their seed alone.

    Exact for normally distributed results. A single run has an unbounded interval.
    """
    mean, spread = float(np.mean(values)), _standard_error(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    half = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * spread
    return Interval(mean, mean - half, mean + half)


def difference_over_seeds(first: Sequence[float], second: Sequence[float], level: float = LEVEL) -> Interval:
    """Return Welch's interval of mean(second) - mean(first), for runs whose seeds have nothing in common.

    Unbounded if both sides have a single run, or one side has one and the other no spread.
    """
    estimate = float(np.mean(second) - np.mean(first))
    if min(len(first), len(second)) < 2:
        return Interval(estimate, -math.inf, math.inf)
    spread = math.hypot(_standard_error(first), _standard_error(second))
    if spread == 0.0:
        return Interval(estimate, estimate, estimate)
    freedom = spread**4 / sum(_standard_error(side) ** 4 / (len(side) - 1) for side in (first, second))
    half = float(stats.t.ppf((1 + level) / 2, freedom)) * spread
    return Interval(estimate, estimate - half, estimate + half)


def over_samples(
    values: ArrayLike,
    clusters: ArrayLike | None = None,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return the bootstrap interval of the mean of per-sample outcomes.

    Args:
        values: [n], such as 1 for a right and 0 for a wrong answer; for a difference of two models on the same samples,
            the differences of their outcomes.
        clusters: [n], equal for samples that are drawn together, such as the captions of one picture: whole clusters
            are resampled. None: every sample is its own.
    """
    outcomes = np.asarray(values, dtype=np.float64)
    if outcomes.ndim != 1 or not len(outcomes):
        raise ValueError(f"per-sample outcomes form one dimension of at least one sample, not shape {outcomes.shape}")
    sums: np.ndarray = outcomes
    sizes: np.ndarray = np.ones(len(outcomes))
    if clusters is not None:
        owner = np.unique(np.asarray(clusters), return_inverse=True)[1]
        sums, sizes = np.bincount(owner, outcomes), np.bincount(owner, np.ones(len(owner)))
    means = _resampled_means(sums, sizes, resamples, seed)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(outcomes.mean()), float(low), float(high))


def paired_difference(
    first: ArrayLike,
    second: ArrayLike,
    clusters: ArrayLike | None = None,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return the paired bootstrap interval of mean(second - first) for outcomes of two models on the same samples."""
    before, after = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if before.shape != after.shape:
        raise ValueError(f"paired outcomes are those of the same samples, not of {len(before)} and {len(after)}")
    return over_samples(after - before, clusters, level, resamples, seed)


def _resampled_means(sums: np.ndarray, sizes: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """[resamples]: means of samples whose clusters are drawn with replacement."""
    generator, count = np.random.default_rng(seed), len(sums)
    means = np.empty(resamples)
    step = max(1, _AT_ONCE // count)
    for start in range(0, resamples, step):
        drawn = generator.integers(count, size=(min(step, resamples - start), count))
        means[start : start + step] = sums[drawn].sum(1) / sizes[drawn].sum(1)
    return means


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
