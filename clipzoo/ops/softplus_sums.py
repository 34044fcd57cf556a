"""Sums of log(1 + exp(product of two vectors)) over rows and over columns, without the products.

One tile of the products is in memory at a time, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipzoo.ops.dispatch import backend


def softplus_sums(left: Tensor, right: Tensor, first: int, tile: int, columns: bool = True) -> tuple[Tensor, Tensor]:
    """left [b, f], right [N, f] -> sums of softplus(left @ right.mT) over each row, [b], and over each column, [N].

    The positive of row i, in column first + i, is left out of both. columns: if False, the second result is 0.
    """
    return _SoftplusSums.apply(left, right, first, tile, columns)


class _SoftplusSums(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, left: Tensor, right: Tensor, first: int, tile: int, with_columns: bool
    ) -> tuple[Tensor, Tensor]:
        kernels = backend("softplus_sums", left.device.type, left.dtype)
        context.save_for_backward(left, right)
        context.kernels, context.arguments = kernels, (first, tile, with_columns)
        return kernels.forward(left, right, first, tile, with_columns)

    @staticmethod
    @once_differentiable
    def backward(context: Any, d_rows: Tensor, d_columns: Tensor) -> tuple[Tensor | None, ...]:
        left, right = context.saved_tensors
        return *context.kernels.backward(left, right, d_rows, d_columns, *context.arguments), None, None, None
