"""Sums of softplus in tiles, of values far below and far above one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from clipzoo.ops.softplus_sums import softplus_sums


@pytest.mark.parametrize("shift", [-60.0, -16.0, -1.0, 0.0, 25.0, 60.0])
@pytest.mark.parametrize("tile", [5, 64])
def test_sums_and_gradients_are_as_exact_as_float32(shift, tile):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(count, 8, generator=generator) for count in (33, 70))
    left[:, 0], right[:, 0] = shift, 1.0
    operands = [side.requires_grad_() for side in (left, right)]
    exact_operands = [side.detach().double().requires_grad_() for side in operands]
    rows, columns = softplus_sums(*operands, 30, tile)
    logits = exact_operands[0] @ exact_operands[1].mT
    values = functional.softplus(logits, threshold=1e9).diagonal_scatter(torch.zeros(33).double(), 30)
    exact = values.sum(dim=1), values.sum(dim=0)
    for ours, expected in zip((rows, columns), exact, strict=True):
        assert ((ours - expected).abs() <= 3e-5 * expected.abs()).all()
    weights = torch.linspace(-1, 2, 33), torch.linspace(1, 3, 70)
    gradients = torch.autograd.grad((rows, columns), operands, weights)
    expected_gradients = torch.autograd.grad(exact, exact_operands, [weight.double() for weight in weights])
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert (gradient - expected).norm() <= 3e-5 * expected.norm()
