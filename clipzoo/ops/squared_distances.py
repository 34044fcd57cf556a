"""Scaled squared distances of all pairs of vectors without cancellation.

|u - v|^2 = |u|^2 + |v|^2 - 2 u.v is a matrix product, but in float32 it loses the digits of distances that are small
beside the norms: at |u| = 100 it is wrong by 5e-3. Here the product is in float64. The gradient, a difference of
products in float32, is taken after subtracting a common vector.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipzoo.ops.dispatch import is_exporting

BLOCK_ELEMENTS = 1 << 19
"""Number of distances in float64 at a time, 4 MiB."""


def squared_distances(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """[n, d], [k, d] -> scale |left_i - right_j|^2 [n, k], in the precision of the vectors."""
    if is_exporting():
        rows, columns = _factors(left, right, scale)
        return (rows @ columns).to(left.dtype)
    return _SquaredDistances.apply(left, right, scale)


class _SquaredDistances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.scale = scale
        rows, columns = _factors(left, right, scale)
        result = left.new_empty(len(left), len(right))
        size = max(1, BLOCK_ELEMENTS // max(1, len(right)))
        for block, some in zip(result.split(size), rows.split(size), strict=True):
            block.copy_(some @ columns)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right = ctx.saved_tensors
        center = right.mean(dim=0)
        left, right = left - center, right - center
        of_left = gradient.sum(dim=1, keepdim=True) * left - gradient @ right
        of_right = gradient.sum(dim=0)[:, None] * right - gradient.mT @ left
        return 2 * ctx.scale * of_left, 2 * ctx.scale * of_right, None


def _factors(left: Tensor, right: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[n, d], [k, d] -> [n, d + 2], [d + 2, k] in float64, whose product is the scaled squared distances."""
    rows, columns = left.double(), right.double()
    row_norms, column_norms = (vectors.square().sum(dim=1, keepdim=True) for vectors in (rows, columns))
    # The norms are two more entries of the product.
    rows = scale * torch.cat([-2 * rows, row_norms, torch.ones_like(row_norms)], dim=1)
    return rows, torch.cat([columns, torch.ones_like(column_norms), column_norms], dim=1).mT
