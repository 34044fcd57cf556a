"""Binary cross-entropy of all pairs in tiles of torch operations, with its gradients."""

from __future__ import annotations

import math

from torch import Tensor

from clipzoo.ops.tiles_cpu import gradients, positives, tiles

FOLDS = 6
"""Halvings of a tile before the logarithm: products of 2^6 factors of at most 2 do not overflow."""


def forward(
    left: Tensor, right: Tensor, scale: Tensor, bias: Tensor, first: int, tile: int, with_gradients: bool
) -> tuple[Tensor, ...]:
    """Return the loss [], and with gradients those of the logits.

    These are summed over the columns with the rows of right [b, f], over the rows with those of left [N, f], and alone
    [].
    """
    losses, sums = left.new_zeros(len(left)), left.new_zeros(len(left))

    def add(logits: Tensor, part: slice, other: slice) -> None:
        """Add -log sigmoid(y s) = softplus(-y s); in the tile -y s replaces s."""
        positives(logits, part, other, first).neg_()
        # softplus(s) = max(s, 0) + log1p(exp(-|s|))
        exponentials = logits.abs().mul_(-math.log2(math.e)).exp2_()
        losses[part] += logits.clamp(min=0).sum(dim=1) + _sum_of_log1p_(exponentials)

    def shares(logits: Tensor, part: slice, other: slice) -> Tensor:
        add(logits, part, other)
        share = logits.sigmoid_()
        positives(share, part, other, first).neg_()
        sums[part] += share.sum(dim=1)
        return share

    if with_gradients:
        d_left, d_right = gradients(left, right, tile, shares, float(scale), bias)
        return losses.sum(), d_left, d_right, sums.sum()
    for logits, part, other in tiles(left, right, tile, float(scale), bias):
        add(logits, part, other)
    return (losses.sum(),)


def _sum_of_log1p_(values: Tensor) -> Tensor:
    """Return sum_j log(1 + v_ij) of values from 0 to 1, which are overwritten.

    A logarithm takes longer than the exponential: (1 + v) (1 + w) - 1 = v + w (1 + v) is folded first, which loses no
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
        values = first.addcmul_(second, first + 1)
    return rest + values.log1p_().sum(dim=1)
