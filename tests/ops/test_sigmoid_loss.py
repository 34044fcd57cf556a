"""Binary cross-entropy in tiles, of logits far below and far above zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.ops.sums import sigmoid_loss
from tests.support.unit_vectors import factors


def exact_loss(left: Tensor, right: Tensor, scale: Tensor, bias: Tensor, first: int) -> Tensor:
    logits = scale * left @ right.mT + bias
    negatives = functional.softplus(logits, threshold=1e9)
    positives = functional.softplus(-logits.diagonal(first), threshold=1e9)
    return negatives.diagonal_scatter(positives, first).sum()


@pytest.mark.parametrize("shift", [-60.0, -16.0, -1.0, 0.0, 25.0, 60.0])
@pytest.mark.parametrize("tile", [5, 64])
def test_loss_and_gradients_are_as_exact_as_float32(shift, tile):
    generator = torch.Generator().manual_seed(0)
    sides = [torch.randn(count, 8, generator=generator) for count in (33, 70)]
    leaves = [leaf.requires_grad_() for leaf in (*sides, torch.tensor(1.5), torch.tensor(shift))]
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    loss, exact = sigmoid_loss(*leaves, 30, tile), exact_loss(*exact_leaves, 30)
    assert (loss - exact).abs() <= 3e-5 * exact.abs()
    gradients = torch.autograd.grad(2 * loss, leaves)
    for ours, expected in zip(gradients, torch.autograd.grad(2 * exact, exact_leaves), strict=True):
        assert (ours - expected).norm() <= 3e-5 * expected.norm()


@pytest.mark.parametrize("first", [0, 4])
def test_float64_loss_and_gradients_equal_those_of_the_matrix_and_can_be_taken_twice(first):
    right = factors(23, 1.0)[1]
    left = factors(23, 1.0)[0][first : first + 11]
    leaves = [side.clone().requires_grad_() for side in (left, right, *torch.tensor([10.0, -10.0]).double())]
    loss, exact = sigmoid_loss(*leaves, first, 4), exact_loss(*leaves, first)
    torch.testing.assert_close(loss, exact, rtol=1e-12, atol=0)
    expected = torch.autograd.grad(exact, leaves)
    for retain in (True, False):
        gradients = torch.autograd.grad(loss, leaves, retain_graph=retain)
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        torch.testing.assert_close(sigmoid_loss(*leaves, first, 4), exact, rtol=1e-12, atol=0)
        leaves[1][2, 0] = torch.nan
        assert sigmoid_loss(*leaves, first, 3).isnan()
