"""Pooled random features against their reference implementation, in float64 and float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from clipzoo.heads import wpse
from tests.support.largest_tensor import LargestTensor


@pytest.mark.parametrize("held", [1, 150, 1 << 20])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (5, 7, 3, 11), (6, 13, 8, 32)], ids=str)
def test_pooled_waves_and_gradients_equal_the_reference_implementation(monkeypatch, shape, held):
    monkeypatch.setitem(wpse.ELEMENTS, "cpu", held)
    inputs = drawn(*shape)
    exact, exact_gradients = differentiated(wpse.pooled_waves_reference, inputs)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        pooled, gradients = differentiated(wpse.pooled_waves, tuple(tensor.to(dtype) for tensor in inputs))
        assert (pooled.double() - exact).norm() <= tolerance * exact.norm()
        for ours, expected in zip(gradients, exact_gradients, strict=True):
            assert (ours.double() - expected).norm() <= 10 * tolerance * expected.norm()


def test_no_tensor_has_the_features_of_all_points(monkeypatch):
    monkeypatch.setitem(wpse.ELEMENTS, "cpu", 2 * 5 * 24)
    inputs = drawn(12, 5, 8, 24)
    with LargestTensor() as largest:
        differentiated(wpse.pooled_waves, inputs)
    assert largest.elements <= max(2 * 5 * 24, 12 * 5 * 8)


def test_phases_may_have_any_layout():
    vectors, weights, frequencies, _ = (tensor.float() for tensor in drawn(3, 5, 8, 11))
    phases = frequencies[:, 0]
    pooled = wpse.pooled_waves(vectors, weights, frequencies, phases)
    torch.testing.assert_close(pooled, wpse.pooled_waves(vectors, weights, frequencies, phases.contiguous()))


def drawn(samples: int, points: int, width: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    sizes = (samples, points, width), (samples, points), (count, width), (count,)
    vectors, weights, frequencies, phases = (torch.randn(size, generator=generator).double() for size in sizes)
    return vectors, weights, 2 * frequencies, math.pi * phases


def differentiated(pooled_waves, inputs: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    points, weights = (tensor.clone().requires_grad_() for tensor in inputs[:2])
    pooled = pooled_waves(points, weights, *inputs[2:])
    upstream = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return pooled.detach(), torch.autograd.grad(pooled, (points, weights), upstream.to(pooled.dtype))
