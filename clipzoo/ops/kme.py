"""The score of two weighted point sets: log of the inner product of their kernel mean embeddings (KME-CLIP).

    S[b, c] = log sum_ij exp( log_weights[b, i] + log_weights'[c, j] - 2 gamma (1 - points[b, i] . points'[c, j]) )

At most two tiles of kernel values are in memory at a time, forward or backward; points with a log-weight of -inf are
skipped. The reference implementation is `kme_reference.kme_score`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipzoo.ops.dispatch import backend, is_exporting
from clipzoo.ops.kme_reference import score_block
from clipzoo.ops.packing import Layout, pack


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
    if is_exporting():
        return score_block(image_points, image_log_weights, text_points, text_log_weights, gamma)
    left, left_weights, left_layout = pack(image_points, image_log_weights)
    right, right_weights, right_layout = pack(text_points, text_log_weights)
    return _Score.apply(left, left_weights, right, right_weights, gamma, left_layout, right_layout)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        left: Tensor,
        left_weights: Tensor,
        right: Tensor,
        right_weights: Tensor,
        gamma: Tensor,
        left_layout: Layout,
        right_layout: Layout,
    ) -> Tensor:
        kernels = backend("kme", left.device.type, left.dtype)
        score, *known = kernels.forward(left, left_weights, right, right_weights, gamma, left_layout, right_layout)
        context.save_for_backward(left, left_weights, right, right_weights, gamma, *known)
        context.kernels, context.layouts = kernels, (left_layout, right_layout)
        return score

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, (normaliser, *tile) = context.saved_tensors[:5], context.saved_tensors[5:]
        return *context.kernels.backward(*inputs, *context.layouts, normaliser, gradient, *tile), None, None
