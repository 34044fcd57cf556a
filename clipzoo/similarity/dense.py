"""Scores as a matrix [b, N], for any head."""

from __future__ import annotations

from torch import Tensor

from clipzoo.types import Scores


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

    def dense(self) -> Tensor:
        return self._matrix

    @property
    def first_positive(self) -> int:
        return self._first_positive

    @property
    def columns(self) -> int:
        return self._matrix.shape[1]
