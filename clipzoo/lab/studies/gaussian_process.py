"""The Gaussian process of the perspective, section 6.1: errors over width, batch size and training samples.

w = sum_j sqrt(lambda_j) xi_j cos(j pi x) with lambda_j = (j^2 pi^2 + 9)^-2 on (0, 1). u is w at evenly spaced places
plus noise, v the first coefficients xi. All conditional distributions are Gaussian in closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from clipzoo.config.vocabulary import Count, NonNegative, Positive
from clipzoo.heads.vector import InnerProductHead
from clipzoo.lab.studies.figures import BLACK, BLUE, SKY, VERMILION, Drawing, line, panels, ticks_at
from clipzoo.lab.studies.framework import AdamStudy, Check, Claim, Findings, Row, fit, select, vectors
from clipzoo.lab.studies.gaussian_theorems import Gaussian, power
from clipzoo.objectives.conditional import Conditional

U, V = "error_of_u_given_v", "error_of_v_given_u"
MEANS = {U: "u given v", V: "v given u"}
SWEEPS = {"width": "embedding width", "batch": "batch size", "samples": "training samples"}
INVERSE_LENGTH, REGULARITY = 3.0, 2.0


@dataclass(frozen=True)
class GaussianProcess(AdamStudy):
    """Measure errors of the conditional means while one of width, batch size and training samples varies.

    modes: number of modes of the process. places, coefficients: dimensions of u and v. noise: standard deviation of u's
    noise. widths, batches, sizes: embedding widths, batch sizes and numbers of training samples to try; width, batch,
    samples: their values while another one varies. seeds: number of draws of data and weights to average over. paths:
    number of realisations in the figure. tolerance: tolerance of a mean's error around its closed form, in units of the
    squared mean. 0.015 is less than the change of the error of v given u from one width to the next, so the check tells
    neighbouring widths apart.
    """

    modes: Count
    places: Count
    coefficients: Count
    noise: Positive
    widths: list[Count]
    batches: list[Count]
    sizes: list[Count]
    width: Count
    samples: Count
    seeds: Count
    paths: Count
    tolerance: NonNegative

    title = "Gaussians: a process seen twice"
    source = "A mathematical perspective on contrastive learning, section 6.1, figures 7 to 10"
    question = (
        "u is a Gaussian process at twelve places with noise, v its first five coefficients. Linear encoders with the "
        "two-sided loss should find both conditional means (theorem 5.1). How far off are they over embedding width, "
        "batch size and number of training samples? Errors are E|model's mean - true mean|² over E|true mean|², the "
        "expectation over the conditioning variable taken exactly."
    )
    differs = (
        "The number of steps is the same for every batch size, where the paper holds epochs: what is measured is the "
        "bias of the loss, not how far training came. A batch is never larger than the set.",
        "The rate is higher than the paper's 1e-4 and falls to zero, instead of 500 epochs at a constant rate; it "
        "sees u in units of the noise, which leaves the models as they are.",
        "v holds the standard normal coefficients ξ; the paper's cosines are not of unit length, so that its printed "
        "integral gives ξ/2. Observation places are i/13.",
    )

    def run(self) -> Findings:
        gaussian, dimensions = self.gaussian(), (self.places, self.coefficients)
        # A = G^T H by width, batch and samples, one for each draw.
        learned: dict[tuple[int, int, int], list[Tensor]] = {}
        rows: list[Row] = []
        for name, values in (("width", self.widths), ("batch", self.batches), ("samples", self.sizes)):
            for value in values:
                setting = {"width": self.width, "batch": self.batch, "samples": self.samples, name: value}
                width, samples = setting["width"], setting["samples"]
                key = width, min(setting["batch"], samples), samples
                for seed in range(self.seed, self.seed + self.seeds) if key not in learned else ():
                    u, v = self.draw(samples, seed)
                    # u in units of the noise suits the learning rate; this invertible map changes neither model.
                    model = fit(
                        partial(vectors, *dimensions), partial(InnerProductHead, *dimensions, width, temperature=1.0),
                        Conditional(lambda_u=1.0, lambda_v=1.0), u / self.noise, v, steps=self.steps, batch=key[1],
                        rate=self.rate, seed=seed,
                    )  # fmt: skip
                    g, h = (model.head.state_dict()[name].double() for name in ("image_projection", "text_projection"))
                    learned.setdefault(key, []).append(g @ h.mT / self.noise)
                errors = torch.tensor([conditional_errors(gaussian, a) for a in learned[key]]).mean(dim=0)
                is_narrow = width < self.coefficients
                least = conditional_errors(gaussian, gaussian.two_sided(width)) if is_narrow else (0.0, 0.0)
                measured = {U: float(errors[0]), V: float(errors[1]), f"least_{U}": least[0], f"least_{V}": least[1]}
                rows.append({"varied": name, **setting, **measured})
        by_width = select(rows, varied="width")
        small = [row for row in by_width if row["width"] <= self.coefficients]
        full, largest = small[-1], by_width[-1]
        checks = [
            Check(f"width {row['width']}: error of the mean of {mean}", row[key], row[f"least_{key}"], self.tolerance)
            for row in by_width
            for key, mean in MEANS.items()
        ]

        def said(row: Row) -> str:
            return f"{100 * row[U]:.2g} and {100 * row[V]:.2g} %"

        claims = [
            Claim(
                f"Increasing the embedding width up to {self.coefficients} improves both conditional means (figure 8).",
                "; ".join(f"{row['width']}: {said(row)}" for row in small),
                all(a[key] > b[key] for a, b in zip(small, small[1:], strict=False) for key in (U, V)),
            ),
            Claim(
                "Larger widths do not improve them further.",
                f"{said(full)} at {full['width']}, {said(largest)} at {largest['width']}",
                all(largest[key] > 0.8 * full[key] for key in (U, V)),
            ),
        ]
        for name, number in (("batch", 9), ("samples", 10)):
            first, *_, last = select(rows, varied=name)
            claims.append(
                Claim(
                    f"The errors converge towards zero with the {SWEEPS[name]} (figure {number}).",
                    f"from {said(first)} at {first[name]} to {said(last)} at {last[name]}",
                    all(last[key] < 0.5 * first[key] for key in (U, V)),
                )
            )
        best = select(by_width, width=self.coefficients)[-1]
        verdict = (
            f"At width {self.coefficients} the means are off by {100 * best[U]:.2f} % (u given v) and "
            f"{100 * best[V]:.2f} % (v given u) of their square; {Check.count(checks)} and {Claim.count(claims)}."
        )
        return Findings(verdict, checks, claims, {"errors": rows}, self._drawings(rows, learned))

    def _drawings(self, rows: list[Row], learned: dict[tuple[int, int, int], list[Tensor]]) -> dict[str, Drawing]:
        gaussian, (u, v) = self.gaussian(), (view[0].double() for view in self.draw(1, self.seed + 1000))
        x = torch.linspace(0, 1, 101, dtype=torch.float64)
        xi_generator, generator = (torch.Generator().manual_seed(self.seed + number) for number in (1, 2))

        def draws(mean: Tensor, covariance: Tensor) -> Tensor:
            noise = torch.randn(self.paths, len(mean), generator=generator, dtype=torch.float64)
            return mean + noise @ torch.linalg.cholesky(covariance).mT

        basis = self.basis(x)
        v_basis, other_basis = basis[:, : self.coefficients], basis[:, self.coefficients :]
        u_mean, v_mean = gaussian.uv @ v, gaussian.uv.mT @ gaussian.uu.inverse() @ u
        places, (u_given_v, v_given_u) = torch.arange(1, len(v) + 1), (gaussian.u_given_v, gaussian.v_given_u)
        # Realisations of w whose first coefficients are v.
        xi = torch.randn(self.paths, self.modes, generator=xi_generator, dtype=torch.float64)
        xi[:, : self.coefficients] = v
        bands = {
            "w given v": (x, xi @ basis.mT, v_basis @ v, other_basis.square().sum(dim=1).sqrt()),
            "u given v": (self.grid, draws(u_mean, u_given_v), u_mean, u_given_v.diag().sqrt()),
            "v given u": (places, draws(v_mean, v_given_u), v_mean, v_given_u.diag().sqrt()),
        }
        process, axes = panels(1, 3)
        for axis, (title, (at, drawn, mean, deviation)) in zip(axes, bands.items(), strict=True):
            axis.plot(at, drawn.mT, color=SKY, linewidth=0.4, alpha=max(0.05, 1 / math.isqrt(len(drawn))))
            axis.plot(at, mean, color=BLACK, linewidth=1.2)
            for sign in (-1.96, 1.96):
                axis.plot(at, mean + sign * deviation, "--", color=BLACK, linewidth=0.8)
            axis.set(title=title, xlabel="coefficient" if axis is axes[2] else "x", ylabel=title[0])
        axes[2].set_xticks(places)

        errors, axes = panels(3, 3, height=2.4)
        for place, (name, label) in enumerate(SWEEPS.items()):
            sweep_rows = select(rows, varied=name)
            left, middle, right = axes[3 * place : 3 * place + 3]
            for index, row in enumerate(sweep_rows):
                a = learned[row["width"], min(row["batch"], row["samples"]), row["samples"]][0]
                shade = (0.85 * (1 - index / max(1, len(sweep_rows) - 1)),) * 2 + (1.0,)
                left.plot(self.grid, gaussian.uu @ a @ v, color=shade, linewidth=1)
                middle.plot(places, gaussian.vv @ a.mT @ u, color=shade, linewidth=1)
            left.plot(self.grid, u_mean, "--", color=BLACK, linewidth=1)
            middle.plot(places, v_mean, "--", color=BLACK, linewidth=1)
            values = [row[name] for row in sweep_rows]
            for (key, text), colour in zip(MEANS.items(), (BLUE, VERMILION), strict=True):
                line(right.plot, sweep_rows, name, key, "o-", color=colour, linewidth=1, markersize=4, label=text)
                if name == "width":
                    least = [max(row[f"least_{key}"], 1e-9) for row in sweep_rows]
                    right.plot(values, least, "--", color=colour, linewidth=1)
            if name != "width":
                right.set_xscale("log")
                ticks_at(right, values, fontsize=7)
            right.set(yscale="log", xlabel=label, ylabel="relative squared error", ylim=(1e-4, 1.5))
            left.set(title="mean of u given v" if place == 0 else "", xlabel="x", ylabel=f"by {label}")
            middle.set(title="mean of v given u" if place == 0 else "", xlabel="coefficient")
        axes[2].legend(frameon=False, fontsize=8)
        draws_text = f"Figure 7: {self.paths} draws, the conditional mean and 95 % intervals, given one v and one u."
        errors_text = (
            "Figures 8, 9 and 10: the means for one v and one u (darker is larger, dashed the truth) and their errors "
            "over width (dashed: closed form), batch and samples."
        )
        return {"process": (process, draws_text), "errors": (errors, errors_text)}

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
        identity, vv = (torch.eye(size, dtype=torch.float64) for size in (self.places, self.coefficients))
        return Gaussian(basis @ basis.mT + self.noise**2 * identity, basis[:, : self.coefficients], vv)

    def draw(self, samples: int, seed: int) -> tuple[Tensor, Tensor]:
        """Draw independent pairs u [n, n_u] and v [n, n_v], float32."""
        generator = torch.Generator().manual_seed(seed)
        xi = torch.randn(samples, self.modes, generator=generator, dtype=torch.float64)
        noise = torch.randn(samples, self.places, generator=generator, dtype=torch.float64)
        return (xi @ self.basis(self.grid).mT + self.noise * noise).float(), xi[:, : self.coefficients].float()


def conditional_errors(gaussian: Gaussian, a: Tensor) -> tuple[float, float]:
    """E |model's mean - true mean|^2 of u given v and of v given u, relative to E |true mean|^2.

    The model tilts the product of the true marginals by exp(<u, A v>): its means are C_uu A v and C_vv A^T u. The
    expectation over the conditioning variable is exact.
    """

    def share(mean: Tensor, truth: Tensor, covariance: Tensor) -> float:
        root = power(covariance, 0.5)
        return float(((mean - truth) @ root).square().sum() / (truth @ root).square().sum())

    return (
        share(gaussian.uu @ a, gaussian.uv @ gaussian.vv.inverse(), gaussian.vv),
        share(gaussian.vv @ a.mT, gaussian.uv.mT @ gaussian.uu.inverse(), gaussian.uu),
    )
