"""Contrastive learning of Gaussians in closed form ("A mathematical perspective on contrastive learning", section 5).

(u, v) is a centred Gaussian with linear encoders g_u = G u and g_v = H v. Tilting the product of the marginals by
exp(<g_u, g_v>) or exp(-|g_u - g_v|^2 / 2) gives another Gaussian. It depends on A = G^T H and, for the distance, also
on B = G^T G and C = H^T H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gaussian:
    """N(0, [[uu, uv], [uv^T, vv]]), in float64."""

    uu: Tensor
    uv: Tensor
    vv: Tensor

    @property
    def covariance(self) -> Tensor:
        return torch.cat([torch.cat([self.uu, self.uv], dim=1), torch.cat([self.uv.mT, self.vv], dim=1)])

    @property
    def u_given_v(self) -> Tensor:
        """Conditional covariance C_{u|v}."""
        return self.uu - self.uv @ self.vv.inverse() @ self.uv.mT

    @property
    def v_given_u(self) -> Tensor:
        """Conditional covariance C_{v|u}."""
        return self.vv - self.uv.mT @ self.uu.inverse() @ self.uv

    def canonical(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return U, canonical correlations and V^T: the SVD of C_uu^-1/2 C_uv C_vv^-1/2."""
        return torch.linalg.svd(power(self.uu, -0.5) @ self.uv @ power(self.vv, -0.5), full_matrices=False)

    def two_sided(self, rank: int | None = None) -> Tensor:
        """A of at most this rank that minimises the two-sided conditional loss with the inner product (th. 5.1)."""
        return self._spectral(lambda s: s, rank)

    def joint(self, rank: int | None = None) -> Tensor:
        """A that minimises the joint loss with the inner product (th. 5.6)."""
        return self._spectral(shrunk, rank)

    def one_sided(self, rank: int | None = None) -> tuple[Tensor, Tensor]:
        """A and B that minimise the loss of u given v with the distance (th. 5.3, whose (50b) needs -log|.|)."""
        root, (left, s, _) = power(self.uu, -0.5), self.canonical()
        square = root @ left[:, :rank] @ torch.diag((s**2 / (1 - s**2))[:rank]) @ left[:, :rank].mT @ root
        return self._spectral(lambda s: s / (1 - s**2), rank), square

    def one_sided_loss(self, rank: int | None = None) -> Tensor:
        """Minimum of the one-sided loss; at full rank, minus the mutual information."""
        return torch.log1p(-(self.canonical()[1][:rank] ** 2)).sum() / 2

    def two_sided_loss(self, rank: int | None = None) -> Tensor:
        """Minimum of the two-sided loss, -sum s^2 / 2 over the first `rank` correlations."""
        return -(self.canonical()[1][:rank] ** 2).sum() / 2

    def joint_loss(self, rank: int | None = None) -> Tensor:
        """Minimum of the joint loss, -sum [s h + log(1 - h^2) / 2]."""
        s = self.canonical()[1][:rank]
        h = shrunk(s)
        return -(s * h + torch.log1p(-(h**2)) / 2).sum()

    def whitened(self, matrix: Tensor) -> Tensor:
        """A in the units of both marginals, C_uu^1/2 A C_vv^1/2."""
        return power(self.uu, 0.5) @ matrix @ power(self.vv, 0.5)

    def whitened_square(self, matrix: Tensor) -> Tensor:
        """B in the units of u, C_uu^1/2 B C_uu^1/2."""
        return power(self.uu, 0.5) @ matrix @ power(self.uu, 0.5)

    def marginal_of_u(self, whitened_a: Tensor) -> Tensor:
        """Covariance of u in the model whose whitened A has these singular values (corollary 5.7).

        Uncorrelated directions keep their variance: the matrix I - Sigma^2 of the printed (55) applies to the
        correlated directions only.
        """
        root, (left, _, _) = power(self.uu, 0.5), self.canonical()
        gain = torch.diag(whitened_a**2 / (1 - whitened_a**2))
        return self.uu + root @ left @ gain @ left.mT @ root

    def tilted(self, a: Tensor, b: Tensor, c: Tensor) -> Gaussian:
        """Normalised model exp(<u, A v> - <u, B u> / 2 - <v, C v> / 2) mu_u mu_v (eq. 40 and 47)."""
        top = torch.cat([self.uu.inverse() + b, -a], dim=1)
        bottom = torch.cat([-a.mT, self.vv.inverse() + c], dim=1)
        covariance = torch.cat([top, bottom]).inverse()
        split = len(self.uu)
        return Gaussian(covariance[:split, :split], covariance[:split, split:], covariance[split:, split:])

    def _spectral(self, function, rank: int | None) -> Tensor:
        left, s, right = self.canonical()
        middle = left[:, :rank] @ torch.diag(function(s[:rank])) @ right[:rank]
        return power(self.uu, -0.5) @ middle @ power(self.vv, -0.5)


def shrunk(s: Tensor) -> Tensor:
    """h of definition 5.5: singular values of the whitened A that minimises the joint loss."""
    return ((1 + 4 * s**2).sqrt() - 1) / (2 * s)


def power(matrix: Tensor, exponent: float) -> Tensor:
    """Power of a symmetric positive definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values**exponent) @ vectors.mT


def with_correlations(correlations: list[float], n_u: int, n_v: int, seed: int) -> Gaussian:
    """Gaussian with these canonical correlations and random marginals."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def marginal(size: int) -> Tensor:
        factor = normal(size, 2 * size)
        return factor @ factor.mT / (2 * size)

    count = len(correlations)
    left, right = torch.linalg.qr(normal(n_u, n_u))[0], torch.linalg.qr(normal(n_v, n_v))[0]
    uu, vv = marginal(n_u), marginal(n_v)
    middle = left[:, :count] @ torch.diag(torch.tensor(correlations, dtype=torch.float64)) @ right[:, :count].mT
    return Gaussian(uu, power(uu, 0.5) @ middle @ power(vv, 0.5), vv)


def matched_sample(gaussian: Gaussian, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Evenly spread samples u [n, n_u] and v [n, n_v], float32, with exactly the mean and covariance of the Gaussian.

    A scrambled Sobol sequence, mirrored at the origin and transformed to the covariance. Differences from the closed
    forms then come from training and not from sampling.
    """
    n_u = len(gaussian.uu)
    dimensions = n_u + len(gaussian.vv)
    uniform = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=seed).draw(
        samples // 2, dtype=torch.float64
    )
    half = torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9))
    normal = torch.cat([half, -half])
    second_moment = normal.mT @ normal / len(normal)
    matched = normal @ torch.linalg.cholesky(second_moment).inverse().mT
    both = matched @ torch.linalg.cholesky(gaussian.covariance).mT
    return both[:, :n_u].float(), both[:, n_u:].float()
