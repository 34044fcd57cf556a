"""Sums over all pairs of two sets of vectors, without the matrix of their products.

One tile of the products is in memory at a time, forward and backward.
left_out: column of row 0's positive, if that of row i is in the i-th column after it; or int32 labels of rows [b] and
columns [N], if the sums have no pairs of equal labels.
tile: rows and columns of a tile on a CPU; Triton's kernels have their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipzoo.ops.tiles import LeftOut, backend, gradients, leave_out, positives, tiles

Pair = tuple[Tensor, Tensor]
"""Values of the rows [b] and of the columns [N]."""


@dataclass(frozen=True)
class Exponents:
    """scale * (product + bias), for the sums of one side. scale: of its anchors; bias: of its contrasts.

    scale: None for the products themselves, on both sides; there are no means then.
    threshold: of its anchors; pairs with a higher product are left out. None for none.
    """

    scale: Tensor | None = None
    bias: Tensor | None = None
    threshold: Tensor | None = None


def log_sum_exps(
    left: Tensor, right: Tensor, left_out: LeftOut, tile: int, columns: bool = True
) -> tuple[Tensor, Tensor]:
    """left [b, f], right [N, f] -> over each row of left @ right.mT [b], and over each column [N].

    Positives are left out of both. columns: if False, the second result is not computed and -inf.
    """
    sides = Exponents(), Exponents() if columns else None
    row_sums, _, column_sums, _ = negative_sums(left, right, left_out, tile, *sides)
    return row_sums, column_sums


def negative_sums(
    left: Tensor, right: Tensor, left_out: LeftOut, tile: int, rows: Exponents | None, columns: Exponents | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """left [b, f], right [N, f] -> log-sum-exps and means over each row, [b], and over each column, [N].

    rows: scale, threshold [b], bias [N]; columns: scale, threshold [N], bias [b]; None leaves the sums of a side out
    (-inf, 0). Means and exponents have no gradient.
    """
    return _NegativeSums.apply(left, right, rows, columns, left_out, tile)


class _NegativeSums(torch.autograd.Function):
    """Exponents of the backends are in base 2, which is cheaper on CPUs."""

    @staticmethod
    def forward(
        context: Any, left: Tensor, right: Tensor, rows: Exponents | None, columns: Exponents | None,
        left_out: LeftOut, tile: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        kernels = backend("sums", left.device.type, left.dtype)
        sides = [
            side if side is None or side.scale is None else replace(side, scale=side.scale * math.log2(math.e))
            for side in (rows, columns)
        ]
        row_sums, row_means, column_sums, column_means = kernels.negative_sums_forward(
            left, right, *sides, left_out, tile
        )
        context.save_for_backward(left, right, row_sums, column_sums)
        context.kernels, context.arguments = kernels, (*sides, left_out, tile)
        context.mark_non_differentiable(row_means, column_means)
        return row_sums * math.log(2), row_means, column_sums * math.log(2), column_means

    @staticmethod
    @once_differentiable
    def backward(
        context: Any, d_rows: Tensor, _row_means: Tensor, d_columns: Tensor, _column_means: Tensor
    ) -> tuple[Tensor | None, ...]:
        left, right, rows, columns = context.saved_tensors
        # If a row has only its positive, -inf minus -inf would be NaN where the gradient is zero. The bound is above
        # -1e30, the exponent of absent entries in Triton's kernels.
        sums = rows.clamp(min=-1e29), columns.clamp(min=-1e29)
        gradients = context.kernels.negative_sums_backward(left, right, sums, (d_rows, d_columns), *context.arguments)
        return *gradients, None, None, None, None


# SigLIP's loss is a scalar, so its gradients are known up to a factor before the backward pass: they are computed with
# the loss, from the same tiles.


def sigmoid_loss(left: Tensor, right: Tensor, scale: Tensor, bias: Tensor, left_out: LeftOut, tile: int) -> Tensor:
    """left [b, f], right [N, f] -> sum_ij -log sigmoid(y_ij (scale * left_i . right_j + bias)), [].

    scale, bias: []. y is 1 for the positive of row i, else -1; with labels it is -1 for all pairs of the sum.
    """
    return _SigmoidLoss.apply(left, right, scale, bias, left_out, tile)


class _SigmoidLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, left: Tensor, right: Tensor, scale: Tensor, bias: Tensor, left_out: LeftOut, tile: int
    ) -> Tensor:
        kernels = backend("sums", left.device.type, left.dtype)
        differentiated = any(context.needs_input_grad)
        loss, *gradients = kernels.sigmoid_loss_forward(left, right, scale, bias, left_out, tile, differentiated)
        if differentiated:
            # Gradients of the logits, summed over the columns times right, over the rows times left, and over all.
            d_left, d_right, d_bias = gradients
            d_scale = torch.dot(left.reshape(-1), d_left.reshape(-1))
            context.save_for_backward(d_left, d_right, scale, d_scale, d_bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        d_left, d_right, scale, d_scale, d_bias = context.saved_tensors
        factor = gradient * scale
        return factor * d_left, factor * d_right, gradient * d_scale, gradient * d_bias, None, None


# The operations on CPUs, in tiles of torch operations.


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
