"""Random point sets for KME scores, and the scores and gradients of sums over all pairs of points."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Sets = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""points [n, M, d], log_weights [n, M], points2 [k, M', d], log_weights2 [k, M'], gamma []."""


def point_sets(shape: tuple[int, ...], gamma: float, ragged: bool) -> Sets:
    """Random unit points with weights from 1e-30 to 1e4, and gamma, in float64 but exact in float32."""
    samples, points, others, other_points, width = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sets = []
    for size in ((samples, points), (others, other_points)):
        vectors = torch.nn.functional.normalize(torch.randn(*size, width, generator=generator), dim=-1)
        log_weights = torch.empty(size).uniform_(math.log(1e-30), math.log(1e4), generator=generator)
        if ragged:
            absent = torch.rand(size, generator=generator) < 0.5
            absent[:, 0] = False
            log_weights.masked_fill_(absent, -math.inf)
        sets += [vectors.double(), log_weights.double()]
    return *sets, torch.tensor(gamma).double()


def all_pairs(points: Tensor, log_weights: Tensor, points2: Tensor, log_weights2: Tensor, gamma: Tensor) -> Tensor:
    cosines = torch.einsum("bid,cjd->bcij", points, points2)
    weights = log_weights[:, None, :, None] + log_weights2[None, :, None, :]
    return (weights + 2 * gamma * (cosines - 1)).logsumexp(dim=(2, 3))


def differentiated(score: Callable[..., Tensor], sets: Sets) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Scores and the gradients of a positively weighted sum of them, so that gamma's does not cancel."""
    leaves = [tensor.clone().requires_grad_() for tensor in sets]
    scores = score(*leaves)
    upstream = torch.rand(scores.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return scores.detach(), torch.autograd.grad(scores, leaves, upstream.to(scores.dtype))
