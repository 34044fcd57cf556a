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

from clipzoo.ops.tiles import LeftOut, backend


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
