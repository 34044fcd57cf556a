"""Significance test of CLOOB: the unpaired Wilcoxon rank-sum test, two-sided, at 5 %."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

LEVEL = 0.05
MOST_ARRANGEMENTS = 200_000


def rank_sum(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of "both samples come from one distribution"; equal values share their mean rank.

    Exact up to 200,000 arrangements (ten values against ten); beyond, the normal approximation corrected for ties and
    continuity. Three against three values cannot reach less than 0.1, four against four 0.03.
    """
    if min(len(first), len(second)) < 2:
        raise ValueError(f"a rank-sum test needs two values on both sides, not {len(first)} and {len(second)}")
    ranks = stats.rankdata([*first, *second])
    if math.comb(len(ranks), len(first)) > MOST_ARRANGEMENTS:
        return float(stats.mannwhitneyu(first, second, method="asymptotic").pvalue)
    if len(set(ranks)) == len(ranks):
        return float(stats.mannwhitneyu(first, second, method="exact").pvalue)
    # The exact method of mannwhitneyu ignores ties.
    center = len(first) * (len(ranks) + 1) / 2

    def distance(ranks: np.ndarray, _: np.ndarray, axis: int) -> np.ndarray:
        return np.abs(ranks.sum(axis=axis) - center)

    samples = ranks[: len(first)], ranks[len(first) :]
    test = stats.permutation_test(samples, distance, n_resamples=MOST_ARRANGEMENTS, alternative="greater")
    return float(test.pvalue)
