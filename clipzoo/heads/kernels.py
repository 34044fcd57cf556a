"""Shift-invariant kernels: exact values, and random frequencies of their Fourier features."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Generator, Tensor

from clipzoo.types import Part, Scale, checked


class Kernel(Part, ABC):
    """k(u, v), a function of |u - v| with k(u, u) = 1."""

    @abstractmethod
    def value(self, squared_distance: Tensor) -> Tensor:
        """|u - v|^2 -> k(u, v), elementwise."""

    @abstractmethod
    def frequencies(self, features: int, dimensions: int, generator: Generator) -> Tensor:
        """Draw omega from the spectral distribution, [D, d] float32: E cos(omega . (u - v)) = k(u, v)."""


@checked
class GaussianKernel(Kernel):
    """exp(-r^2 / 2 width^2); omega ~ N(0, width^-2).

    width: width of the kernel, in the units of the distance r.
    """

    def __init__(self, width: Scale) -> None:
        self._width = width

    def value(self, squared_distance: Tensor) -> Tensor:
        return torch.exp(-squared_distance / (2 * self._width**2))

    def frequencies(self, features: int, dimensions: int, generator: Generator) -> Tensor:
        return _normal(features, dimensions, generator) / self._width


@checked
class InverseMultiquadricKernel(Kernel):
    """width / sqrt(width^2 + r^2); omega = (g / width) h, g ~ N(0, 1) and h ~ N(0, I) for every feature.

    The kernel is a mixture of Gaussian kernels of width `width / |g|`, since E exp(-t g^2) = (1 + 2 t)^-1/2. Sampling
    is therefore exact in any dimension and needs no tabulated Bessel density, as in WPSE's released code.

    width: width of the kernel, in the units of the distance r.
    """

    def __init__(self, width: Scale) -> None:
        self._width = width

    def value(self, squared_distance: Tensor) -> Tensor:
        return (1 + squared_distance / self._width**2).rsqrt()

    def frequencies(self, features: int, dimensions: int, generator: Generator) -> Tensor:
        return _normal(features, 1, generator) / self._width * _normal(features, dimensions, generator)


def _normal(rows: int, columns: int, generator: Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, device="cpu", dtype=torch.float32)
