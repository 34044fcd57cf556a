"""The two-dimensional example of the perspective: four models of one Gaussian, drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from matplotlib.colors import BoundaryNorm
from torch import Tensor

from clipzoo.heads.vector import ClipHead
from clipzoo.lab.studies.figures import BLACK, BLUE, GREEN, PURPLE, VERMILION, Drawing, panels
from clipzoo.lab.studies.framework import AdamStudy, Check, Claim, Findings, Row, pmi_agreement, vectors
from clipzoo.lab.studies.gaussian_theorems import Gaussian, Learned, learn, shrunk
from clipzoo.model import Model
from clipzoo.objectives.conditional import Conditional
from clipzoo.types import Batch, Count, NonNegative, Positive, Progress

COLOURS = {"two-sided": BLUE, "one-sided": VERMILION, "joint": GREEN, "normalised": PURPLE}
GRID = torch.linspace(-8, 8, 641, dtype=torch.float64)
STEP = float(GRID[1] - GRID[0])
ONE = int(torch.argmin((GRID - 1).abs()))
"""Index of 1 in GRID."""
LEVELS = [0.0, 0.003, 0.01, 0.02, 0.04, 0.06, 0.08, 0.12, 0.16, 0.22]
TICKS = [-4, -2, 0, 2, 4]


@dataclass(frozen=True)
class GaussianPlane(AdamStudy):
    """Train four models of one two-dimensional Gaussian and compare their densities with the closed forms.

    variance: that of u and of v. covariance: that of u and v. samples: training samples. sign_samples, sign_draws: the
    normalised encoder's loss is the mean over sign_draws draws of sign_samples pairs. tolerance, moment_tolerance:
    relative tolerances of parameters and variances. loss_tolerance: absolute.
    """

    variance: Positive
    covariance: float
    samples: Count
    sign_samples: Count
    sign_draws: Count
    tolerance: NonNegative
    moment_tolerance: NonNegative
    loss_tolerance: NonNegative

    title = "Gaussians: the plane"
    source = "A mathematical perspective on contrastive learning, section 5.4, figures 1 to 6"
    question = (
        "One Gaussian of (u, v) and embeddings of one dimension: which conditionals and marginals does the model have "
        "that each loss and tilting learns?"
    )
    differs = (
        "The normalised encoder in one dimension is a sign, whose gradient is zero: there is nothing to train, and the "
        "figure shows its one model with positive correlation, at temperature 1.",
        "The agreement of the score with the pointwise mutual information (PMI) is not in the paper: half of the "
        "weight is on pairs of the Gaussian and half on independent ones.",
        "The expectations are over a Sobol sample that has exactly the Gaussian's covariance.",
    )

    def run(self) -> Findings:
        variance, covariance = (torch.tensor([[entry]]).double() for entry in (self.variance, self.covariance))
        gaussian = Gaussian(variance, covariance, variance)
        learned = {
            problem: learn(problem, gaussian, 1, self.samples, self.batch, self.steps, self.rate, self.seed)
            for problem in ("two-sided", "one-sided", "joint")
        }
        truth = normal_density(gaussian)
        product = normal_density(Gaussian(gaussian.uu, torch.zeros_like(gaussian.uv), gaussian.vv))
        densities = {name: normal_density(gaussian.tilted(fit.a, fit.b, fit.c)) for name, fit in learned.items()}
        # The product of the marginals, tilted by exp(sign(u) sign(v)).
        densities["normalised"] = _normalised((GRID.sign()[:, None] * GRID.sign()).exp() * product)
        near = product > 1e-12  # elsewhere weights are negligible, and densities underflow
        pmi, weights = (truth / product).log()[near].numpy(), ((truth + product) / 2)[near].numpy()
        rows: list[Row] = []
        for name, density in {"truth": truth, **densities}.items():
            # Moments by integration over the grid, valid for non-Gaussian models too.
            marginals = {"u": density.sum(1), "v": density.sum(0)}
            row = {f"variance_of_{view}": float((p * STEP**2 * GRID**2).sum()) for view, p in marginals.items()}
            for view, conditionals in (("u_given_v", density.mT), ("v_given_u", density)):
                # Conditional mean and variance at conditioning value 1; rows are conditioning values.
                given = conditionals[ONE] / conditionals[ONE].sum()
                row[f"slope_of_{view}"] = mean = float((given * GRID).sum())
                row[f"variance_of_{view}"] = float((given * (GRID - mean) ** 2).sum())
            row["kl_from_truth"] = float((truth * (truth / density).log()).nansum() * STEP**2)
            # A model's score is log(model / product of the marginals) and a constant.
            agreement = pmi_agreement((density / product).log()[near].numpy(), pmi, weights)
            rows.append({"model": name, **row, **agreement})
        by_model = {row["model"]: row for row in rows}
        checks = list(self._checks(gaussian, learned, by_model))
        claims = list(plane_claims(by_model))
        verdict = (
            f"{Check.count(checks)} and {Claim.count(claims)}; "
            f"A is {checks[0].measured:.3f} two-sided ({checks[0].expected:.3f}), {checks[1].measured:.3f} joint "
            f"({checks[1].expected:.3f}) and {checks[2].measured:.3f} one-sided ({checks[2].expected:.3f})."
        )
        return Findings(verdict, checks, claims, {"moments": rows}, _drawings(product, truth, densities))

    def _checks(self, gaussian: Gaussian, learned: Mapping[str, Learned], rows: Mapping[str, Row]) -> Iterator[Check]:
        two_sided, joint, (a, b) = gaussian.two_sided(), gaussian.joint(), gaussian.one_sided()
        parameters = {
            "A, two-sided": (learned["two-sided"].a, two_sided),
            "A, joint": (learned["joint"].a, joint),
            "A, one-sided": (learned["one-sided"].a, a),
            "B, one-sided": (learned["one-sided"].b, b),
        }
        for name, (measured, expected) in parameters.items():
            yield Check(name, float(measured), float(expected), self.tolerance, relative=True)
        s = self.covariance / self.variance
        h = float(shrunk(torch.tensor(s, dtype=torch.float64)))
        moments = {
            ("variance_of_u", "two-sided"): self.variance / (1 - s * s),
            ("variance_of_u", "joint"): self.variance / (1 - h * h),
            ("variance_of_u_given_v", "one-sided"): self.variance * (1 - s * s),
            # With a one-dimensional embedding C = A^2 / B, which determines v given u.
            ("variance_of_v_given_u", "one-sided"): 1 / (1 / self.variance + float(a**2 / b)),
            ("slope_of_u_given_v", "one-sided"): s,
            ("slope_of_u_given_v", "two-sided"): s,
            ("slope_of_u_given_v", "joint"): h,
        }
        for (moment, model), value in moments.items():
            name = f"{moment.replace('_', ' ')}, {model}"
            yield Check(name, rows[model][moment], value, self.moment_tolerance, relative=True)
        # Distances of the scores from the PMI, compared with those of the optimal parameters.
        none = torch.zeros_like(gaussian.uv)
        optima = {"two-sided": (two_sided, none, none), "one-sided": (a, b, a * a / b), "joint": (joint, none, none)}
        for name, optimum in optima.items():
            quantity = f"error of the score from the PMI, {name}"
            error = gaussian.pmi_error(*optimum)
            yield Check(quantity, rows[name]["mean_error"], error, self.moment_tolerance, relative=True)
        yield Check("error of the PMI itself as a score", rows["truth"]["mean_error"], 0.0, 1e-6)

        # The loss of the CLIP head in one dimension is -E S + log cosh 1 with E S = 2 P(same sign) - 1.
        head = ClipHead(1, 1, 1, temperature=1.0, max_scale=1.0, learnable_temperature=False)
        losses = []
        with torch.no_grad():
            head.image_projection.fill_(1.0)
            head.text_projection.fill_(1.0)
            for draw in range(self.sign_draws):
                u, v = gaussian.sample(self.sign_samples, self.seed + draw)
                batch = Batch(u, v, torch.arange(len(u)))
                similarity = Model(vectors(1, 1), head)(batch)
                losses.append(Conditional(1.0, 1.0)(similarity, batch, Progress(0, 1, len(u), len(u))).total)
        least = math.log(math.cosh(1)) - 2 / math.pi * math.asin(self.covariance / self.variance)
        yield Check("loss of the normalised encoder", float(torch.stack(losses).mean()), least, self.loss_tolerance)


def normal_density(gaussian: Gaussian) -> Tensor:
    """Density on GRID x GRID: u along rows, v along columns."""
    precision = gaussian.covariance.inverse()
    u, v = GRID[:, None], GRID[None, :]
    exponent = -(precision[0, 0] * u * u + 2 * precision[0, 1] * u * v + precision[1, 1] * v * v) / 2
    return _normalised(exponent.exp())


def _normalised(density: Tensor) -> Tensor:
    return density / (density.sum() * STEP**2)


def _drawings(product: Tensor, truth: Tensor, densities: Mapping[str, Tensor]) -> dict[str, Drawing]:
    joint, axes = panels(2, 3, 2.8, 2.4)
    drawn_densities = {"product of marginals": product, "truth": truth, **densities}
    for axis, (name, density) in zip(axes, drawn_densities.items(), strict=True):
        image = axis.contourf(GRID, GRID, density.mT, LEVELS, cmap="viridis", norm=BoundaryNorm(LEVELS, 256))
        axis.contour(GRID, GRID, truth.mT, LEVELS[1:4], colors="white", linewidths=0.6)
        axis.set(title=name, xlabel="u", ylabel="v", xlim=(-5, 5), ylim=(-5, 5), aspect="equal")
        axis.set(xticks=TICKS, yticks=TICKS)
    joint.colorbar(image, ax=axes, shrink=0.8, label="density", ticks=LEVELS, format="%g")

    def views(density: Tensor) -> dict[str, Tensor]:
        return {
            "u given v = 1": density[:, ONE] / (density[:, ONE].sum() * STEP),
            "v given u = 1": density[ONE] / (density[ONE].sum() * STEP),
            "marginal of u": density.sum(1) * STEP,
            "marginal of v": density.sum(0) * STEP,
        }

    conditionals, axes = panels(len(densities), 4, 2.5, 1.7, sharex=True)
    true_views = views(truth)
    for row, (name, density) in enumerate(densities.items()):
        for column, (view, values) in enumerate(views(density).items()):
            axis = axes[4 * row + column]
            axis.plot(GRID, true_views[view], "--", color=BLACK, linewidth=1)
            axis.plot(GRID, values, color=COLOURS[name])
            axis.set(title=view if row == 0 else "", xlim=(-4, 5), ylim=(0, None), yticks=[])
            axis.set_ylabel(name if column == 0 else "")
            axis.set_xlabel("uv"[column % 2] if row == len(densities) - 1 else "")
    outer = "Figures 1, 5 and 6: densities of the models; the white lines are the truth's outer contours."
    views_text = "Figures 2, 3, 4 and 6: densities of the conditionals and marginals of each model; dashed: the truth."
    return {"joint_densities": (joint, outer), "conditionals": (conditionals, views_text)}


def plane_claims(rows: Mapping[str, Mapping[str, float]]) -> Iterator[Claim]:
    truth = rows["truth"]

    def off(model: str, moment: str) -> float:
        return abs(rows[model][moment] / truth[moment] - 1)

    divergences = {name: rows[name]["kl_from_truth"] for name in rows if name != "truth"}
    two, one, joint, sign = (rows[name] for name in ("two-sided", "one-sided", "joint", "normalised"))
    yield Claim(
        "Two-sided: both conditional means are right, both conditional variances too large (figure 2).",
        f"mean {two['slope_of_u_given_v']:.3f} for {truth['slope_of_u_given_v']:.3f}, "
        f"variance {two['variance_of_u_given_v']:.3f} for {truth['variance_of_u_given_v']:.3f}",
        max(off("two-sided", "slope_of_u_given_v"), off("two-sided", "slope_of_v_given_u")) < 0.05
        and two["variance_of_u_given_v"] > 1.2 * truth["variance_of_u_given_v"],
    )
    yield Claim(
        "One-sided: mean and variance of u given v are right, those of v given u are not (figure 3).",
        f"variance of u given v {one['variance_of_u_given_v']:.3f}, of v given u "
        f"{one['variance_of_v_given_u']:.3f}, for {truth['variance_of_u_given_v']:.3f}",
        off("one-sided", "variance_of_u_given_v") < 0.05 < off("one-sided", "variance_of_v_given_u"),
    )
    yield Claim(
        "Joint: the marginal variances are nearer the truth than with the two-sided loss, conditional means are "
        "biased (figure 4).",
        f"variance of u {joint['variance_of_u']:.2f} against {two['variance_of_u']:.2f}, for "
        f"{truth['variance_of_u']:.2f}; mean of u given v = 1: {joint['slope_of_u_given_v']:.3f}",
        off("joint", "variance_of_u") < off("two-sided", "variance_of_u") and off("joint", "slope_of_u_given_v") > 0.05,
    )
    yield Claim(
        "Of the three losses the joint one gives the nearest approximation of the target (figure 5).",
        "KL from the truth: " + ", ".join(f"{name} {value:.3f}" for name, value in divergences.items()),
        divergences["joint"] == min(divergences.values()),
    )
    yield Claim(
        "The normalised encoder captures the positive correlation and, in one dimension, both marginals exactly "
        "(figure 6).",
        f"marginal variance {sign['variance_of_u']:.4f} for {truth['variance_of_u']:.4f}",
        off("normalised", "variance_of_u") < 1e-3 and sign["slope_of_u_given_v"] > 0,
    )
