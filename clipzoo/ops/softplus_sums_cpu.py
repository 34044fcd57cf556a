"""Sums of softplus of products in tiles of torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from clipzoo.ops.tiles_cpu import fill_positives, gradients, tiles

FOLDS = 6
"""Halvings of a tile before the logarithm: products of 2^6 factors of at most 2 do not overflow."""


def forward(left: Tensor, right: Tensor, first: int, tile: int, with_columns: bool) -> tuple[Tensor, Tensor]:
    """Return the sums over the rows [b] and over the columns [N]."""
    rows, columns = left.new_zeros(len(left)), left.new_zeros(len(right))
    for scores, part, other in tiles(left, right, tile):
        fill_positives(scores, part, other, first, -torch.inf)
        # softplus(s) = max(s, 0) + log1p(exp(-|s|))
        exponentials = scores.abs().neg_().exp_()
        linear = scores.clamp_(min=0)
        rows[part] += linear.sum(dim=1) + _sum_of_log1p(exponentials)
        if with_columns:
            columns[other] += linear.sum(dim=0) + _sum_of_log1p(exponentials.mT)
    return rows, columns


def backward(
    left: Tensor,
    right: Tensor,
    d_rows: Tensor,
    d_columns: Tensor,
    first: int,
    tile: int,
    with_columns: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of left and right from those of the sums."""

    def shares(scores: Tensor, part: slice, other: slice) -> Tensor:
        fill_positives(scores, part, other, first, -torch.inf)
        weights = d_rows[part, None] + d_columns[other] if with_columns else d_rows[part, None]
        return scores.sigmoid_().mul_(weights)

    return gradients(left, right, tile, shares)


def _sum_of_log1p(values: Tensor) -> Tensor:
    """Return sum_j log(1 + v_ij) of values from 0 to 1.

    A logarithm takes longer than the exponential: (1 + v) (1 + w) - 1 = v + w + v w is folded first, which loses no
    digits of small values.
    """
    rest = values.new_zeros(len(values))
    for _ in range(FOLDS):
        half = values.shape[1] // 2
        if not half:
            break
        if values.shape[1] % 2:
            rest += values[:, -1].log1p()
        first, second = values[:, :half], values[:, half : 2 * half]
        values = torch.addcmul(first + second, first, second)
    return rest + values.log1p().sum(dim=1)
