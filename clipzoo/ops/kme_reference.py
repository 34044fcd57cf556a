"""Reference implementation of KME-CLIP's score."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BLOCK_ELEMENTS = 1 << 24
"""Number of pairs of points in memory at a time, 64 MiB in float32."""


def kme_score(points: Tensor, log_weights: Tensor, points2: Tensor, log_weights2: Tensor, gamma: Tensor) -> Tensor:
    """log sum_ij w_i w'_j exp(-gamma |v_i - u_j|^2) of every pair of point sets (KME-CLIP, eq. 3).

    points: [n, M, d] unit vectors; log_weights: [n, M], -inf for padding.
    points2: [k, M', d]; log_weights2: [k, M']. gamma: scalar. -> [n, k].

    Blocks of samples are compared in turn and recomputed in the backward pass: memory holds BLOCK_ELEMENTS pairs of
    points, never [n, k, M, M'].
    """
    pairs = points.shape[1] * points2.shape[1]
    columns = max(1, min(len(points2), BLOCK_ELEMENTS // pairs))
    rows = max(1, BLOCK_ELEMENTS // (pairs * columns))
    right_blocks = list(zip(points2.split(columns), log_weights2.split(columns), strict=True))
    scores = [
        torch.cat([_recomputed(*left, *right, gamma) for right in right_blocks], dim=1)
        for left in zip(points.split(rows), log_weights.split(rows), strict=True)
    ]
    return torch.cat(scores)


def _recomputed(*arguments: Tensor) -> Tensor:
    return checkpoint(score_block, *arguments, use_reentrant=False, preserve_rng_state=False)


def score_block(points: Tensor, log_weights: Tensor, points2: Tensor, log_weights2: Tensor, gamma: Tensor) -> Tensor:
    """[r, M, d], [c, M', d] -> [r, c], all pairs of points in memory."""
    cosines = points.flatten(0, 1) @ points2.flatten(0, 1).mT  # [r M, c M']
    # |v - u|^2 = 2 (1 - v.u) for unit vectors.
    exponents = 2 * gamma * (cosines - 1) + log_weights.flatten()[:, None] + log_weights2.flatten()
    pairs = exponents.view(*log_weights.shape, *log_weights2.shape)  # [r, M, c, M']
    return pairs.logsumexp(dim=(1, 3))
