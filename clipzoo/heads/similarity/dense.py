"""Scores as a matrix [b, N], for any head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.types import Negatives, Scores, World


class DenseScores(Scores):
    """Scores of a matrix [b, N]; row i has its positive in column `first_positive + i`."""

    def __init__(self, matrix: Tensor, first_positive: int = 0) -> None:
        self._matrix = matrix
        self._first_positive = first_positive

    def positives(self) -> Tensor:
        return self._matrix.diagonal(self._first_positive)

    def log_sum_exp(self, *, exclude_positive: bool = False) -> Tensor:
        matrix = self._matrix
        if exclude_positive:
            # Masked with -inf: a subtraction from the sum would be inexact if the positive dominates it.
            matrix = matrix.clone()
            matrix.diagonal(self._first_positive).fill_(float("-inf"))
        return matrix.logsumexp(dim=1)

    def scaled(self, scaling: Callable[[Tensor], Tensor]) -> Scores:
        return DenseScores(scaling(self._matrix), self._first_positive)

    def binary_cross_entropy(self, scale: Tensor, bias: Tensor) -> Tensor:
        logits = scale * self._matrix + bias
        labels = torch.full_like(logits, -1.0)
        labels.diagonal(self._first_positive).fill_(1.0)
        return -functional.logsigmoid(labels * logits).sum(dim=1).mean()

    def squared_distance(self, other: Scores) -> Tensor:
        return (self._matrix - other.dense()).square().sum(dim=1)

    def negatives(self, temperature: float | Tensor, log_factor: float, offset: Tensor | None = None) -> Negatives:
        return DenseNegatives(self, temperature, log_factor, offset)

    def dense(self) -> Tensor:
        return self._matrix

    @property
    def first_positive(self) -> int:
        return self._first_positive

    @property
    def columns(self) -> int:
        return self._matrix.shape[1]


class DenseNegatives(Negatives):
    """Terms of the negatives as a matrix [b, N]."""

    def __init__(self, scores: Scores, temperature: float | Tensor, log_factor: float, offset: Tensor | None) -> None:
        self._differences = scores.dense() - scores.positives()[:, None]
        shifted = self._differences.detach() if offset is None else self._differences.detach() - offset
        if isinstance(temperature, Tensor):
            own = slice(scores.first_positive, scores.first_positive + len(shifted))
            temperature = temperature[own, None]
        self._temperature = temperature
        self._exponents = shifted / temperature
        self._log_terms = self._exponents + log_factor
        self._log_terms.diagonal(scores.first_positive).fill_(float("-inf"))

    def log_sum(self) -> Tensor:
        return self._log_terms.logsumexp(dim=1)

    def surrogate(self, log_denominator: Tensor) -> Tensor:
        return (self._weights(log_denominator) * self._differences).sum(dim=1).mean()

    def mean_difference(self, log_denominator: Tensor) -> Tensor:
        return (self._weights(log_denominator) * (self._differences.detach() / self._temperature)).sum(dim=1)

    def log_pull(self, log_denominator: Tensor, world: World) -> Callable[[], Tensor]:
        def pulls() -> Tensor:
            local = (self._exponents - log_denominator[:, None]).logsumexp(dim=0)
            return world.gather(local[None]).logsumexp(dim=0)

        return pulls

    def _weights(self, log_denominator: Tensor) -> Tensor:
        return (self._log_terms - log_denominator[:, None]).exp()
