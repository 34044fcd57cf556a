"""The score of two weighted point sets: log of the inner product of their kernel mean embeddings (KME-CLIP).

    S[b, c] = log sum_ij exp( log_weights[b, i] + log_weights'[c, j] - 2 gamma (1 - points[b, i] . points'[c, j]) )

No more than one tile of kernel values lives at a time, forward or backward; points with a log-weight of -inf cost
nothing. The slow twin is `kme_reference.kme_score`.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipzoo.ops import kme_cpu
from clipzoo.ops.packing import Layout, pack

_log = logging.getLogger(__name__)


def kme_score(
    image_points: Tensor, image_log_weights: Tensor, text_points: Tensor, text_log_weights: Tensor, gamma: Tensor
) -> Tensor:
    """Unit points [n, M, d] with log-weights [n, M], points [k, M', d] with [k, M'], gamma [] > 0 -> S [n, k].

    Differentiable in all five. A set without points scores -inf. Half-precision inputs are scored in fp32.
    """
    image_points, image_log_weights, text_points, text_log_weights, gamma = (
        each.float() if each.dtype in (torch.float16, torch.bfloat16) else each
        for each in (image_points, image_log_weights, text_points, text_log_weights, gamma)
    )
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
        backend = _backend(left.device.type, left.dtype)
        score, normaliser = backend.forward(left, left_weights, right, right_weights, gamma, left_layout, right_layout)
        context.save_for_backward(left, left_weights, right, right_weights, gamma, normaliser)
        context.backend, context.layouts = backend, (left_layout, right_layout)
        return score

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, normaliser = context.saved_tensors
        return *context.backend.backward(*inputs, *context.layouts, normaliser, gradient), None, None


@cache
def _backend(device: str, dtype: torch.dtype) -> ModuleType:
    """Triton for fp32 on GPUs; torch's blocks elsewhere, and on a GPU only with a warning."""
    if device != "cuda":
        return kme_cpu
    try:
        from clipzoo.ops import kme_triton
    except ImportError as error:
        reason = str(error)
    else:
        if dtype == torch.float32:
            return kme_triton
        reason = f"they have no {dtype}"
    _log.warning("KME scores run in blocks of torch operations, slower than Triton's kernels: %s", reason)
    return kme_cpu
