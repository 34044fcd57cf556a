"""Power of a planned number of seeds: the smallest difference that a t-test detects."""

from __future__ import annotations

import math

from scipy import optimize, stats

from clipzoo.report.statistics.differences import SIGNIFICANT

POWER = 0.8
"""Probability with which the difference is detected."""


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
    seeds = 2
    while detectable_difference(deviation, seeds, power, significance) > difference:
        seeds += 1
    return seeds


def _detectable_shift(freedom: int, power: float, significance: float) -> float:
    """Return the noncentrality at which the t-test with `freedom` degrees rejects with probability `power`."""
    limit = stats.t.ppf(1 - significance / 2, freedom)

    def missing(shift: float) -> float:
        return float(stats.nct.sf(limit, freedom, shift) + stats.nct.cdf(-limit, freedom, shift)) - power

    largest = 1.0
    while missing(largest) < 0:  # scipy has no value for shifts far above it
        largest *= 1.5
    return float(optimize.brentq(missing, 0.0, largest))
