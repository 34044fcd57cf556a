"""Sums over all pairs of two sets of vectors, in tiles of torch operations: the operations of `sums` on CPUs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clipzoo.ops.sums import Exponents
from clipzoo.ops.tiles import LeftOut, gradients, leave_out, positives, tiles

Pair = tuple[Tensor, Tensor]
"""Values of the rows [b] and of the columns [N]."""


def negative_sums_forward(
    left: Tensor, right: Tensor, rows: Exponents | None, columns: Exponents | None, left_out: LeftOut, tile: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log2 of the sums over rows, means over rows, and both over columns. Scales are times log2(e)."""
    row_sums, column_sums = (left.new_full((len(side),), -math.inf) for side in (left, right))
    row_means, column_means = (left.new_zeros(len(side)) for side in (left, right))
    for scores, part, other in tiles(left, right, tile, _factor(rows)):
        if rows is not None:
            _add(row_sums[part], row_means[part], scores, rows, part, other, left_out)
        if columns is not None:
            sums, means = column_sums[other], column_means[other]
            _add(sums, means, scores.mT, columns, other, part, _transposed(left_out))
    return row_sums, row_means, column_sums, column_means


def negative_sums_backward(
    left: Tensor, right: Tensor, sums: Pair, d_sums: Pair, rows: Exponents | None, columns: Exponents | None,
    left_out: LeftOut, tile: int,
) -> Pair:  # fmt: skip
    """Return the gradients of left and right from the sums and their gradients."""

    def shares(scores: Tensor, part: slice, other: slice) -> Tensor:
        row_share = None if rows is None else _share(scores, rows, part, other, left_out, sums[0], d_sums[0])
        result = torch.zeros_like(scores) if row_share is None else row_share
        if columns is not None:
            result += _share(scores.mT, columns, other, part, _transposed(left_out), sums[1], d_sums[1]).mT
        return result

    return gradients(left, right, tile, shares, _factor(rows))


def _factor(rows: Exponents | None) -> float:
    """Return the factor of the products: plain exponents have their log2(e) here."""
    return math.log2(math.e) if rows is not None and rows.scale is None else 1.0


def _transposed(left_out: LeftOut) -> LeftOut:
    return -left_out if isinstance(left_out, int) else left_out[::-1]


def _exponents(scores: Tensor, side: Exponents, part: slice, other: slice, left_out: LeftOut) -> Tensor:
    """Return new exponents, or the tile itself if they are plain, which then serves both sides."""
    exponents = scores if side.bias is None else scores + side.bias[other]
    if side.scale is not None:
        exponents = exponents * side.scale[part, None]
    leave_out(exponents, part, other, left_out)
    if side.threshold is not None:
        exponents.masked_fill_(scores > side.threshold[part, None], -math.inf)
    return exponents


def _add(
    sums: Tensor, means: Tensor, scores: Tensor, side: Exponents, part: slice, other: slice, left_out: LeftOut
) -> None:
    """Add a tile to the sums and means of the tiles so far."""
    exponents = _exponents(scores, side, part, other, left_out)
    largest = exponents.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(exponents.dtype).min)
    weights = (exponents - largest if side.scale is None else exponents.sub_(largest)).exp2_()
    totals = weights.sum(dim=1)
    tile_sums = totals.log2().add_(largest.squeeze(1))
    joint_sums = torch.logaddexp2(sums, tile_sums)
    if side.scale is not None:
        finite = joint_sums.clamp(min=torch.finfo(joint_sums.dtype).min)
        scaled = (weights * scores).sum(dim=1) / totals.clamp(min=torch.finfo(totals.dtype).tiny)
        means.copy_(means * (sums - finite).exp2() + scaled * (tile_sums - finite).exp2())
    sums.copy_(joint_sums)


def _share(
    scores: Tensor, side: Exponents, part: slice, other: slice, left_out: LeftOut, sums: Tensor, gradient: Tensor
) -> Tensor:
    """Gradient with respect to the scores: the anchor's gradient and scale times the softmax."""
    exponents, shift = _exponents(scores, side, part, other, left_out), sums[part, None]
    if side.scale is None:
        return (exponents - shift).exp2_().mul_(gradient[part, None])
    anchors = gradient[part] * side.scale[part] * math.log(2)
    return exponents.sub_(shift).exp2_().mul_(anchors[:, None])


FOLDS = 6
"""Halvings of a tile before the logarithm: products of 2^6 factors of at most 2 do not overflow."""


def sigmoid_loss_forward(
    left: Tensor, right: Tensor, scale: Tensor, bias: Tensor, left_out: LeftOut, tile: int, with_gradients: bool
) -> tuple[Tensor, ...]:
    """Return the loss [], and with gradients those of the logits, summed in three ways.

    Over the columns times the rows of right [b, f], over the rows times those of left [N, f], and over all pairs [].
    """
    losses, sums = left.new_zeros(len(left)), left.new_zeros(len(left))

    def add(logits: Tensor, part: slice, other: slice) -> None:
        """Add -log sigmoid(y s) = softplus(-y s); in the tile -y s replaces s."""
        if isinstance(left_out, int):
            positives(logits, part, other, left_out).neg_()
        else:
            leave_out(logits, part, other, left_out)
        # softplus(s) = max(s, 0) + log1p(exp(-|s|))
        exponentials = logits.abs().mul_(-math.log2(math.e)).exp2_()
        losses[part] += logits.clamp(min=0).sum(dim=1) + _sum_of_log1p_(exponentials)

    def shares(logits: Tensor, part: slice, other: slice) -> Tensor:
        add(logits, part, other)
        share = logits.sigmoid_()
        if isinstance(left_out, int):
            positives(share, part, other, left_out).neg_()
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
    leftover = values.new_zeros(len(values))
    for _ in range(FOLDS):
        half = values.shape[1] // 2
        if not half:
            break
        if values.shape[1] % 2:
            leftover += values[:, -1].log1p()
        first, second = values[:, :half], values[:, half : 2 * half]
        values = first.addcmul_(second, first + 1)
    return leftover + values.log1p_().sum(dim=1)
