"""Pairs of random unit vectors, and all answers of their scores with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipzoo.heads.scores import DenseScores
from clipzoo.types import Scores, Similarity

WIDTH = 5


def factors(samples: int, scale: float) -> tuple[Tensor, Tensor]:
    """Unit vectors, the left ones times `scale`, each pair alike; exact in float32."""
    generator = torch.Generator().manual_seed(samples)
    left = torch.randn(samples, WIDTH, generator=generator)
    right = left + torch.randn(samples, WIDTH, generator=generator)
    return (scale * normalize(left, dim=1)).double(), normalize(right, dim=1).double()


def dense_scores(left: Tensor, right: Tensor) -> tuple[Scores, Scores]:
    matrix = left @ right.mT
    return Similarity(DenseScores(matrix), DenseScores(matrix.mT)).directions


def answered(
    left: Tensor,
    right: Tensor,
    make: Callable[[Tensor, Tensor], Sequence[Scores]],
    exclude: Sequence[bool] = (False, True),
    dense: bool = True,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """All answers of the scores that `make` returns, and the gradients of a random weighted sum of them."""
    left, right = (vectors.clone().requires_grad_() for vectors in (left, right))
    answers = []
    for scores in make(left, right):
        answers += [scores.positives(), *(scores.log_sum_exp(exclude_positive=excluded) for excluded in exclude)]
        answers += [scores.dense().flatten()] if dense else []
    joined = torch.cat(answers)
    upstream = torch.randn(len(joined), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return joined.detach(), torch.autograd.grad(joined, (left, right), upstream.to(joined.dtype))
