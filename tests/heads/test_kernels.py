"""Kernels against their formulas, and their frequencies against the kernels."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import kstest, norm

from clipzoo.heads.wpse import GaussianKernel, InverseMultiquadricKernel

FORMULAS = {
    GaussianKernel: lambda r, width: math.exp(-r * r / (2 * width * width)),
    InverseMultiquadricKernel: lambda r, width: width / math.sqrt(width * width + r * r),
}
every_kernel = pytest.mark.parametrize("kernel", FORMULAS)
every_width = pytest.mark.parametrize("width", [0.5, 0.75, 1.0])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@every_kernel
@every_width
def test_value_is_the_formula(kernel, width):
    distances = [0.0, 1e-3, 0.3, 1.0, 2.0]
    values = kernel(width).value(torch.tensor(distances, dtype=torch.float64) ** 2)
    expected = torch.tensor([FORMULAS[kernel](r, width) for r in distances], dtype=torch.float64)
    torch.testing.assert_close(values, expected, rtol=1e-14, atol=0)


@pytest.mark.medium
@every_kernel
@every_width
@pytest.mark.parametrize("dimensions", [2, 512])
def test_mean_cosine_of_the_frequencies_is_the_kernel_in_any_direction(kernel, width, dimensions):
    features = 20_000
    frequencies = kernel(width).frequencies(features, dimensions, generator(0)).double()
    assert frequencies.shape == (features, dimensions)
    directions = torch.nn.functional.normalize(torch.randn(3, dimensions, generator=generator(1)).double(), dim=1)
    for r in (0.1, 0.5, 1.0, 2.0):
        cosines = torch.cos(r * frequencies @ directions.mT)
        error = cosines.mean(dim=0) - FORMULAS[kernel](r, width)
        assert (error.abs() < 4.5 * cosines.std(dim=0) / math.sqrt(features)).all()


def test_gaussian_frequencies_are_normal_and_inverse_multiquadric_ones_have_heavier_tails():
    """Given its scalar g a frequency is Gaussian, so its kurtosis is 3 E g^4 / (E g^2)^2 = 9."""
    gaussian = GaussianKernel(0.5).frequencies(4000, 3, generator(2)).double()
    assert kstest(gaussian.flatten().numpy(), norm(scale=2).cdf).pvalue > 0.01
    frequencies = InverseMultiquadricKernel(1.0).frequencies(200_000, 2, generator(3)).double()
    kurtosis = frequencies.pow(4).mean(0) / frequencies.square().mean(0).square()
    assert ((kurtosis - 9).abs() < 1).all()
