"""The score of two weighted point sets: log of the inner product of their kernel mean embeddings (KME-CLIP).

    S[b, c] = log sum_ij exp( log_weights[b, i] + log_weights'[c, j] - 2 gamma (1 - points[b, i] . points'[c, j]) )

At most two tiles of kernel values are in memory at a time, forward or backward; points with a log-weight of -inf are
skipped. The reference implementation is `kme_score_reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipzoo.ops.packing import Layout, Packed, pack
from clipzoo.ops.tiles import backend


def kme_score_reference(
    points: Tensor, log_weights: Tensor, points2: Tensor, log_weights2: Tensor, gamma: Tensor
) -> Tensor:
    """[n, M, d], [n, M], [k, M', d], [k, M'] -> S [n, k], with all pairs of points in memory.

    log sum_ij w_i w'_j exp(-gamma |v_i - u_j|^2) (KME-CLIP, eq. 3) for unit vectors.
    """
    cosines = points.flatten(0, 1) @ points2.flatten(0, 1).mT  # [n M, k M']
    # |v - u|^2 = 2 (1 - v.u)
    exponents = 2 * gamma * (cosines - 1) + log_weights.flatten()[:, None] + log_weights2.flatten()
    return exponents.view(*log_weights.shape, *log_weights2.shape).logsumexp(dim=(1, 3))


def kme_score(
    image_points: Tensor, image_log_weights: Tensor, text_points: Tensor, text_log_weights: Tensor, gamma: Tensor
) -> Tensor:
    """Unit points [n, M, d] with log-weights [n, M], points [k, M', d] with [k, M'], gamma [] > 0 -> S [n, k].

    Differentiable in all arguments. A set without points scores -inf. Half-precision inputs are scored in fp32.
    """
    image_points, image_log_weights, text_points, text_log_weights, gamma = (
        tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
        for tensor in (image_points, image_log_weights, text_points, text_log_weights, gamma)
    )
    if torch.compiler.is_exporting():
        return kme_score_reference(image_points, image_log_weights, text_points, text_log_weights, gamma)
    left, right = pack(image_points, image_log_weights), pack(text_points, text_log_weights)
    tensors = left.points, left.log_weights, right.points, right.log_weights, gamma
    return _Score.apply(*tensors, left.layout, right.layout)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, left: Tensor, left_weights: Tensor, right: Tensor, right_weights: Tensor, gamma: Tensor,
        left_layout: Layout, right_layout: Layout,
    ) -> Tensor:  # fmt: skip
        kernels = backend("kme", left.device.type, left.dtype)
        sides = Packed(left, left_weights, left_layout), Packed(right, right_weights, right_layout)
        score, *saved = kernels.kme_forward(*sides, gamma)
        context.save_for_backward(left, left_weights, right, right_weights, gamma, *saved)
        context.kernels, context.layouts = kernels, (left_layout, right_layout)
        return score

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        left, left_weights, right, right_weights, gamma, normaliser, *tile = context.saved_tensors
        left_layout, right_layout = context.layouts
        sides = Packed(left, left_weights, left_layout), Packed(right, right_weights, right_layout)
        return *context.kernels.kme_backward(*sides, gamma, normaliser, gradient, *tile), None, None
