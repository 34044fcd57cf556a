"""Multinomial logistic regression with an L2 penalty, solved to the optimum for many values of C.

The objective is scikit-learn's, C * (sum of losses) + |W|^2 / 2 with an unpenalised intercept. Internally it is divided
by C n: mean loss + penalty / 2 |W|^2.

Speed comes from:
- Principal axes: features are centred and rotated, which does not change the optimum. If probabilities did not depend
  on features, the Hessian would then be a Kronecker product with a cheap inverse; L-BFGS starts from that inverse.
- Line search in logits: logits are linear along a direction, so a trial step needs no product with the features. One
  iteration takes two products, for any number of trial steps.
- Warm starts: each C starts on the line through the two solutions nearest in log C.
- Classes first: logits are [k, n]. With few classes, products of [n, r] and [r, k], and sums over k neighbours, take
  several times as long.
- float32: losses and residuals are computed from the wrong classes only, without subtracting from 1, and so keep
  their digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

MEMORY = 10
"""Steps that L-BFGS remembers."""
BLOCK_LOGITS = 1 << 26
"""Logits whose exponentials are in memory at a time: 256 MiB."""
ROWS_AT_ONCE = 1 << 17
"""Rows of features that are in memory in float64 at a time."""
SAMPLED_ROWS = 1 << 16
"""Largest number of samples that the preconditioner is computed from."""
ROUNDING = 1e-6
"""Relative rounding error of an objective in float32."""
TOLERANCE, SEARCH_TOLERANCE = 1e-9, 1e-7
"""Tolerances of the final fit and of fits during the search for C: see `LogisticRegression.solve`."""


class LogisticRegression:
    """Regression on features [n, d] with labels [n] in 0 .. classes - 1, prepared once for many values of C.

    Internally features are [n, r], centred and uncorrelated. Weight and bias are one matrix [k, r + 1], the bias last.
    Logits [k, n] are relative to the logit of the sample's class.
    """

    def __init__(self, features: Tensor, labels: Tensor, classes: int) -> None:
        self._labels, self._classes = labels[None], classes
        self._columns = max(1, BLOCK_LOGITS // classes)
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

    def rows(self, chosen: Tensor) -> LogisticRegression:
        """Return the regression on the rows of a mask [n] or of indices, along the same axes."""
        part = copy(self)
        part._labels, part._features, part._solutions = self._labels[:, chosen], self._features[chosen], {}
        part._variances = part._features.square().mean(dim=0)
        return part

    def solve(self, c: float, limit: int = 1000, tolerance: float = TOLERANCE) -> Solution:
        """Return the optimum for C = c. limit: iterations, after which a solution is marked as not converged.

        tolerance: a fit has converged when an iteration is expected to lower the objective by less than this fraction.
        """
        penalty = 1 / (c * len(self._features))
        if self._classes == 2:
            # For two classes scikit-learn has one weight w; here they are w/2 and -w/2, with half the square of w.
            penalty *= 2

        # Start on the line through the two solutions nearest in log C, one on each side where there are two.
        log_c, solutions = math.log(c), self._solutions
        near = sorted(solutions, key=lambda other: abs(other - log_c))
        above, below = [other for other in near if other > log_c], [other for other in near if other <= log_c]
        pair = [below[0], above[0]] if above and below else near[:2]
        if len(pair) == 2:
            share = (log_c - pair[0]) / (pair[1] - pair[0])
            start = torch.lerp(solutions[pair[0]], solutions[pair[1]], share)
        elif pair:
            start = solutions[pair[0]]
        else:
            start = self._features.new_zeros(self._classes, self._features.shape[1] + 1)
        point, objective, iterations, converged = self._minimize(start, penalty, limit, tolerance)
        solutions[log_c] = point
        # Several times as fast as the axes times the transposed point.
        weight = (point[:, :-1].double() @ self._axes.mT).mT.contiguous()
        return Solution(weight, point[:, -1].double() - self._center @ weight, objective, iterations, converged)

    def _centred(self, features: Tensor) -> Iterator[Tensor]:
        for rows in features.split(ROWS_AT_ONCE):
            yield rows.double() - self._center

    def _minimize(self, point: Tensor, penalty: float, limit: int, tolerance: float) -> tuple[Tensor, float, int, bool]:
        """Minimize mean loss + penalty / 2 |W|^2 -> the optimum, its objective, the iterations, True if converged."""
        logits = self._relative_logits(point, -math.inf)
        losses = [Odds(logits[block]).losses().sum(dtype=torch.float64).item() for block in self._blocks()]
        objective = sum(losses) / len(self._features) + penalty / 2 * _dot(point[:, :-1], point[:, :-1])
        gradient = self._gradient(logits, point, penalty)
        moves = changes = point.new_empty(0, *point.shape)
        renewal, small = 0, 0
        for iteration in range(limit):
            if iteration == renewal:
                preconditioner = _preconditioner(logits, self._labels, self._variances, penalty)
                renewal = 2 * renewal + 20
            direction = -_inverse_hessian(gradient, preconditioner, moves, changes)
            slope = _dot(gradient, direction)
            # The quadratic model predicts a decrease by half the slope.
            small = small + 1 if -slope / 2 <= tolerance * objective else 0
            if small == 2:
                return point, objective, iteration, True
            along = self._relative_logits(direction, 0.0)
            searched = self._line_search(logits, along, point, direction, objective, slope, penalty)
            if searched is None:
                within_rounding = -slope / 2 <= ROUNDING * objective
                if within_rounding or not len(moves):
                    return point, objective, iteration, within_rounding
                # Earlier curvatures are misleading after losses have changed by orders of magnitude.
                moves = changes = moves[:0]
                renewal = iteration + 1
                continue
            step, objective = searched
            move = step * direction
            point = point + move
            logits.add_(along, alpha=step)
            previous, gradient = gradient, self._gradient(logits, point, penalty)
            change = gradient - previous
            if _dot(move, change) > 0:
                moves, changes = torch.cat([moves, move[None]]), torch.cat([changes, change[None]])
                moves, changes = moves[-MEMORY:], changes[-MEMORY:]
        return point, objective, limit, False

    def _line_search(
        self, logits: Tensor, along: Tensor, point: Tensor, direction: Tensor, objective: float, slope: float,
        penalty: float,
    ) -> tuple[float, float] | None:  # fmt: skip
        """Return the length of a step and its objective, by Newton's method; None if no step lowers the objective.

        If no tested step satisfies the condition on the slope, the step with the lowest objective is returned.
        """
        weight, change = point[:, :-1], direction[:, :-1]
        direction_square, mixed, weight_square = _dot(change, change), _dot(weight, change), _dot(weight, weight)
        # Near the optimum rounding hides the decrease; as the line is convex, a smaller slope is proof enough.
        highest = objective * (1 + ROUNDING)
        step, best, lowest = 1.0, 0.0, objective
        for _ in range(20):
            loss, first, second = self._derivatives(logits, along, step)
            value = loss + penalty / 2 * (weight_square + 2 * step * mixed + step**2 * direction_square)
            first += penalty * (mixed + step * direction_square)
            second += penalty * direction_square
            is_lower = value <= highest
            if is_lower and abs(first) <= 0.4 * abs(slope):
                return step, value
            if value < lowest:
                best, lowest = step, value
            next_step = step - first / second
            # Far from the current step the quadratic model is not trusted.
            next_step = min(max(next_step, step / 4), 4 * step)
            step = step / 2 if not is_lower and next_step >= step else next_step
        return (best, lowest) if lowest < objective else None

    def _blocks(self) -> Iterator[tuple[slice, slice]]:
        for start in range(0, len(self._features), self._columns):
            yield slice(None), slice(start, start + self._columns)

    def _relative_logits(self, point: Tensor, own: float) -> Tensor:
        """[k, r + 1] -> [k, n]: logits minus the logit of the own class, whose entry is `own`."""
        logits = torch.addmm(point[:, -1:], point[:, :-1], self._features.mT)
        return logits.sub_(logits.gather(0, self._labels)).scatter_(0, self._labels, own)

    def _derivatives(self, logits: Tensor, along: Tensor, step: float) -> tuple[float, float, float]:
        """Mean loss at logits + step * along, and its first and second derivative with respect to the step."""
        sums = torch.zeros(3, dtype=torch.float64, device=logits.device)
        for block in self._blocks():
            change = along[block]
            odds = Odds(torch.add(logits[block], change, alpha=step))
            weighted = odds.wrong * change
            mean = weighted.sum(0) / odds.total
            spread = weighted.mul_(change).sum(0) / odds.total - mean.square()
            sums += torch.stack([odds.losses(), mean, spread]).sum(1, dtype=torch.float64)
        loss, first, second = (sums / len(self._features)).tolist()
        return loss, first, second

    def _gradient(self, logits: Tensor, point: Tensor, penalty: float) -> Tensor:
        gradient = torch.zeros_like(point)
        for block in self._blocks():
            odds, labels = Odds(logits[block]), self._labels[block]
            residual = (odds.wrong / odds.total).scatter_(0, labels, -(odds.sum / odds.total)[None])
            gradient[:, :-1].addmm_(residual, self._features[block[1]])
            gradient[:, -1] += residual.sum(1)
        gradient /= len(self._features)
        gradient[:, :-1] += penalty * point[:, :-1]
        return gradient


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


class Odds:
    """Exponentials of relative logits [k, b] that are -inf for the own class, scaled by exp(-highest logit).

    wrong: [k, b], of the wrong classes. sum: [b], their sum. own: [b], of the own class. total: [b].
    Nothing is subtracted from 1, so that small losses keep all their digits.
    """

    def __init__(self, logits: Tensor) -> None:
        self._highest = logits.amax(0).clamp_(min=0)
        self.wrong = (logits - self._highest).exp_()
        self.sum = self.wrong.sum(0)
        self.own = (-self._highest).exp()
        self.total = self.sum + self.own

    def losses(self) -> Tensor:
        """[b]: negative log-probability of the own class."""
        return self._highest + torch.log1p(torch.expm1(-self._highest) + self.sum)


def _preconditioner(logits: Tensor, labels: Tensor, variances: Tensor, penalty: float) -> Callable[[Tensor], Tensor]:
    """Inverse Hessian under the assumption that probabilities do not depend on features: (A x variances + penalty)^-1.

    A [k, k] is the mean over samples of diag(p) - p p^T. Both factors are diagonal in their eigenvectors.
    """
    sampled = slice(None), slice(None, None, -(-labels.shape[1] // SAMPLED_ROWS))
    odds, labels = Odds(logits[sampled]), labels[sampled]
    probabilities = (odds.wrong / odds.total).scatter_(0, labels, (odds.own / odds.total)[None])
    complements = (1 - probabilities).scatter_(0, labels, (odds.sum / odds.total)[None])
    spread = -(probabilities @ probabilities.mT) / labels.shape[1]
    spread.diagonal().copy_((probabilities * complements).mean(1))
    values, axes = torch.linalg.eigh(spread)
    values = values.clamp(min=values[-1].item() * 1e-7)[:, None]
    # The last column is the bias, without penalty.
    divisors = torch.cat([values * variances + penalty, values], dim=1)  # [k, r + 1]

    def apply(gradient: Tensor) -> Tensor:
        result = axes @ (axes.mT @ gradient / divisors)
        # A change common to all classes lies in A's null space, where the result is only rounding error.
        return result - result.mean(dim=0)

    return apply


def _inverse_hessian(
    gradient: Tensor, preconditioner: Callable[[Tensor], Tensor], moves: Tensor, changes: Tensor
) -> Tensor:
    """Two-loop recursion of L-BFGS (Nocedal and Wright, algorithm 7.4); each loop solves a triangular system.

    moves, changes [m, k, r + 1]: the latest steps and the changes of the gradient, oldest first.
    """
    if not len(moves):
        return preconditioner(gradient)
    s, y = moves.flatten(1), changes.flatten(1)
    triangle = (s @ y.mT).triu()
    shares = torch.linalg.solve_triangular(triangle, s @ gradient.view(-1, 1), upper=True)
    result = preconditioner(gradient - (y.mT @ shares).view_as(gradient))
    shares = triangle.diagonal()[:, None] * shares - y @ result.view(-1, 1)
    return result + (s.mT @ torch.linalg.solve_triangular(triangle.mT, shares, upper=False)).view_as(result)


def _dot(a: Tensor, b: Tensor) -> float:
    return torch.dot(a.flatten(), b.flatten()).item()
