"""Multinomial logistic regression with an L2 penalty, to the optimum, for many penalties.

The objective is scikit-learn's: C * (sum of the samples' losses) + |W|^2 / 2, the intercept not penalised. Inside,
it is divided by C n.

What makes it fast:
- Features are centred and rotated to their principal axes. Neither changes the optimum, and the Hessian becomes nearly
  diagonal: L-BFGS starts from the inverse of that diagonal, which is renewed as the probabilities move.
- The line search works on logits: logits along a direction are a line, so trying a step costs no product with the
  features. An iteration is two products, however many steps are tried.
- A search over C starts each solution from its nearest neighbour's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

MEMORY = 10


@dataclass(frozen=True)
class Solution:
    """weight [d, k] and bias [k] for centred, rotated features; objective: scikit-learn's, divided by C n."""

    weight: Tensor
    bias: Tensor
    objective: float
    iterations: int
    converged: bool


class LogisticRegression:
    """features [n, d] and labels [n] in 0 .. classes - 1, prepared once for many values of C."""

    def __init__(self, features: Tensor, labels: Tensor, classes: int) -> None:
        self.labels = labels
        self.classes = classes
        self.center = features.mean(dim=0, dtype=torch.float64).to(features.dtype)
        centred = features - self.center
        covariance = (centred.mT @ centred).double() / len(features)
        variances, axes = torch.linalg.eigh(covariance)
        # Directions without variance cannot change a logit.
        kept = variances > variances[-1] * 1e-14
        self.variances, self.axes = variances[kept].to(features.dtype), axes[:, kept].to(features.dtype)
        self.features = centred @ self.axes  # [n, r]

    def solve(self, c: float, start: Solution | None = None, tolerance: float = 1e-9, limit: int = 1000) -> Solution:
        """The optimum for C = c, to a relative `tolerance` of the objective, in at most `limit` iterations."""
        return _Descent(self, 1 / (c * len(self.labels))).run(start, tolerance, limit)

    def logits(self, solution: Solution, features: Tensor) -> Tensor:
        """[m, d] as given to the constructor -> [m, classes]."""
        return ((features - self.center) @ self.axes) @ solution.weight + solution.bias

    def coefficients(self, solution: Solution) -> tuple[Tensor, Tensor]:
        """Weight [d, classes] and bias [classes] for features as they are given."""
        weight = self.axes @ solution.weight
        return weight, solution.bias - self.center @ weight


class _Descent:
    """One minimisation of mean loss + penalty / 2 |W|^2. Weight and bias travel as one [r + 1, k] matrix."""

    def __init__(self, problem: LogisticRegression, penalty: float) -> None:
        self.features, self.labels = problem.features, problem.labels
        self.count = len(problem.labels)
        self.shape = (problem.features.shape[1] + 1, problem.classes)
        self.penalty = penalty
        self.scales = torch.cat([problem.variances, problem.variances.new_ones(1)])[:, None]
        self.penalties = torch.cat([torch.full_like(problem.variances, penalty), problem.variances.new_zeros(1)])[
            :, None
        ]

    def run(self, start: Solution | None, tolerance: float, limit: int) -> Solution:
        point = self.features.new_zeros(self.shape)
        if start is not None:
            point = torch.cat([start.weight, start.bias[None]])
        logits = self._apply(point)
        objective, probabilities = self._objective(logits, point)
        gradient = self._gradient(probabilities, point)
        history: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=MEMORY)
        small = 0
        for iteration in range(limit):
            direction = -self._inverse_hessian(gradient, self._diagonal(probabilities), history)
            slope = _dot(gradient, direction)
            # Half the slope is the decrease that the quadratic model promises.
            small = small + 1 if -slope / 2 <= tolerance * abs(objective) else 0
            if small == 2:
                return self._solution(point, objective, iteration, True)
            along = self._apply(direction)
            step, objective, probabilities = self._step(logits, along, point, direction, objective, slope)
            if step == 0:
                if not history:
                    return self._solution(point, objective, iteration, True)
                history.clear()
                continue
            point = point + step * direction
            logits = logits.add_(along, alpha=step)
            previous, gradient = gradient, self._gradient(probabilities, point)
            change = gradient - previous
            curvature = step * _dot(direction, change)
            if curvature > 0:
                history.append((step * direction, change, curvature))
        return self._solution(point, objective, limit, False)

    def _step(
        self, logits: Tensor, along: Tensor, point: Tensor, direction: Tensor, objective: float, slope: float
    ) -> tuple[float, float, Tensor]:
        """A step that satisfies both Wolfe conditions, its objective and probabilities; 0 where none descends."""
        low, high, step = 0.0, float("inf"), 1.0
        for _ in range(30):
            there = point + step * direction
            value, probabilities = self._objective(logits + step * along, there)
            if value > objective + 1e-4 * step * slope:
                high = step
            else:
                now = self._slope(probabilities, along, there, direction)
                if now >= 0.9 * slope:
                    return step, value, probabilities
                low = step
            step = (low + high) / 2 if high < float("inf") else 2 * low
        value, probabilities = self._objective(logits, point)
        return 0.0, value, probabilities

    def _apply(self, point: Tensor) -> Tensor:
        """[r + 1, k] -> logits [n, k]."""
        return torch.addmm(point[-1], self.features, point[:-1])

    def _objective(self, logits: Tensor, point: Tensor) -> tuple[float, Tensor]:
        own = logits.gather(1, self.labels[:, None])[:, 0]
        losses = logits.logsumexp(dim=1) - own
        penalty = 0.5 * self.penalty * _dot(point[:-1], point[:-1])
        return losses.mean(dtype=torch.float64).item() + penalty, logits.softmax(dim=1)

    def _gradient(self, probabilities: Tensor, point: Tensor) -> Tensor:
        residual = probabilities.clone()
        residual[torch.arange(self.count, device=residual.device), self.labels] -= 1
        gradient = torch.cat([self.features.mT @ residual, residual.sum(dim=0, keepdim=True)]) / self.count
        return gradient + self.penalties * point

    def _slope(self, probabilities: Tensor, along: Tensor, point: Tensor, direction: Tensor) -> float:
        expected = (probabilities * along).sum(dim=1) - along.gather(1, self.labels[:, None])[:, 0]
        return expected.mean(dtype=torch.float64).item() + self.penalty * _dot(point[:-1], direction[:-1])

    def _diagonal(self, probabilities: Tensor) -> Tensor:
        """The Hessian's diagonal if probabilities and features were independent, [r + 1, k]."""
        spread = (probabilities * (1 - probabilities)).mean(dim=0)
        return self.scales * spread.clamp(min=1e-12) + self.penalties

    def _inverse_hessian(
        self, gradient: Tensor, diagonal: Tensor, history: deque[tuple[Tensor, Tensor, float]]
    ) -> Tensor:
        """The two-loop recursion of L-BFGS (Nocedal and Wright, algorithm 7.4)."""
        result = gradient.clone()
        shares = []
        for move, change, curvature in reversed(history):
            share = _dot(move, result) / curvature
            result -= share * change
            shares.append(share)
        result /= diagonal
        for (move, change, curvature), share in zip(history, reversed(shares), strict=True):
            result += (share - _dot(change, result) / curvature) * move
        return result

    def _solution(self, point: Tensor, objective: float, iterations: int, converged: bool) -> Solution:
        return Solution(point[:-1], point[-1], objective, iterations, converged)


def _dot(a: Tensor, b: Tensor) -> float:
    return torch.dot(a.flatten(), b.flatten()).item()
