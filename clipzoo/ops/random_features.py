"""Random Fourier features of weighted points, summed over each sample's points (WPSE, eq. 8).

The features [b, M, D] of all points would be the largest tensor of the head: they are computed for a few samples at a
time and recomputed for the gradient. The reference implementation is `random_features_reference.pooled_waves`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipzoo.ops import random_features_reference
from clipzoo.ops.dispatch import is_exporting
from clipzoo.ops.products import product

ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Number of features in memory at a time: they fit into a CPU's cache, or fill a GPU."""


def pooled_waves(points: Tensor, weights: Tensor, frequencies: Tensor, phases: Tensor) -> Tensor:
    """[b, M, d], [b, M], [D, d], [D] -> sum_i weights_i cos(frequencies . points_i + phases) [b, D].

    Differentiable in points and weights; frequencies and phases are not trained.
    """
    if is_exporting():
        return random_features_reference.pooled_waves(points, weights, frequencies, phases)
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
            own = gradient[samples, None]  # [r, 1, D]
            d_weights[samples] = (angles.cos() @ own.mT).squeeze(2)
            slopes = angles.sin_().mul_(own).mul_(-weights[samples, :, None])
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
