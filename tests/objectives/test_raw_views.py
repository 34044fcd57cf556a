"""Kernels between raw inputs: distances and rounding."""

from __future__ import annotations

import math

import pytest
import torch

from clipzoo.heads.wpse import GaussianKernel, InverseMultiquadricKernel
from clipzoo.objectives.mmd import kernel_matrix


def drawn(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_samples_far_from_the_origin_keep_their_distances_in_fp32():
    views = drawn(6, 20)
    near = kernel_matrix(views, GaussianKernel(1.0), False, torch.float32)
    far = kernel_matrix(views + 1000, GaussianKernel(1.0), False, torch.float32)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-3)  # the sum itself is rounded to 6e-5
    views[1, 2] = math.nan
    assert kernel_matrix(views, GaussianKernel(1.0), True, torch.float32).isnan().any()


def test_images_are_compared_as_fractions_of_255():
    image = (256 * drawn(5, 3, 4, 4)).to(torch.uint8)
    fractions = image.double().flatten(1) / 255
    expected = torch.exp(-(torch.cdist(fractions, fractions) ** 2) / 2)
    torch.testing.assert_close(kernel_matrix(image, GaussianKernel(1.0), False, torch.float64), expected)


def test_captions_are_compared_as_bags_of_words_without_padding():
    captions = torch.tensor([[5, 7, 7, 0, 0, 0], [7, 5, 7, 0, 0, 0], [5, 7, 7, 5, 7, 7]])
    values = kernel_matrix(captions, GaussianKernel(1.0), False, torch.float64)
    assert values[0, 1] == 1 and values[0, 2] == pytest.approx(math.exp(-(1**2 + 2**2) / 2))


@pytest.mark.parametrize("kernel", [GaussianKernel(1.0), InverseMultiquadricKernel(1.0)])
@pytest.mark.parametrize("width", [97, 3072])
def test_equal_samples_have_distance_zero_in_a_batch_of_mostly_equal_samples(kernel, width):
    views = drawn(3, width)[[0] * 8 + [1, 2]]
    values = kernel_matrix(views, kernel, True, torch.float32)
    assert (values[:8, :8] == 1).all() and (values.diagonal() == 1).all()
    assert (values[:8, 8:] == 0).all()
