"""Multinomial logistic regression with an L2 penalty, solved to the optimum for many values of C.

The objective is scikit-learn's, C * (sum of losses) + |W|^2 / 2 with an unpenalised intercept. Internally it is divided
by C n: mean loss + penalty / 2 |W|^2.

Speed comes from:
- Principal axes: features are centred and rotated, which does not change the optimum. If probabilities did not depend
  on features, the Hessian would then be a Kronecker product with a cheap inverse; L-BFGS starts from that inverse.
- Line search in logits: logits are linear along a direction, so a trial step needs no product with the features. One
  iteration is two products, whatever the number of trial steps.
- Warm starts: each C starts on the line through the two solutions nearest in log C.
- float32: losses and residuals are computed from the wrong classes alone, without subtracting from 1, and so keep
  their digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from clipzoo.evaluation.probe.minimizer import Minimizer

ROWS_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class Solution:
    """weight [d, k] and bias [k] in float64; objective: scikit-learn's divided by C n."""

    weight: Tensor
    bias: Tensor
    objective: float
    iterations: int
    converged: bool

    def logits(self, features: Tensor) -> Tensor:
        """Features [m, d] -> logits [m, k] in float64."""
        return torch.cat([torch.addmm(self.bias, rows.double(), self.weight) for rows in features.split(ROWS_AT_ONCE)])


class LogisticRegression:
    """Regression on features [n, d] with labels [n] in 0 .. classes - 1, prepared once for many values of C."""

    def __init__(self, features: Tensor, labels: Tensor, classes: int) -> None:
        self._labels = labels
        self._classes = classes
        self._center = features.mean(dim=0, dtype=torch.float64)
        # Singular values and axes come from the features' triangular factor: the eigenvalues of their covariance lose
        # all digits of axes whose deviation is below 1e-8 of the largest, and large C makes use of such axes.
        triangle = features.new_zeros(0, features.shape[1], dtype=torch.float64)
        for block in self._centred(features):
            triangle = torch.linalg.qr(torch.cat([triangle, block]), mode="r").R
        _, spreads, axes = torch.linalg.svd(triangle, full_matrices=False)
        # Along axes without variance the weights are zero at the optimum.
        varying = spreads > spreads[0] * max(features.shape) * torch.finfo(torch.float64).eps
        self._axes = axes[varying].mT  # [d, r]
        self._variances = (spreads[varying].square() / len(features)).float()
        self._features = torch.cat([(block @ self._axes).float() for block in self._centred(features)])  # [n, r]
        self._solutions: dict[float, Tensor] = {}

    def solve(self, c: float, tolerance: float = 1e-9, limit: int = 1000) -> Solution:
        """Return the optimum for C = c.

        tolerance: stop when an iteration is expected to lower the objective by less than this fraction of it. limit:
        largest number of iterations; a solution that reaches it is marked as not converged.
        """
        penalty = 1 / (c * len(self._labels))
        if self._classes == 2:
            # For two classes scikit-learn has one weight w; here they are w/2 and -w/2, with half the square of w.
            penalty *= 2
        minimizer = Minimizer(self._features, self._labels, self._variances, self._classes, penalty)
        point, objective, iterations, converged = minimizer.run(self._start(math.log(c)), tolerance, limit)
        self._solutions[math.log(c)] = point
        weight = self._axes @ point[:-1].double()
        return Solution(weight, point[-1].double() - self._center @ weight, objective, iterations, converged)

    def _start(self, log_c: float) -> Tensor:
        """Interpolate or extrapolate the two solutions nearest in log C, one on each side where there are two."""
        if not self._solutions:
            return self._features.new_zeros(self._features.shape[1] + 1, self._classes)
        near = sorted(self._solutions, key=lambda other: abs(other - log_c))
        above, below = [other for other in near if other > log_c], [other for other in near if other <= log_c]
        pair = [below[0], above[0]] if above and below else near[:2]
        if len(pair) < 2:
            return self._solutions[pair[0]]
        share = (log_c - pair[0]) / (pair[1] - pair[0])
        return torch.lerp(self._solutions[pair[0]], self._solutions[pair[1]], share)

    def _centred(self, features: Tensor) -> Iterator[Tensor]:
        for rows in features.split(ROWS_AT_ONCE):
            yield rows.double() - self._center
