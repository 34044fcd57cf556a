"""Log-sum-exps over the rows and the columns of a product of vectors, without the product.

One tile of the product is in memory at a time, forward and backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipzoo.ops.dispatch import backend


def log_sum_exps(left: Tensor, right: Tensor, first: int, tile: int, columns: bool = True) -> tuple[Tensor, Tensor]:
    """left [b, f], right [N, f] -> over each row of left @ right.mT [b], and over each column [N].

    The positive of row i, in column first + i, is left out of both. tile: rows and columns of a tile on a CPU; Triton's
    kernels have their own. columns: if False, the second result is not computed and -inf.
    """
    return _LogSumExps.apply(left, right, first, tile, columns)


class _LogSumExps(torch.autograd.Function):
    """Exponents of the backends are in base 2, which is cheaper on CPUs."""

    @staticmethod
    def forward(
        context: Any, left: Tensor, right: Tensor, first: int, tile: int, with_columns: bool
    ) -> tuple[Tensor, Tensor]:
        kernels = backend("log_sum_exps", left.device.type, left.dtype)
        rows, columns = kernels.forward(left, right, first, tile, with_columns)
        context.save_for_backward(left, right, rows, columns)
        context.kernels, context.arguments = kernels, (first, tile, with_columns)
        return rows * math.log(2), columns * math.log(2)

    @staticmethod
    @once_differentiable
    def backward(context: Any, d_rows: Tensor, d_columns: Tensor) -> tuple[Tensor | None, ...]:
        left, right, rows, columns = context.saved_tensors
        # If a row has only its positive, -inf minus -inf would be NaN where the gradient is zero. The bound is above
        # -1e30, the exponent of absent entries in Triton's kernels.
        rows, columns = (sums.clamp(min=-1e29) for sums in (rows, columns))
        gradients = context.kernels.backward(left, right, rows, columns, d_rows, d_columns, *context.arguments)
        return *gradients, None, None, None
