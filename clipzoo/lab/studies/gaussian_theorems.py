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

from clipzoo.config.vocabulary import Count, NonNegative, Range, Rate, Seed
from clipzoo.data.in_memory import InMemoryDataset
from clipzoo.heads.vector import DistanceHead, InnerProductHead
from clipzoo.lab.studies.encoders import Vectors
from clipzoo.lab.studies.figures import BLUE, GREEN, VERMILION, Drawing, line, panels
from clipzoo.lab.studies.framework import (
    Check,
    Claim,
    Findings,
    Row,
    Study,
    fit,
    seeded,
    select,
)
from clipzoo.objectives.base import Objective
from clipzoo.objectives.conditional import Conditional
from clipzoo.objectives.joint import Joint
from clipzoo.types import Batch, Progress

COLOURS = {"two-sided": BLUE, "one-sided": VERMILION, "joint": GREEN}
PROBLEMS: dict[str, tuple[type[InnerProductHead], Objective]] = {
    "two-sided": (InnerProductHead, Conditional(lambda_u=1.0, lambda_v=1.0)),
    "one-sided": (DistanceHead, Conditional(lambda_u=2.0, lambda_v=0.0)),
    "joint": (InnerProductHead, Joint()),
}
"""Tilting and loss of sections 5.1, 5.2 and 5.3. One-sided is u given v."""


@dataclass(frozen=True)
class GaussianTheorems(Study):
    """Train every loss at every embedding width and compare A, B and the loss with their closed forms.

    correlations: canonical correlations of u and v. n_u, n_v: dimensions of u and v. samples: training samples.
    batch, steps, rate: settings of Adam. tolerance: of whitened A and B, relative, Frobenius norm. loss_tolerance:
    absolute. covariance_tolerance: of the models' covariances, relative.
    """

    correlations: list[Annotated[float, Range(at_least=0, below=1)]]
    n_u: Count
    n_v: Count
    samples: Count
    batch: Count
    steps: Count
    rate: Rate
    seed: Seed
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
        ranks = range(1, len(self.correlations) + 1)
        settings = {"samples": self.samples, "batch": self.batch, "steps": self.steps, "seed": self.seed}
        learned = {
            (problem, rank): learn(problem, gaussian, rank, rate=self.rate, **settings)
            for problem in COLOURS
            for rank in ranks
        }
        checks, rows = [], []
        for (problem, rank), encoders in learned.items():
            new, row = self._compare(problem, gaussian, rank, encoders)
            checks += new
            rows.append(row)
        full = {problem: learned[problem, max(ranks)] for problem in COLOURS}
        models = {problem: gaussian.tilted(encoders.a, encoders.b, encoders.c) for problem, encoders in full.items()}
        checks += self._corollaries(gaussian, full, models)
        claims = _claims(gaussian, models)
        worst = max(row["error_of_A"] for row in rows)
        verdict = (
            f"Training meets {sum(check.met for check in checks)} of {len(checks)} closed forms within tolerance; A is "
            f"within {100 * worst:.1f} % of the optimum at every rank of all three problems."
        )
        drawings = {"theorems": _drawing(gaussian, learned, rows)}
        return Findings(verdict, checks, claims, {"theorems": rows}, drawings)

    def _compare(self, problem: str, gaussian: Gaussian, rank: int, learned: Learned) -> tuple[list[Check], Row]:
        a, b, loss = optimum(problem, gaussian, rank)
        error_a = relative_error(gaussian.whitened(learned.a), gaussian.whitened(a))
        where = f"{problem}, rank {rank}"
        checks = [
            Check(f"{where}: relative error of A", error_a, 0.0, self.tolerance),
            Check(f"{where}: loss", learned.loss, loss, self.loss_tolerance),
        ]
        row: dict[str, str | int | float] = {"problem": problem, "rank": rank, "error_of_A": error_a}
        if b is not None:
            error_b = relative_error(gaussian.whitened_square(learned.b), gaussian.whitened_square(b))
            checks.append(Check(f"{where}: relative error of B", error_b, 0.0, self.tolerance))
            row["error_of_B"] = error_b
        return checks, {**row, "loss": learned.loss, "least_loss": loss}

    def _corollaries(self, gaussian: Gaussian, full: dict[str, Learned], models: dict[str, Gaussian]) -> list[Check]:
        correlations = gaussian.canonical()[1]
        slope = gaussian.uv @ gaussian.vv.inverse()
        measured = {
            "5.2: mean of u given v, two-sided": (gaussian.uu @ full["two-sided"].a, slope),
            "5.4: mean of u given v, one-sided": (models["one-sided"].u_given_v @ full["one-sided"].a, slope),
            "5.4: covariance of u given v, one-sided": (models["one-sided"].u_given_v, gaussian.u_given_v),
            "5.7: marginal covariance of u, two-sided (55a)":
                (models["two-sided"].uu, gaussian.marginal_of_u(correlations)),
            "5.7: marginal covariance of u, joint (55b)":
                (models["joint"].uu, gaussian.marginal_of_u(shrunk(correlations))),
        }  # fmt: skip
        return [
            Check(f"corollary {name}: relative error", relative_error(*pair), 0.0, self.covariance_tolerance)
            for name, pair in measured.items()
        ]


def optimum(problem: str, gaussian: Gaussian, rank: int | None) -> tuple[Tensor, Tensor | None, float]:
    """Return A, B (None for problems without B) and the minimum of the loss."""
    s = gaussian.canonical()[1][:rank]
    if problem == "one-sided":
        a, b = gaussian.one_sided(rank)
        # At full rank, minus the mutual information.
        return a, b, float(torch.log1p(-(s**2)).sum() / 2)
    if problem == "joint":
        h = shrunk(s)
        return gaussian.joint(rank), None, -float((s * h + torch.log1p(-(h**2)) / 2).sum())
    return gaussian.two_sided(rank), None, -float((s**2).sum() / 2)


def relative_error(measured: Tensor, expected: Tensor) -> float:
    return float((measured - expected).norm() / expected.norm())


def _claims(gaussian: Gaussian, models: dict[str, Gaussian]) -> list[Claim]:
    two, one, joint = (models[problem] for problem in ("two-sided", "one-sided", "joint"))
    missed, met = (relative_error(model.u_given_v, gaussian.u_given_v) for model in (two, one))
    gap = torch.linalg.eigvalsh(two.uu - joint.uu)
    # Only the correlated directions: in all others both models keep the marginal.
    least = float(gap.sort(descending=True).values[len(gaussian.canonical()[1]) - 1])
    above = float(torch.linalg.eigvalsh(joint.uu - gaussian.uu).max())
    inflation = [relative_error(model.uu, gaussian.uu) for model in (two, joint)]
    return [
        Claim(
            "The two-sided loss with the inner product misses the conditional covariance of u given v; the one-sided "
            "loss with the distance finds it.",
            f"relative error {missed:.2f} two-sided, {met:.3f} one-sided",
            met < 0.1 * missed,
        ),
        Claim(
            "The joint loss inflates the marginal covariance of u less than the two-sided loss does, in every "
            "correlated direction.",
            f"inflation {inflation[0]:.2f} two-sided, {inflation[1]:.2f} joint; least eigenvalue of their difference "
            f"{least:.3f}",
            least > 0 and above > 0,
        ),
    ]


def _drawing(gaussian: Gaussian, learned: dict[tuple[str, int], Learned], rows: list[Row]) -> Drawing:
    figure, (curves, losses, errors) = panels(1, 3)
    _, correlations, _ = gaussian.canonical()
    grid = torch.linspace(0.01, 0.92, 100, dtype=torch.float64)
    forms = {"two-sided": grid, "one-sided": grid / (1 - grid**2), "joint": shrunk(grid)}
    rank = len(correlations)
    for problem, colour in COLOURS.items():
        curves.plot(grid, forms[problem], color=colour, linewidth=1)
        values = torch.linalg.svdvals(gaussian.whitened(learned[problem, rank].a))[:rank]
        curves.plot(correlations, values, "o", color=colour, markersize=5, label=problem)
        mine = select(rows, problem=problem)
        ranks = [row["rank"] for row in mine]
        line(losses.plot, mine, "rank", "least_loss", color=colour, linewidth=1)
        line(losses.plot, mine, "rank", "loss", "o", color=colour, markersize=5)
        errors.plot(ranks, [100 * row["error_of_A"] for row in mine], "o-", color=colour, linewidth=1, markersize=5)
    curves.set(xlabel="canonical correlation", ylabel="singular value of whitened A", ylim=(0, 2.5))
    curves.legend(frameon=False)
    losses.set(xlabel="embedding width", ylabel="loss, nats", xticks=ranks)
    errors.set(xlabel="embedding width", ylabel="relative error of whitened A, %", xticks=ranks, ylim=(0, None))
    return Drawing(
        figure,
        "Left, at full width, and middle, at each width: lines are closed forms, points are trained. Right: how far "
        "the trained A is from the closed form.",
    )


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
    problem: str, gaussian: Gaussian, embed_width: int, *, samples: int, batch: int, steps: int, rate: float, seed: int
) -> Learned:
    """Train on a sample with exactly the covariance of the Gaussian; the loss is the mean over its batches."""
    head_class, objective = PROBLEMS[problem]
    u, v = matched_sample(gaussian, samples, seed)
    encoder = Vectors(u.shape[1], v.shape[1])
    head = seeded(lambda: head_class(u.shape[1], v.shape[1], embed_width, temperature=1.0), seed)
    model = fit(encoder, head, objective, InMemoryDataset(u, v), steps=steps, batch=batch, rate=rate, seed=seed)
    with torch.no_grad():
        parts = Batch(u, v, torch.arange(samples)).split(batch)
        losses = [objective(model(part), part, Progress(0, 1, samples, batch)).total for part in parts]
    g, h = head.image_projection.detach().double(), head.text_projection.detach().double()
    distance = float(head_class is DistanceHead)
    return Learned(g @ h.mT, distance * g @ g.mT, distance * h @ h.mT, float(torch.stack(losses).mean()))


def pmi_form(gaussian: Gaussian) -> Tensor:
    """M of the PMI log p(u, v) - log p(u) p(v), without its constant."""
    return -(gaussian.covariance.inverse() - torch.block_diag(gaussian.uu.inverse(), gaussian.vv.inverse())) / 2


def score_form(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """M of the score <u, A v> - <u, B u> / 2 - <v, C v> / 2."""
    return torch.cat([torch.cat([-b, a], dim=1), torch.cat([a.mT, -c], dim=1)]) / 2


def exact_agreement(gaussian: Gaussian, form: Tensor) -> tuple[float, float, float]:
    """Return slope, error and calibrated error of `clipzoo.lab.methods.judge.agreement` for a score and the PMI.

    Half of the weight is on pairs of the Gaussian and half on independent ones.
    """
    pmi = pmi_form(gaussian)
    sides = [gaussian.covariance, torch.block_diag(gaussian.uu, gaussian.vv)]

    def covariance(first: Tensor, second: Tensor) -> float:
        means = [[float((form @ side).trace()) for side in sides] for form in (first, second)]
        inner = [2 * float((first @ side @ second @ side).trace()) for side in sides]
        products = [value + one * other for value, one, other in zip(inner, *means, strict=True)]
        return sum(products) / 2 - sum(means[0]) * sum(means[1]) / 4

    spread = covariance(form, form)
    slope = covariance(form, pmi) / spread if spread > 0 else 0.0
    error, rest = (max(covariance(kind, kind), 0.0) ** 0.5 for kind in (form - pmi, slope * form - pmi))
    return slope, error, rest
