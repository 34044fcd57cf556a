"""Two linear views of a Gaussian process ("A mathematical perspective on contrastive learning", section 6.1).

w = sum_j sqrt(lambda_j) xi_j cos(j pi x) with lambda_j = (j^2 pi^2 + 9)^-2 on (0, 1). u is w at evenly spaced places
plus noise, v the first coefficients xi. All conditional distributions are Gaussian in closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from clipzoo.studies.gaussian.closed_forms import Gaussian, power

INVERSE_LENGTH, REGULARITY = 3.0, 2.0


@dataclass(frozen=True)
class ProcessWorld:
    """The process and its two views.

    modes: modes of the truncated expansion. places: dimension of u. coefficients: dimension of v. noise: standard
    deviation of the noise in u.
    """

    modes: int
    places: int
    coefficients: int
    noise: float

    @property
    def grid(self) -> Tensor:
        """Places where the process is observed, [n_u]."""
        return torch.arange(1, self.places + 1, dtype=torch.float64) / (self.places + 1)

    def basis(self, x: Tensor) -> Tensor:
        """sqrt(lambda_j) cos(j pi x): [n] -> [n, modes]."""
        j = torch.arange(1, self.modes + 1, dtype=torch.float64) * math.pi
        return (j**2 + INVERSE_LENGTH**2) ** (-REGULARITY / 2) * torch.cos(j * x[:, None])

    def gaussian(self) -> Gaussian:
        """Distribution of (u, v)."""
        basis = self.basis(self.grid)
        identity = torch.eye(self.places, dtype=torch.float64)
        vv = torch.eye(self.coefficients, dtype=torch.float64)
        return Gaussian(basis @ basis.mT + self.noise**2 * identity, basis[:, : self.coefficients], vv)

    def draw(self, samples: int, seed: int) -> tuple[Tensor, Tensor]:
        """Draw independent pairs u [n, n_u] and v [n, n_v], float32."""
        generator = torch.Generator().manual_seed(seed)
        xi = torch.randn(samples, self.modes, generator=generator, dtype=torch.float64)
        noise = torch.randn(samples, self.places, generator=generator, dtype=torch.float64)
        u = xi @ self.basis(self.grid).mT + self.noise * noise
        return u.float(), xi[:, : self.coefficients].float()

    def paths_given(self, v: Tensor, x: Tensor, count: int, seed: int) -> Tensor:
        """Realisations of w at x whose first coefficients are v, [count, n]."""
        generator = torch.Generator().manual_seed(seed)
        xi = torch.randn(count, self.modes, generator=generator, dtype=torch.float64)
        xi[:, : self.coefficients] = v
        return xi @ self.basis(x).mT


def conditional_errors(gaussian: Gaussian, a: Tensor) -> tuple[float, float]:
    """E |model's mean - true mean|^2 of u given v and of v given u, relative to E |true mean|^2.

    The model tilts the product of the true marginals by exp(<u, A v>): its means are C_uu A v and C_vv A^T u. The
    expectation over the conditioning variable is exact.
    """
    u_given_v = gaussian.uv @ gaussian.vv.inverse()
    v_given_u = gaussian.uv.mT @ gaussian.uu.inverse()
    return (
        _share(gaussian.uu @ a - u_given_v, u_given_v, gaussian.vv),
        _share(gaussian.vv @ a.mT - v_given_u, v_given_u, gaussian.uu),
    )


def _share(error: Tensor, mean: Tensor, covariance: Tensor) -> float:
    root = power(covariance, 0.5)
    return float((error @ root).square().sum() / (mean @ root).square().sum())
