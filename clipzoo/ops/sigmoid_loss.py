"""Binary cross-entropy of all pairs of two sets of vectors (SigLIP), without the matrix of their products.

One tile of the products is in memory at a time. The loss is a scalar, so its gradients are known up to a factor before
the backward pass: they are computed with it, from the same tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipzoo.ops.dispatch import backend


def sigmoid_loss(left: Tensor, right: Tensor, scale: Tensor, bias: Tensor, first: int, tile: int) -> Tensor:
    """left [b, f], right [N, f] -> sum_ij -log sigmoid(y_ij (scale * left_i . right_j + bias)), [].

    scale, bias: []. y is 1 for the positive of row i, in column first + i, else -1. tile: rows and columns of a tile on
    a CPU; Triton's kernels have their own.
    """
    return _SigmoidLoss.apply(left, right, scale, bias, first, tile)


class _SigmoidLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, left: Tensor, right: Tensor, scale: Tensor, bias: Tensor, first: int, tile: int
    ) -> Tensor:
        kernels = backend("sigmoid_loss", left.device.type, left.dtype)
        differentiated = any(context.needs_input_grad)
        loss, *gradients = kernels.forward(left, right, scale, bias, first, tile, differentiated)
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
