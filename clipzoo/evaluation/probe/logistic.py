"""Multinomial logistic regression with an L2 penalty, to the optimum, for many penalties.

The objective is scikit-learn's: C * (sum of the samples' losses) + |W|^2 / 2, the intercept not penalised. Inside, it
is divided by C n: mean loss + penalty / 2 |W|^2.

What makes it fast:
- Features are centred and turned to their principal axes, which changes no optimum. Were probabilities independent of
  features, the Hessian would now be a Kronecker product, inverted in two small products: L-BFGS starts from that.
- Logits along a direction are a straight line, so trying a step costs no product with the features. An iteration is
  two products, however many steps are tried.
- Each C starts from the line through the solutions of its two nearest neighbours.
- float32 suffices to the last digits that matter, because losses and residuals are computed from the wrong classes
  alone: nothing is subtracted from 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from clipzoo.evaluation.probe.logistic_descent import Descent

ROWS_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class Solution:
    """weight [d, k] and bias [k] in float64; objective: scikit-learn's, divided by C n."""

    weight: Tensor
    bias: Tensor
    objective: float
    iterations: int
    converged: bool

    def logits(self, features: Tensor) -> Tensor:
        """[m, d] -> [m, k] float64."""
        return torch.cat([torch.addmm(self.bias, rows.double(), self.weight) for rows in features.split(ROWS_AT_ONCE)])


class LogisticRegression:
    """features [n, d] and labels [n] in 0 .. classes - 1, prepared once for many values of C."""

    def __init__(self, features: Tensor, labels: Tensor, classes: int) -> None:
        self._labels = labels
        self._classes = classes
        self._center = features.mean(dim=0, dtype=torch.float64)
        blocks = self._centred(features)
        variances, axes = torch.linalg.eigh(sum((each.mT @ each for each in blocks), start=torch.zeros(())))
        # What the samples do not vary in cannot tell them apart: its weights are zero at the optimum.
        kept = variances > variances[-1] * 1e-14
        self._axes = axes[:, kept]  # [d, r]
        self._variances = (variances[kept] / len(features)).float()
        self._features = torch.cat([(each @ self._axes).float() for each in self._centred(features)])  # [n, r]
        self._solved: dict[float, Tensor] = {}

    def solve(self, c: float, tolerance: float = 1e-9, limit: int = 1000) -> Solution:
        """The optimum for C = c. Stops when iterations promise to lower the objective by less than `tolerance` of it.

        Not converged when `limit` iterations were not enough.
        """
        penalty = 1 / (c * len(self._labels))
        if self._classes == 2:
            # Two classes have one weight w in scikit-learn; here w/2 and -w/2, whose square is half of w's.
            penalty *= 2
        descent = Descent(self._features, self._labels, self._variances, self._classes, penalty)
        point, objective, iterations, converged = descent.run(self._start(math.log(c)), tolerance, limit)
        self._solved[math.log(c)] = point
        weight = self._axes @ point[:-1].double()
        return Solution(weight, point[-1].double() - self._center @ weight, objective, iterations, converged)

    def _start(self, place: float) -> Tensor:
        """On the line through the two solutions that are nearest in log C, on both sides of it where there are two."""
        if not self._solved:
            return self._features.new_zeros(self._features.shape[1] + 1, self._classes)
        near = sorted(self._solved, key=lambda other: abs(other - place))
        above, below = [each for each in near if each > place], [each for each in near if each <= place]
        pair = [below[0], above[0]] if above and below else near[:2]
        if len(pair) < 2:
            return self._solved[pair[0]]
        share = (place - pair[0]) / (pair[1] - pair[0])
        return torch.lerp(self._solved[pair[0]], self._solved[pair[1]], share)

    def _centred(self, features: Tensor) -> Iterator[Tensor]:
        for rows in features.split(ROWS_AT_ONCE):
            yield rows.double() - self._center
