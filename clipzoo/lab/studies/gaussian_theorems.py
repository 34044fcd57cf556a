"""Theorems 5.1, 5.3 and 5.6 of the perspective, compared with training, and the closed forms of Gaussian pairs.

(u, v) is a centred Gaussian with linear encoders g_u = G u and g_v = H v. Tilting the product of the marginals by
exp(<g_u, g_v>) or exp(-|g_u - g_v|^2 / 2) gives another Gaussian. It depends on A = G^T H and, for the distance, also
on B = G^T G and C = H^T H.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from clipzoo.heads.vector import DistanceHead, InnerProductHead
from clipzoo.lab.studies.figures import BLUE, GREEN, VERMILION, line, panels
from clipzoo.lab.studies.framework import AdamStudy, Check, Claim, Findings, Row, fit, select, vectors
from clipzoo.objectives.base import Objective
from clipzoo.objectives.conditional import Conditional
from clipzoo.objectives.joint import Joint
from clipzoo.types import Batch, Count, NonNegative, Progress, Range

COLOURS = {"two-sided": BLUE, "one-sided": VERMILION, "joint": GREEN}
PROBLEMS: dict[str, tuple[type[InnerProductHead], Objective]] = {
    "two-sided": (InnerProductHead, Conditional(lambda_u=1.0, lambda_v=1.0)),
    "one-sided": (DistanceHead, Conditional(lambda_u=2.0, lambda_v=0.0)),
    "joint": (InnerProductHead, Joint()),
}
"""Tilting and loss of sections 5.1, 5.2 and 5.3. One-sided is u given v."""


@dataclass(frozen=True)
class GaussianTheorems(AdamStudy):
    """Train every loss at every embedding width and compare A, B and the loss with their closed forms.

    correlations: canonical correlations of u and v. n_u, n_v: dimensions of u and v. samples: training samples.
    tolerance: relative tolerance of whitened A and B (Frobenius). loss_tolerance: absolute tolerance of the loss.
    covariance_tolerance: that of the models' covariances, relative.
    """

    correlations: list[Annotated[float, Range(at_least=0, below=1)]]
    n_u: Count
    n_v: Count
    samples: Count
    tolerance: NonNegative
    loss_tolerance: NonNegative
    covariance_tolerance: NonNegative

    title = "Gaussians: the theorems"
    source = "A mathematical perspective on contrastive learning, theorems 5.1, 5.3, 5.6 and corollaries 5.2, 5.4, 5.7"
    question = (
        "What do linear encoders learn from Gaussian pairs? Each of the three losses with its tilting is trained at "
        "every embedding width and compared with its closed form, A = GᵀH and, for the distance, B = GᵀG, in the units "
        "of the marginals (C_uu^½ A C_vv^½)."
    )
    differs = (
        "The paper proves these statements and trains only in two dimensions; here u and v have several.",
        "The low-rank one-sided optimum is given in closed form (B from s²/(1-s²), A from s/(1-s²) of the largest "
        "canonical correlations s), from (50b) with the sign of its log-determinant corrected.",
        "The expectations are over a Sobol sample that has exactly the Gaussian's covariance.",
    )

    def run(self) -> Findings:
        gaussian = with_correlations(self.correlations, self.n_u, self.n_v, self.seed)
        full_rank = len(self.correlations)
        learned = {
            (problem, rank): learn(problem, gaussian, rank, self.samples, self.batch, self.steps, self.rate, self.seed)
            for problem in COLOURS
            for rank in range(1, full_rank + 1)
        }
        checks, rows = list[Check](), list[Row]()
        for (problem, rank), trained in learned.items():
            a, b, loss = optimum(problem, gaussian, rank)
            error = relative_error(gaussian.whitened(trained.a), gaussian.whitened(a))
            row = {"problem": problem, "rank": rank, "error_of_A": error}
            checks.append(Check(f"{problem}, rank {rank}: relative error of A", error, 0.0, self.tolerance))
            checks.append(Check(f"{problem}, rank {rank}: loss", trained.loss, loss, self.loss_tolerance))
            if b is not None:
                root = power(gaussian.uu, 0.5)
                row["error_of_B"] = error = relative_error(root @ trained.b @ root, root @ b @ root)
                checks.append(Check(f"{problem}, rank {rank}: relative error of B", error, 0.0, self.tolerance))
            rows.append({**row, "loss": trained.loss, "least_loss": loss})

        full = {problem: learned[problem, full_rank] for problem in COLOURS}
        models = {problem: gaussian.tilted(trained.a, trained.b, trained.c) for problem, trained in full.items()}
        correlations = gaussian.canonical()[1]
        slope = gaussian.uv @ gaussian.vv.inverse()
        corollaries = {
            "5.2: mean of u given v, two-sided": (gaussian.uu @ full["two-sided"].a, slope),
            "5.4: mean of u given v, one-sided": (models["one-sided"].u_given_v @ full["one-sided"].a, slope),
            "5.4: covariance of u given v, one-sided": (models["one-sided"].u_given_v, gaussian.u_given_v),
            "5.7: marginal covariance of u, two-sided (55a)":
                (models["two-sided"].uu, gaussian.marginal_of_u(correlations)),
            "5.7: marginal covariance of u, joint (55b)":
                (models["joint"].uu, gaussian.marginal_of_u(shrunk(correlations))),
        }  # fmt: skip
        for name, pair in corollaries.items():
            quantity = f"corollary {name}: relative error"
            checks.append(Check(quantity, relative_error(*pair), 0.0, self.covariance_tolerance))
        two, one, joint = (models[problem] for problem in ("two-sided", "one-sided", "joint"))
        missed, met = (relative_error(model.u_given_v, gaussian.u_given_v) for model in (two, one))
        inflation = [relative_error(model.uu, gaussian.uu) for model in (two, joint)]
        # Only the correlated directions: in all others both models keep the marginal.
        gap = torch.linalg.eigvalsh(two.uu - joint.uu).sort(descending=True).values
        least = float(gap[len(correlations) - 1])
        claims = [
            Claim(
                "The two-sided loss with the inner product misses the conditional covariance of u given v; the "
                "one-sided loss with the distance finds it.",
                f"relative error {missed:.2f} two-sided, {met:.3f} one-sided",
                met < 0.1 * missed,
            ),
            Claim(
                "The joint loss inflates the marginal covariance of u less than the two-sided loss does, in every "
                "correlated direction.",
                f"inflation {inflation[0]:.2f} two-sided, {inflation[1]:.2f} joint; least eigenvalue of their "
                f"difference {least:.3f}",
                least > 0 and float(torch.linalg.eigvalsh(joint.uu - gaussian.uu).max()) > 0,
            ),
        ]
        worst = max(row["error_of_A"] for row in rows)
        verdict = (
            f"Training meets {sum(check.met for check in checks)} of {len(checks)} closed forms within tolerance; A is "
            f"within {100 * worst:.1f} % of the optimum at every rank of all three problems."
        )

        figure, (curves, losses, errors) = panels(1, 3)
        grid = torch.linspace(0.01, 0.92, 100, dtype=torch.float64)
        forms = {"two-sided": grid, "one-sided": grid / (1 - grid**2), "joint": shrunk(grid)}
        for problem, colour in COLOURS.items():
            curves.plot(grid, forms[problem], color=colour, linewidth=1)
            values = torch.linalg.svdvals(gaussian.whitened(full[problem].a))[: len(correlations)]
            curves.plot(correlations, values, "o", color=colour, markersize=5, label=problem)
            trained_rows = select(rows, problem=problem)
            ranks = [row["rank"] for row in trained_rows]
            line(losses.plot, trained_rows, "rank", "least_loss", color=colour, linewidth=1)
            line(losses.plot, trained_rows, "rank", "loss", "o", color=colour, markersize=5)
            percent = [100 * row["error_of_A"] for row in trained_rows]
            errors.plot(ranks, percent, "o-", color=colour, linewidth=1, markersize=5)
        curves.set(xlabel="canonical correlation", ylabel="singular value of whitened A", ylim=(0, 2.5))
        curves.legend(frameon=False)
        losses.set(xlabel="embedding width", ylabel="loss, nats", xticks=ranks)
        errors.set(xlabel="embedding width", ylabel="relative error of whitened A, %", xticks=ranks, ylim=(0, None))
        caption = (
            "Left, at full width, and middle, at each width: lines are closed forms, points are trained. Right: how "
            "far the trained A is from the closed form."
        )
        return Findings(verdict, checks, claims, {"theorems": rows}, {"theorems": (figure, caption)})


def optimum(problem: str, gaussian: Gaussian, rank: int | None) -> tuple[Tensor, Tensor | None, float]:
    """Return A, B (None for problems without B) and the minimum of the loss."""
    s = gaussian.canonical()[1][:rank]
    if problem == "one-sided":
        # At full rank the loss is minus the mutual information.
        return *gaussian.one_sided(rank), float(torch.log1p(-(s**2)).sum() / 2)
    if problem == "joint":
        h = shrunk(s)
        return gaussian.joint(rank), None, -float((s * h + torch.log1p(-(h**2)) / 2).sum())
    return gaussian.two_sided(rank), None, -float((s**2).sum() / 2)


def relative_error(measured: Tensor, expected: Tensor) -> float:
    return float((measured - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Gaussian:
    """N(0, [[uu, uv], [uv^T, vv]]), in float64."""

    uu: Tensor
    uv: Tensor
    vv: Tensor

    @property
    def covariance(self) -> Tensor:
        return symmetric(self.uu, self.uv, self.vv)

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
        left, s = left[:, :rank], s[:rank]
        square = root @ left @ torch.diag(s**2 / (1 - s**2)) @ left.mT @ root
        return self._spectral(lambda s: s / (1 - s**2), rank), square

    def whitened(self, matrix: Tensor) -> Tensor:
        """A in the units of both marginals, C_uu^1/2 A C_vv^1/2."""
        return power(self.uu, 0.5) @ matrix @ power(self.vv, 0.5)

    def marginal_of_u(self, whitened_a: Tensor) -> Tensor:
        """Covariance of u in the model whose whitened A has these singular values (corollary 5.7).

        Uncorrelated directions keep their variance: the matrix I - Sigma^2 of the printed (55) applies to the
        correlated directions only.
        """
        root, (left, _, _) = power(self.uu, 0.5), self.canonical()
        return self.uu + root @ left @ torch.diag(whitened_a**2 / (1 - whitened_a**2)) @ left.mT @ root

    def tilted(self, a: Tensor, b: Tensor, c: Tensor) -> Gaussian:
        """Normalised model exp(<u, A v> - <u, B u> / 2 - <v, C v> / 2) mu_u mu_v (eq. 40 and 47)."""
        covariance = symmetric(self.uu.inverse() + b, -a, self.vv.inverse() + c).inverse()
        split = len(self.uu)
        return Gaussian(covariance[:split, :split], covariance[:split, split:], covariance[split:, split:])

    def sample(self, samples: int, seed: int) -> tuple[Tensor, Tensor]:
        """Evenly spread samples u [n, n_u] and v [n, n_v], float32, with exactly this mean and covariance.

        A scrambled Sobol sequence, mirrored at the origin and transformed to the covariance: differences from the
        closed forms come from training and not from sampling.
        """
        n_u = len(self.uu)
        engine = torch.quasirandom.SobolEngine(n_u + len(self.vv), scramble=True, seed=seed)
        half = torch.special.ndtri(engine.draw(samples // 2, dtype=torch.float64).clamp(1e-9, 1 - 1e-9))
        normal = torch.cat([half, -half])
        matched = normal @ torch.linalg.cholesky(normal.mT @ normal / len(normal)).inverse().mT
        both = matched @ torch.linalg.cholesky(self.covariance).mT
        return both[:, :n_u].float(), both[:, n_u:].float()

    def pmi_error(self, a: Tensor, b: Tensor, c: Tensor) -> float:
        """Error of the score <u, A v> - <u, B u> / 2 - <v, C v> / 2, see `clipzoo.lab.methods.judge.agreement`.

        Half of the weight is on pairs of the Gaussian and half on independent ones.
        """
        # The score and the PMI are quadratic forms of (u, v), the PMI plus a constant.
        pmi = -(self.covariance.inverse() - torch.block_diag(self.uu.inverse(), self.vv.inverse())) / 2
        difference = symmetric(-b, a, -c) / 2 - pmi
        sides = [self.covariance, torch.block_diag(self.uu, self.vv)]
        means = [float((difference @ side).trace()) for side in sides]
        variances = [2 * float((difference @ side @ difference @ side).trace()) for side in sides]
        squares = [variance + mean * mean for variance, mean in zip(variances, means, strict=True)]
        return max(sum(squares) / 2 - sum(means) * sum(means) / 4, 0.0) ** 0.5

    def _spectral(self, function, rank: int | None) -> Tensor:
        left, s, right = self.canonical()
        middle = left[:, :rank] @ torch.diag(function(s[:rank])) @ right[:rank]
        return power(self.uu, -0.5) @ middle @ power(self.vv, -0.5)


def symmetric(uu: Tensor, uv: Tensor, vv: Tensor) -> Tensor:
    """[[uu, uv], [uv^T, vv]]"""
    return torch.cat([torch.cat([uu, uv], dim=1), torch.cat([uv.mT, vv], dim=1)])


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
    shapes = (n_u, n_u), (n_v, n_v), (n_u, 2 * n_u), (n_v, 2 * n_v)
    left, right, u, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    uu, vv = (factor @ factor.mT / factor.shape[1] for factor in (u, v))
    left, right = (torch.linalg.qr(factor)[0][:, : len(correlations)] for factor in (left, right))
    middle = left @ torch.diag(torch.tensor(correlations, dtype=torch.float64)) @ right.mT
    return Gaussian(uu, power(uu, 0.5) @ middle @ power(vv, 0.5), vv)


@dataclass(frozen=True)
class Learned:
    """A = G^T H, B = G^T G and C = H^T H of trained linear encoders in float64, and their loss.

    b and c are zero if the tilting is an inner product.
    """

    a: Tensor
    b: Tensor
    c: Tensor
    loss: float


def learn(
    problem: str, gaussian: Gaussian, embed_width: int, samples: int, batch: int, steps: int, rate: float, seed: int
) -> Learned:
    """Train on a sample with exactly the covariance of the Gaussian; the loss is the mean over its batches."""
    head_class, objective = PROBLEMS[problem]
    u, v = gaussian.sample(samples, seed)
    widths = u.shape[1], v.shape[1]
    model = fit(
        lambda: vectors(*widths), lambda: head_class(*widths, embed_width, temperature=1.0), objective, u, v,
        steps=steps, batch=batch, rate=rate, seed=seed,
    )  # fmt: skip
    with torch.no_grad():
        parts = Batch(u, v, torch.arange(samples)).split(batch)
        losses = [objective(model(part), part, Progress(0, 1, samples, batch)).total for part in parts]
    g, h = (model.head.state_dict()[name].double() for name in ("image_projection", "text_projection"))
    distance = float(head_class is DistanceHead)
    return Learned(g @ h.mT, distance * g @ g.mT, distance * h @ h.mT, float(torch.stack(losses).mean()))
