"""Tests of differences between two models, and the correction for many of them in one table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

SIGNIFICANT = 0.05
"""Largest probability of any false difference in a table."""


def mcnemar(first: ArrayLike, second: ArrayLike) -> float:
    """Return McNemar's exact two-sided p-value of "both models are right equally often".

    first, second: [n], True where the model is right, for the same samples. 1 if they never disagree.
    """
    right, others = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if right.shape != others.shape:
        raise ValueError(f"McNemar's test pairs the same samples, not {len(right)} and {len(others)}")
    only_first, only_second = int((right & ~others).sum()), int((others & ~right).sum())
    return float(stats.binomtest(only_first, only_first + only_second).pvalue) if only_first + only_second else 1.0


def sign_flip(differences: ArrayLike, clusters: ArrayLike, resamples: int = 9999, seed: int = 0) -> float:
    """Return the two-sided p-value of "both models are equally good" by a permutation test of clustered samples.

    differences: [n], outcome of the second model less that of the first. clusters: [n], see `over_samples`; the models
    are exchanged in a whole cluster at a time.
    """
    owner = np.unique(np.asarray(clusters), return_inverse=True)[1]
    sums = np.bincount(owner, np.asarray(differences, dtype=np.float64))
    sums = sums[sums != 0]
    if not len(sums):
        return 1.0
    generator, reached = np.random.default_rng(seed), 0
    step = max(1, 4_000_000 // len(sums))
    for start in range(0, resamples, step):
        signs = generator.integers(2, size=(min(step, resamples - start), len(sums))) * 2 - 1
        reached += int((np.abs(signs @ sums) >= abs(sums.sum()) - 1e-9).sum())
    return (1 + reached) / (1 + resamples)


def welch(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Welch's two-sided p-value of "both methods have the same mean over seeds"; 1 with fewer than two seeds.

    Results without any spread are the same or certainly different: 1 or 0.
    """
    if min(len(first), len(second)) < 2:
        return 1.0
    if np.ptp(first) == 0 and np.ptp(second) == 0:
        return float(first[0] == second[0])
    return float(stats.ttest_ind(first, second, equal_var=False).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values: rejecting those below 0.05 makes any false rejection at most 5 % likely."""
    count = len(p_values)
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(count, 0, -1)
    adjusted = np.minimum(1.0, np.maximum.accumulate(np.asarray(p_values, dtype=np.float64)[order] * factors))
    result = np.empty(count)
    result[order] = adjusted
    return [float(value) for value in result]
