"""How well scores follow the pointwise mutual information (PMI) of their pairs.

Training with InfoNCE leaves a constant open, so that a score is as good as the PMI if they differ by a constant.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

DIGITS = 9
"""Decimal places to which scores and PMIs are compared."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of scores with the PMI.

    rank_correlation: Spearman's. slope: of the line that predicts the PMI from the score; 1 is calibrated, below 1 the
    scores are too far apart. error: root mean square distance from the PMI plus the best constant, in nats; it is 0 for
    the PMI itself. calibrated_error: the same after the best line.
    """

    rank_correlation: float
    slope: float
    error: float
    calibrated_error: float


def agreement(scores: ArrayLike, pmi: ArrayLike, weights: ArrayLike) -> Agreement:
    """Compare scores with the PMI of the same pairs.

    scores, pmi, weights: of one shape. weights: of the pairs, not negative. Pairs whose PMI is -inf, which no finite
    score can follow, count for the rank correlation alone.
    """
    s, p, w = (np.asarray(values, dtype=np.float64).ravel() for values in (scores, pmi, weights))
    if not s.shape == p.shape == w.shape:
        raise ValueError(f"scores, PMI and weights need one shape, not {s.shape}, {p.shape} and {w.shape}")
    # Equal PMIs differ by rounding, and ranks would tell them apart.
    ranks = (stats.rankdata(s.round(DIGITS)), stats.rankdata(p.round(DIGITS)))
    held = np.isfinite(p) & (w > 0)
    difference = s[held] - p[held]
    spread = difference - np.average(difference, weights=w[held])
    _, slope, residual = _line(s[held], p[held], w[held])
    return Agreement(_line(*ranks, w)[0], slope, float(np.sqrt(np.average(spread**2, weights=w[held]))), residual)


def pair_weights(joint: ArrayLike) -> np.ndarray:
    """Return weights of all pairs: half from their joint probability [s, c], half from the product of its margins.

    These are the pairs that contrastive training compares: matched ones and independent ones.
    """
    probability = np.asarray(joint, dtype=np.float64)
    product = probability.sum(1, keepdims=True) * probability.sum(0, keepdims=True)
    return (probability + product) / 2


def _line(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[float, float, float]:
    """Return correlation, slope and root mean square residual of the weighted least-squares line of y on x."""
    x, y = (values - np.average(values, weights=weights) for values in (x, y))
    xx, xy, yy = (np.average(product, weights=weights) for product in (x * x, x * y, y * y))
    if xx <= 0 or yy <= 0:
        return 0.0, 0.0, float(np.sqrt(max(yy, 0.0)))
    return float(xy / np.sqrt(xx * yy)), float(xy / xx), float(np.sqrt(max(yy - xy * xy / xx, 0.0)))
