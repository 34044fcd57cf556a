"""Power laws y = floor + factor * x^-exponent of a loss or an error in compute, data or width, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from clipzoo.report.statistics.intervals import LEVEL, Interval

RESAMPLES = 1000
_FLOORS = 16
"""Floors that are tried before the best one is refined."""


@dataclass(frozen=True)
class PowerLaw:
    """A power law; floor: the value at unlimited scale, 0 unless it was fitted. factor: value above it at x = 1."""

    factor: float
    exponent: float
    floor: float = 0.0

    def value(self, x: float) -> float:
        return float(self.floor + self.factor * x**-self.exponent)


@dataclass(frozen=True)
class ScalingFit:
    """A power law with its uncertainty.

    exponent: with its confidence interval. resampled: power laws of the bootstrap's resamples. spread: standard
    deviation of log y around the law, estimated with `freedom` degrees of freedom.
    """

    law: PowerLaw
    exponent: Interval
    resampled: tuple[PowerLaw, ...]
    spread: float
    freedom: int

    def predicted(self, x: float, level: float = LEVEL, seed: int = 0, runs: int = 1) -> Interval:
        """Return the prediction interval of a new measurement at scale x, which need not be among the fitted ones.

        runs: number of measurements whose geometric mean is predicted.
        """
        generator, count = np.random.default_rng(seed), len(self.resampled)
        value = self.law.value(x)
        shifts = np.log([law.value(x) / value for law in self.resampled])
        # The spread is itself an estimate: as in Student's t, both parts are divided by a draw of it.
        estimated = np.sqrt(generator.chisquare(self.freedom, count) / self.freedom)
        errors = (shifts + self.spread * generator.standard_normal(count) / np.sqrt(runs)) / estimated
        low, high = np.quantile(value * np.exp(errors), [(1 - level) / 2, (1 + level) / 2])
        return Interval(value, float(low), float(high))


def fit_power_law(
    x: Sequence[float],
    y: Sequence[float],
    with_floor: bool = False,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> ScalingFit:
    """Fit a power law by least squares of log y; the intervals are those of a studentised bootstrap of the residuals.

    Args:
        x: [n], scale, such as samples, parameters or FLOPs.
        y: [n], loss or error rate.
        with_floor: fit a value that remains at unlimited scale.

    Raises:
        ValueError: values without a logarithm, or fewer than two scales more than the law has parameters.
    """
    if min(*x, *y) <= 0:
        raise ValueError(f"a power law needs values above 0, not {min(*x, *y)}")
    log_x, log_y = np.log(np.asarray(x, dtype=np.float64)), np.log(np.asarray(y, dtype=np.float64))
    parameters = 3 if with_floor else 2
    if len(np.unique(log_x)) < parameters + 2:
        raise ValueError(f"this power law needs {parameters + 2} scales or more, not {len(np.unique(log_x))}")
    best = _fit(log_x, log_y, _start(log_x, log_y) if with_floor else np.zeros(2))
    freedom = len(log_x) - parameters
    residuals = (log_y - _log_value(best.values, log_x)) * np.sqrt(len(log_x) / freedom)
    generator = np.random.default_rng(seed)
    errors = generator.choice(residuals - residuals.mean(), (resamples, len(log_x)))
    fits = [_fit(log_x, _log_value(best.values, log_x) + error, best.values) for error in errors]
    ratios = [(fit.values[1] - best.values[1]) / fit.error for fit in fits if fit.error > 0]
    high, low = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2]) if ratios else (0.0, 0.0)
    exponent, error = float(best.values[1]), best.error
    interval = Interval(exponent, exponent - float(low) * error, exponent - float(high) * error)
    return ScalingFit(_law(best.values), interval, tuple(_law(fit.values) for fit in fits), best.spread, freedom)


@dataclass(frozen=True)
class _Fit:
    """values: log factor, exponent and, if fitted, log floor. error: standard error of the exponent."""

    values: np.ndarray
    error: float
    spread: float


def _fit(log_x: np.ndarray, log_y: np.ndarray, start: np.ndarray) -> _Fit:
    if len(start) == 2:
        slopes = np.stack([np.ones_like(log_x), -log_x], 1)
        values = np.linalg.lstsq(slopes, log_y, rcond=None)[0]
    else:
        fitted = optimize.least_squares(lambda values: _log_value(values, log_x) - log_y, start, method="lm")
        values, slopes = fitted.x, fitted.jac
    spread = float(np.sqrt(np.square(log_y - _log_value(values, log_x)).sum() / (len(log_x) - len(values))))
    return _Fit(values, spread * float(np.sqrt(np.linalg.pinv(slopes.T @ slopes)[1, 1])), spread)


def _start(log_x: np.ndarray, log_y: np.ndarray) -> np.ndarray:
    """Return the best of some floors below the smallest value, with the straight line that goes with it."""
    candidates = []
    for share in np.linspace(0.01, 0.97, _FLOORS):
        log_floor = float(log_y.min() + np.log(share))
        line = _fit(log_x, np.log(np.exp(log_y) - np.exp(log_floor)), np.zeros(2))
        values = np.append(line.values, log_floor)
        candidates.append((float(np.square(log_y - _log_value(values, log_x)).sum()), values))
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _log_value(values: np.ndarray, log_x: np.ndarray) -> np.ndarray:
    line: np.ndarray = values[0] - values[1] * log_x
    return line if len(values) == 2 else np.logaddexp(line, values[2])


def _law(values: np.ndarray) -> PowerLaw:
    with np.errstate(over="ignore"):  # a resample that no power law fits has an infinite factor
        return PowerLaw(*(float(value) for value in (np.exp(values[0]), values[1], *np.exp(values[2:]))))
