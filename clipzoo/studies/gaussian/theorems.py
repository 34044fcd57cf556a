"""Theorems 5.1, 5.3 and 5.6 of the perspective, compared with training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from clipzoo.config.vocabulary import Count, NonNegative, Range, Rate, Seed
from clipzoo.studies.framework.draw import BLUE, GREEN, VERMILION, panels
from clipzoo.studies.framework.study import Check, Claim, Drawing, Findings, Row, Study
from clipzoo.studies.gaussian.closed_forms import Gaussian, shrunk, with_correlations
from clipzoo.studies.gaussian.training import Learned, learn

COLOURS = {"two-sided": BLUE, "one-sided": VERMILION, "joint": GREEN}


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
        learned = {(problem, rank): self._learn(problem, gaussian, rank) for problem in COLOURS for rank in ranks}
        checks, rows = [], []
        for (problem, rank), encoders in learned.items():
            new, row = self._compare(problem, gaussian, rank, encoders)
            checks += new
            rows.append(row)
        full = {problem: learned[problem, max(ranks)] for problem in COLOURS}
        checks += self._corollaries(gaussian, full)
        claims = [_claim_conditionals(gaussian, full), _claim_marginals(gaussian, full)]
        met = sum(check.met for check in checks)
        worst = max(row["error_of_A"] for row in rows)
        verdict = (
            f"Training meets {met} of {len(checks)} closed forms within tolerance; A is within {100 * worst:.1f} % of "
            "the optimum at every rank of all three problems."
        )
        drawings = {"theorems": _drawing(gaussian, learned, rows)}
        return Findings(verdict, checks, claims, {"theorems": rows}, drawings)

    def _learn(self, problem: str, gaussian: Gaussian, rank: int) -> Learned:
        return learn(
            problem, gaussian, rank, samples=self.samples, batch=self.batch, steps=self.steps, rate=self.rate,
            seed=self.seed,
        )  # fmt: skip

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

    def _corollaries(self, gaussian: Gaussian, full: dict[str, Learned]) -> list[Check]:
        models = {problem: gaussian.tilted(learned.a, learned.b, learned.c) for problem, learned in full.items()}
        correlations = gaussian.canonical()[1]
        slope = gaussian.uv @ gaussian.vv.inverse()
        measured = {
            "5.2: mean of u given v, two-sided": (gaussian.uu @ full["two-sided"].a, slope),
            "5.4: mean of u given v, one-sided": (models["one-sided"].u_given_v @ full["one-sided"].a, slope),
            "5.4: covariance of u given v, one-sided": (models["one-sided"].u_given_v, gaussian.u_given_v),
            "5.7: marginal covariance of u, two-sided (55a)": (
                models["two-sided"].uu,
                gaussian.marginal_of_u(correlations),
            ),
            "5.7: marginal covariance of u, joint (55b)": (
                models["joint"].uu,
                gaussian.marginal_of_u(shrunk(correlations)),
            ),
        }
        return [
            Check(f"corollary {name}: relative error", relative_error(*pair), 0.0, self.covariance_tolerance)
            for name, pair in measured.items()
        ]


def optimum(problem: str, gaussian: Gaussian, rank: int | None) -> tuple[Tensor, Tensor | None, float]:
    """Return A, B (None for problems without B) and the minimum of the loss."""
    if problem == "one-sided":
        a, b = gaussian.one_sided(rank)
        return a, b, float(gaussian.one_sided_loss(rank))
    if problem == "joint":
        return gaussian.joint(rank), None, float(gaussian.joint_loss(rank))
    return gaussian.two_sided(rank), None, float(gaussian.two_sided_loss(rank))


def relative_error(measured: Tensor, expected: Tensor) -> float:
    return float((measured - expected).norm() / expected.norm())


def _claim_conditionals(gaussian: Gaussian, full: dict[str, Learned]) -> Claim:
    errors = {}
    for problem in ("two-sided", "one-sided"):
        model = gaussian.tilted(full[problem].a, full[problem].b, full[problem].c)
        errors[problem] = relative_error(model.u_given_v, gaussian.u_given_v)
    return Claim(
        "The two-sided loss with the inner product misses the conditional covariance of u given v; the one-sided loss "
        "with the distance finds it.",
        f"relative error {errors['two-sided']:.2f} two-sided, {errors['one-sided']:.3f} one-sided",
        errors["one-sided"] < 0.1 * errors["two-sided"],
    )


def _claim_marginals(gaussian: Gaussian, full: dict[str, Learned]) -> Claim:
    two, joint = (gaussian.tilted(full[name].a, full[name].b, full[name].c) for name in ("two-sided", "joint"))
    gap = torch.linalg.eigvalsh(two.uu - joint.uu)
    # Only the correlated directions: in all others both models keep the marginal.
    least = float(gap.sort(descending=True).values[len(gaussian.canonical()[1]) - 1])
    above = float(torch.linalg.eigvalsh(joint.uu - gaussian.uu).max())
    errors = [relative_error(model.uu, gaussian.uu) for model in (two, joint)]
    return Claim(
        "The joint loss inflates the marginal covariance of u less than the two-sided loss does, in every correlated "
        "direction.",
        f"inflation {errors[0]:.2f} two-sided, {errors[1]:.2f} joint; least eigenvalue of their difference {least:.3f}",
        least > 0 and above > 0,
    )


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
        mine = [row for row in rows if row["problem"] == problem]
        ranks = [row["rank"] for row in mine]
        losses.plot(ranks, [row["least_loss"] for row in mine], color=colour, linewidth=1)
        losses.plot(ranks, [row["loss"] for row in mine], "o", color=colour, markersize=5)
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
