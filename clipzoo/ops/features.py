"""Random Fourier features of weighted points, summed over each sample's points (WPSE, eq. 8), and squared distances.

The features [b, M, D] of all points would be the largest tensor of the head: they are computed for a few samples at a
time and recomputed for the gradient. The reference implementation is `pooled_waves_reference`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipzoo.ops.tiles import product


def pooled_waves_reference(points: Tensor, weights: Tensor, frequencies: Tensor, phases: Tensor) -> Tensor:
    """[b, M, d], [b, M], [D, d], [D] -> sum_i weights_i cos(frequencies . points_i + phases) [b, D]."""
    waves = torch.cos(points @ frequencies.mT + phases)  # [b, M, D]
    return (weights.unsqueeze(1) @ waves).squeeze(1)


ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Number of features in memory at a time: they fit into a CPU's cache, or fill a GPU."""


def pooled_waves(points: Tensor, weights: Tensor, frequencies: Tensor, phases: Tensor) -> Tensor:
    """[b, M, d], [b, M], [D, d], [D] -> sum_i weights_i cos(frequencies . points_i + phases) [b, D].

    Differentiable in points and weights; frequencies and phases are not trained.
    """
    if torch.compiler.is_exporting():
        return pooled_waves_reference(points, weights, frequencies, phases)
    return _PooledWaves.apply(points, weights, frequencies, phases)


class _PooledWaves(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, points: Tensor, weights: Tensor, frequencies: Tensor, phases: Tensor) -> Tensor:
        context.save_for_backward(points, weights, frequencies, phases)
        pooled = points.new_empty(len(points), len(phases))
        for samples, angles in _angles(points, frequencies, phases):
            torch.bmm(weights[samples, None], angles.cos_(), out=pooled[samples, None])
        return pooled

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        points, weights, frequencies, phases = context.saved_tensors
        d_points, d_weights = torch.empty_like(points), torch.empty_like(weights)
        for samples, angles in _angles(points, frequencies, phases):
            pooled_gradient = gradient[samples, None]  # [r, 1, D]
            d_weights[samples] = (angles.cos() @ pooled_gradient.mT).squeeze(2)
            slopes = angles.sin_().mul_(pooled_gradient).mul_(-weights[samples, :, None])
            d_points[samples] = product(slopes.flatten(0, 1), frequencies.mT).view_as(d_points[samples])
        return d_points, d_weights, None, None


def _angles(points: Tensor, frequencies: Tensor, phases: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of samples and the angles [r, M, D] of their points."""
    elements = ELEMENTS["cuda" if points.is_cuda else "cpu"]
    size = max(1, elements // max(1, points.shape[1] * len(phases)))
    for start in range(0, len(points), size):
        samples = slice(start, min(start + size, len(points)))
        angles = product(points[samples].flatten(0, 1), frequencies, phases)
        yield samples, angles.unflatten(0, (-1, points.shape[1]))


# |u - v|^2 = |u|^2 + |v|^2 - 2 u.v is a matrix product, but in float32 it loses the digits of distances that are small
# compared with the norms: at |u| = 100 it is wrong by 5e-3. Here the product is in float64. The gradient, a difference
# of products in float32, is taken after subtracting a common vector.


BLOCK_ELEMENTS = 1 << 19
"""Number of distances in float64 at a time, 4 MiB."""


def squared_distances(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """[n, d], [k, d] -> scale |left_i - right_j|^2 [n, k], in the precision of the vectors."""
    if torch.compiler.is_exporting():
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
        for block, row_block in zip(result.split(size), rows.split(size), strict=True):
            block.copy_(row_block @ columns)
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
