"""The half-disc world of NUCLR, sections 3.3 and G.1, with its densities, popularity and risk in closed form.

x is uniform on the upper half of the unit disc; y given x has the density exp(x.y / tau) / g(x) on the unit square.
All in float64; energies E_ij = x_i . y_j.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def draw(samples: int, temperature: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draw x and y, both [n, 2]. The coordinates of y are truncated exponentials, drawn by inverse transform."""
    generator = torch.Generator().manual_seed(seed)
    radius, angle, first, second = torch.rand(4, samples, generator=generator, dtype=torch.float64)
    x = radius.sqrt()[:, None] * torch.stack([torch.cos(math.pi * angle), torch.sin(math.pi * angle)], dim=1)
    slope = x / temperature
    return x, torch.log1p(torch.stack([first, second], dim=1) * torch.expm1(slope)) / slope


def log_partition(x: Tensor, temperature: float) -> Tensor:
    """Log of the integral of exp(x.y / tau) over the square, [n]."""
    slope = x / temperature
    return (torch.expm1(slope) / slope).log().sum(dim=1)


def true_risk(temperature: float, nodes: int = 200) -> float:
    """True risk -E tau log p(y|x), by quadrature over the half-disc with the closed-form mean of y given x."""
    points, weights = (torch.from_numpy(values) for values in np.polynomial.legendre.leggauss(nodes))
    radius, angle = (points[:, None] + 1) / 2, (points[None, :] + 1) * math.pi / 2
    # The density is 2 / pi, the area element r dr dangle.
    mass = weights[:, None] / 2 * weights[None, :] * math.pi / 2 * radius * 2 / math.pi
    x = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1).flatten(0, 1)
    slope = x / temperature
    mean = -1 / torch.expm1(-slope) - 1 / slope
    integrand = temperature * log_partition(x, temperature) - (x * mean).sum(dim=1)
    return float((mass.flatten() * integrand).sum())


def popularity(x: Tensor, y: Tensor, temperature: float) -> Tensor:
    """True popularity q_j = sum_i p(y_j | x_i), [n]."""
    return (x @ y.mT / temperature - log_partition(x, temperature)[:, None]).exp().sum(dim=0)


def estimated_popularity(energies: Tensor, temperature: float, iterations: int) -> Tensor:
    """Solve eq. 9 for the popularity, [n], up to a constant factor.

    With u_i = 1 / sum_j K_ij / q_j, the equation makes diag(u) K diag(1/q) doubly stochastic: Sinkhorn's iteration.
    """
    kernel = ((energies - energies.max()) / temperature).exp()
    estimate = kernel.sum(dim=0)
    for _ in range(iterations):
        estimate = kernel.mT @ (kernel @ (1 / estimate)).reciprocal()
    return estimate


def popularity_gradient(energies: Tensor, zeta: Tensor, temperature: float) -> float:
    """Norm of the gradient of problem 8 at zeta."""
    attention = torch.softmax((energies - zeta) / temperature, dim=1)
    return float((1 - attention.sum(dim=0)).norm() / len(zeta))


def empirical_risk(energies: Tensor, popularity: Tensor, temperature: float) -> float:
    """Empirical risk, eq. 5: the integral over y is estimated by a sum over y_j with weights 1 / popularity."""
    log_integral = (energies / temperature - popularity.log()).logsumexp(dim=1)
    return float((temperature * log_integral - energies.diagonal()).mean())


def exact_risk(x: Tensor, energies: Tensor, temperature: float) -> float:
    """Risk of eq. 2 with the exact integral."""
    return float((temperature * log_partition(x, temperature) - energies.diagonal()).mean())


def error_term(energies: Tensor, approximate: Tensor, exact: Tensor, temperature: float) -> float:
    """Error term of theorem 1 due to an approximate popularity."""
    difference = (1 / approximate - 1 / exact).abs()
    return float((difference * ((energies - 1) / temperature).exp()).sum(dim=1).mean())
