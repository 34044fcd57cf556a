"""Whether two sets of runs differ, as CLOOB tested it: the unpaired Wilcoxon rank-sum test, two-sided, at 5 %."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

LEVEL = 0.05
MOST_ARRANGEMENTS = 200_000


def rank_sum(first: Sequence[float], second: Sequence[float]) -> float:
    """The p-value of "both come from one distribution"; equal values share their mean rank.

    Exact, over all arrangements, up to 200,000 of them (ten against ten); beyond that the normal approximation with
    its corrections for ties and continuity. Three against three can reach no less than 0.1, four against four 0.03.
    """
    if min(len(first), len(second)) == 0:
        raise ValueError("a rank-sum test needs values on both sides")
    ranks = _ranks(np.concatenate([np.asarray(first, float), np.asarray(second, float)]))
    count, chosen = len(ranks), len(first)
    centre = chosen * (count + 1) / 2
    distance = abs(ranks[:chosen].sum() - centre)
    if math.comb(count, chosen) <= MOST_ARRANGEMENTS:
        sums = np.array([sum(each) for each in combinations(ranks.tolist(), chosen)])
        # Ranks are multiples of a half: sums this close are equal.
        return float(np.mean(np.abs(sums - centre) >= distance - 1e-6))
    variance = chosen * (count - chosen) / (count * (count - 1)) * ((ranks - (count + 1) / 2) ** 2).sum()
    return math.erfc(max(distance - 0.5, 0.0) / math.sqrt(2 * variance)) if variance > 0 else 1.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """From 1; equal values have the mean of their places."""
    ordered = np.sort(values)
    below = np.searchsorted(ordered, values, side="left")
    through = np.searchsorted(ordered, values, side="right")
    return (below + through + 1) / 2
