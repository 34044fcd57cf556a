"""Log-sum-exps over rows and columns of a product of vectors with a scale for each anchor and a bias for each contrast.

Also the mean of the products under the softmax of the same exponents. One tile is in memory at a time, forward and
backward. Row i's positive, in column first + i, is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipzoo.ops.dispatch import backend


@dataclass(frozen=True)
class Exponents:
    """scale * (product + bias), for the sums of one side. scale: of its anchors; bias: of its contrasts."""

    scale: Tensor
    bias: Tensor | None = None


def negative_sums(
    left: Tensor, right: Tensor, first: int, tile: int, rows: Exponents | None, columns: Exponents | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """left [b, f], right [N, f] -> log-sum-exps and means over each row, [b], and over each column, [N].

    rows: scale [b], bias [N]; columns: scale [N], bias [b]; None leaves the sums of a side out (-inf, 0). Means have no
    gradient, and neither have scale and bias.
    """
    sides = [(None, None) if side is None else (side.scale, side.bias) for side in (rows, columns)]
    return _NegativeSums.apply(left, right, *sides[0], *sides[1], first, tile)


class _NegativeSums(torch.autograd.Function):
    """Exponents of the backends are in base 2, as in `log_sum_exps`."""

    @staticmethod
    def forward(
        context: Any, left: Tensor, right: Tensor, row_scale: Tensor | None, row_bias: Tensor | None,
        column_scale: Tensor | None, column_bias: Tensor | None, first: int, tile: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        kernels = backend("negative_sums", left.device.type, left.dtype)
        sides = [
            None if scale is None else (scale * math.log2(math.e), bias)
            for scale, bias in ((row_scale, row_bias), (column_scale, column_bias))
        ]
        rows, row_means, columns, column_means = kernels.forward(left, right, *sides, first, tile)
        context.save_for_backward(left, right, rows, columns)
        context.kernels, context.arguments = kernels, (*sides, first, tile)
        context.mark_non_differentiable(row_means, column_means)
        return rows * math.log(2), row_means, columns * math.log(2), column_means

    @staticmethod
    @once_differentiable
    def backward(
        context: Any, d_rows: Tensor, _row_means: Tensor, d_columns: Tensor, _column_means: Tensor
    ) -> tuple[Tensor | None, ...]:
        left, right, rows, columns = context.saved_tensors
        # As in log_sum_exps: a row that has only its positive.
        rows, columns = (sums.clamp(min=-1e29) for sums in (rows, columns))
        gradients = context.kernels.backward(left, right, rows, columns, d_rows, d_columns, *context.arguments)
        return *gradients, None, None, None, None, None, None
