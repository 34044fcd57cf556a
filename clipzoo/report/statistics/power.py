"""Power of a planned number of seeds: the smallest difference that a t-test detects."""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize, stats

from clipzoo.report.statistics.differences import SIGNIFICANT

POWER = 0.8
"""Probability with which the difference is detected."""
_TAIL = 1e-14
"""Probability that the quadrature leaves out on either side."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(400)


def detectable_difference(
    deviation: float, seeds: int, power: float = POWER, significance: float = SIGNIFICANT
) -> float:
    """Return the smallest difference of two means that a two-sided t-test detects with probability `power`.

    Args:
        deviation: standard deviation over seeds, of both methods.
        seeds: number of runs of each method, at least 2.
    """
    if seeds < 2:
        return math.inf
    return deviation * math.sqrt(2 / seeds) * _detectable_shift(2 * (seeds - 1), power, significance)


def seeds_for(difference: float, deviation: float, power: float = POWER, significance: float = SIGNIFICANT) -> int:
    """Return the number of seeds of each method with which a difference is detected with probability `power`."""
    if difference <= 0:
        raise ValueError(f"the difference to detect must be above 0, not {difference}")
    enough = 2
    while detectable_difference(deviation, enough, power, significance) > difference:
        enough *= 2
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if detectable_difference(deviation, middle, power, significance) > difference:
            too_few = middle
        else:
            enough = middle
    return enough


def _detectable_shift(freedom: int, power: float, significance: float) -> float:
    """Return the noncentrality at which the t-test with `freedom` degrees rejects with probability `power`."""
    limit = float(stats.t.isf(significance / 2, freedom))
    largest = 1.0
    while _rejected(largest, limit, freedom) < power:
        largest *= 1.5
    return float(optimize.brentq(lambda shift: _rejected(shift, limit, freedom) - power, 0.0, largest))


def _rejected(shift: float, limit: float, freedom: int) -> float:
    """Return P(|T| > limit) for Student's noncentral t, by quadrature: scipy's own is NaN for large limits."""
    low, high = stats.chi2.ppf([_TAIL, 1 - _TAIL], freedom)
    places = low + (high - low) * (_NODES + 1) / 2
    thresholds = limit * np.sqrt(places / freedom)
    outside = stats.norm.sf(thresholds - shift) + stats.norm.cdf(-thresholds - shift)
    return float((high - low) / 2 * (_WEIGHTS * stats.chi2.pdf(places, freedom)) @ outside)
