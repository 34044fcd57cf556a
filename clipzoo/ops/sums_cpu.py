"""Sums over all pairs of two sets of vectors, in tiles of torch operations: the operations of `sums` on CPUs.

Exponents of log-sum-exps are in base 2, which is cheaper on CPUs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clipzoo.ops.tiles import LeftOut, gradients, leave_out, log2_sum_exp2, positives, tiles

_LOG2_E = math.log2(math.e)
Pair = tuple[Tensor, Tensor]
"""Values of the rows [b] and of the columns [N]."""
Side = tuple[Tensor, Tensor | None, Tensor | None]
"""Scale of the anchors, times log2(e), bias of the contrasts, and threshold of the anchors."""


def log_sum_exps_forward(
    left: Tensor, right: Tensor, left_out: LeftOut, tile: int, with_columns: bool
) -> tuple[Tensor, Tensor]:
    """Return log2 of the sums over the rows [b] and over the columns [N], without positives."""
    rows, columns = left.new_full((len(left),), -math.inf), left.new_full((len(right),), -math.inf)
    for scores, row_part, column_part in tiles(left, right, tile, _LOG2_E):
        leave_out(scores, row_part, column_part, left_out)
        rows[row_part] = torch.logaddexp2(rows[row_part], log2_sum_exp2(scores, dim=1))
        if with_columns:
            columns[column_part] = torch.logaddexp2(columns[column_part], log2_sum_exp2(scores, dim=0))
    return rows, columns


def log_sum_exps_backward(
    left: Tensor, right: Tensor, sums: Pair, d_sums: Pair, left_out: LeftOut, tile: int, with_columns: bool
) -> Pair:
    """Return the gradients of left and right from the sums and their gradients."""
    (rows, columns), (d_rows, d_columns) = sums, d_sums

    def shares(scores: Tensor, part: slice, other: slice) -> Tensor:
        leave_out(scores, part, other, left_out)
        result = (scores - rows[part, None]).exp2_().mul_(d_rows[part, None])
        if with_columns:
            result += scores.sub_(columns[other]).exp2_().mul_(d_columns[other])
        return result

    return gradients(left, right, tile, shares, _LOG2_E)


def negative_sums_forward(
    left: Tensor, right: Tensor, rows: Side | None, columns: Side | None, left_out: LeftOut, tile: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log2 of the sums over rows, means over rows, and both over columns."""
    row_sums, column_sums = (left.new_full((len(side),), -math.inf) for side in (left, right))
    row_means, column_means = (left.new_zeros(len(side)) for side in (left, right))
    for scores, part, column_part in tiles(left, right, tile):
        if rows is not None:
            exponents = _exponents(scores, rows, part, column_part, left_out)
            row_sums[part], row_means[part] = _combined(row_sums[part], row_means[part], exponents, scores)
        if columns is not None:
            exponents = _exponents(scores.mT, columns, column_part, part, _transposed(left_out))
            column_sums[column_part], column_means[column_part] = _combined(
                column_sums[column_part], column_means[column_part], exponents, scores.mT
            )
    return row_sums, row_means, column_sums, column_means


def negative_sums_backward(
    left: Tensor,
    right: Tensor,
    sums: Pair,
    d_sums: Pair,
    rows: Side | None,
    columns: Side | None,
    left_out: LeftOut,
    tile: int,
) -> Pair:
    """Return the gradients of left and right from the sums and their gradients."""

    def shares(scores: Tensor, part: slice, other: slice) -> Tensor:
        row_share = None if rows is None else _share(scores, rows, part, other, left_out, sums[0], d_sums[0])
        result = torch.zeros_like(scores) if row_share is None else row_share
        if columns is not None:
            result += _share(scores.mT, columns, other, part, _transposed(left_out), sums[1], d_sums[1]).mT
        return result

    return gradients(left, right, tile, shares)


def _transposed(left_out: LeftOut) -> LeftOut:
    return -left_out if isinstance(left_out, int) else left_out[::-1]


def _exponents(scores: Tensor, side: Side, part: slice, other: slice, left_out: LeftOut) -> Tensor:
    scale, bias, threshold = side
    shifted = scores if bias is None else scores + bias[other]
    exponents = shifted * scale[part, None]
    leave_out(exponents, part, other, left_out)
    if threshold is not None:
        exponents.masked_fill_(scores > threshold[part, None], -math.inf)
    return exponents


def _combined(sums: Tensor, means: Tensor, exponents: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums and means of the tiles so far and of one more."""
    largest = exponents.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(exponents.dtype).min)
    weights = exponents.sub_(largest).exp2_()
    totals = weights.sum(dim=1)
    tile_sums = totals.log2().add_(largest.squeeze(1))
    joint_sums = torch.logaddexp2(sums, tile_sums)
    finite = joint_sums.clamp(min=torch.finfo(joint_sums.dtype).min)
    scaled = (weights * scores).sum(dim=1) / totals.clamp(min=torch.finfo(totals.dtype).tiny)
    return joint_sums, means * (sums - finite).exp2() + scaled * (tile_sums - finite).exp2()


def _share(
    scores: Tensor, side: Side, part: slice, other: slice, left_out: LeftOut, sums: Tensor, gradient: Tensor
) -> Tensor:
    """Gradient with respect to the scores: the anchor's gradient and scale times the softmax."""
    exponents = _exponents(scores, side, part, other, left_out)
    anchors = gradient[part] * side[0][part] * math.log(2)
    return exponents.sub_(sums[part, None]).exp2_().mul_(anchors[:, None])


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
