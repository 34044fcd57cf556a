"""NUCLR, sections 3.3, G.1 and G.2: estimated popularity and generalisation error in the half-disc world.

x is uniform on the upper half of the unit disc; y given x has the density exp(x.y / tau) / g(x) on the unit square.
All in float64; energies E_ij = x_i . y_j.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from clipzoo.data.in_memory import InMemoryDataset
from clipzoo.distributed.world import World
from clipzoo.heads.vector import InnerProductHead
from clipzoo.lab.studies.figures import BLACK, BLUE, GREEN, VERMILION, Drawing, line, panels, ticks_at
from clipzoo.lab.studies.framework import Check, Claim, Findings, Row, Study, select, vectors
from clipzoo.model import Model
from clipzoo.objectives.nuclr import NUCLR
from clipzoo.types import Count, NonNegative, Probability, Progress, Scale, Seed

METHODS = {"GCL": VERMILION, "NUCLR": BLUE, "MLE": GREEN}
TICKS = [digit * 10.0**power for power in range(-5, 1) for digit in (1, 2, 5)]


@dataclass(frozen=True)
class HalfDisc(Study):
    """Compare risks and popularity estimates with their closed forms.

    temperatures: the paper's main temperature, then its less long-tailed one. sizes: sample sizes n. draws: draws of
    data to average over. shown: n in the figure of the popularity. iterations: fixed-point iterations for the
    popularity. nuclr_steps: updates of zeta by the NUCLR objective on whole batches; mini_batch, mini_steps, mini_eta:
    settings of its stochastic updates. risk_samples: samples of the paper's estimate of the true risk. zeta_tolerance:
    absolute tolerance of log popularity. gradient_tolerance: tolerance of the gradient at the fixed point.
    risk_tolerance: tolerance of the true risk, in standard errors of its estimate.
    """

    temperatures: list[Scale]
    sizes: list[Count]
    draws: Count
    shown: Count
    iterations: Count
    nuclr_steps: Count
    mini_batch: Count
    mini_steps: Count
    mini_eta: Probability
    risk_samples: Count
    seed: Seed
    zeta_tolerance: NonNegative
    gradient_tolerance: NonNegative
    risk_tolerance: NonNegative

    title = "Popularity and generalisation"
    source = "NUCLR, sections 3.3, G.1 and G.2, figures 2 and 6"
    question = (
        "x is uniform on a half-disc, y in a square has the density exp(x·y/τ)/g(x). The energies are known; the "
        "question is what a loss puts in place of g: GCL counts all samples alike, NUCLR weighs them by the popularity "
        "found from problem (8), MLE knows the integral. How far is each risk from the true one?"
    )
    differs = (
        "Generalisation errors are means over many draws of the data; the paper does not say over how many.",
        "y is drawn by inverting its distribution function instead of rejection, and the true risk is an integral "
        "computed by quadrature (the paper's 50,000 samples are used as a check of it).",
        "GCL's constant popularity is n, the exact one for a uniform density on the unit square.",
        "The popularity is drawn at the samples and sorted, instead of interpolated and smoothed to a density.",
    )

    def run(self) -> Findings:
        main = self.temperatures[0]
        # Absolute errors of the risks, and error terms, averaged over the draws.
        rows: list[Row] = []
        for tau, samples in product(self.temperatures, self.sizes):
            truth = true_risk(tau)
            means = dict.fromkeys(("GCL", "NUCLR", "MLE", "GCL_term", "NUCLR_term", "NUCLR_scaled_by_mean"), 0.0)
            for draw in range(self.draws):
                x, y = draw_pairs(samples, tau, self.seed + draw)
                energies, exact = x @ y.mT, popularity(x, y, tau)
                raw = estimated_popularity(energies, tau, self.iterations)
                popularities = {
                    "GCL": torch.full_like(exact, samples), "NUCLR": raw * exact.max() / raw.max(),
                    "NUCLR_scaled_by_mean": raw * exact.mean() / raw.mean(),
                }  # fmt: skip
                # Empirical risk, eq. 5: the integral over y is a sum over y_j with weights 1 / popularity.
                inner = {name: (energies / tau - q.log()).logsumexp(dim=1) for name, q in popularities.items()}
                for name, log_integral in {**inner, "MLE": log_partition(x, tau)}.items():
                    risk = float((tau * log_integral - energies.diagonal()).mean())
                    means[name] += abs(risk - truth) / self.draws
                for name in ("GCL", "NUCLR"):
                    # The term of theorem 1 that an approximate popularity costs.
                    difference = (1 / popularities[name] - 1 / exact).abs()
                    term = (difference * ((energies - 1) / tau).exp()).sum(dim=1).mean()
                    means[f"{name}_term"] += float(term) / self.draws
            rows.append({"temperature": tau, "n": samples, **means})

        # The popularity at n = shown by the fixed point, by NUCLR on whole batches and on mini-batches.
        x, y = draw_pairs(self.shown, main, self.seed)
        exact = popularity(x, y, main).log()
        fixed = estimated_popularity(x @ y.mT, main, self.iterations).log()
        whole = learned_log_popularity(x, y, main, self.shown, self.nuclr_steps, eta=main, momentum=1.0)
        small = learned_log_popularity(x, y, main, self.mini_batch, self.mini_steps, eta=self.mini_eta, momentum=0.9)
        estimates = {
            "problem (8), solved": fixed, "NUCLR, whole batches": whole,
            f"NUCLR, batches of {self.mini_batch}": small,
        }  # fmt: skip
        popularity_rows: list[Row] = [
            {
                "found_by": name,
                "correlation_of_logs": float(torch.corrcoef(torch.stack([exact, estimate]))[0, 1]),
                "deviation_of_logs": float(((estimate - estimate.mean()) - (exact - exact.mean())).std()),
            }
            for name, estimate in estimates.items()
        ]
        # The norm of the gradient of problem (8) at zeta.
        attention = torch.softmax((x @ y.mT - main * fixed) / main, dim=1)
        gradient = float((1 - attention.sum(dim=0)).norm() / self.shown)
        distance = float(((whole - whole.mean()) - (fixed - fixed.mean())).abs().max())
        checks = [
            Check("gradient of problem (8) at the fixed point (9)", gradient, 0.0, self.gradient_tolerance),
            Check("log popularity by NUCLR's own steps, largest error", distance, 0.0, self.zeta_tolerance),
        ]
        for tau in self.temperatures:
            x, y = draw_pairs(self.risk_samples, tau, self.seed + 10_000)
            losses = tau * log_partition(x, tau) - (x * y).sum(dim=1)
            tolerance = self.risk_tolerance * float(losses.std()) / self.risk_samples**0.5
            name = f"true risk, τ = {tau:g}, from {self.risk_samples} samples"
            checks.append(Check(name, float(losses.mean()), true_risk(tau), tolerance))
        claims = list(self._claims(rows, popularity_rows))
        last = select(rows, temperature=main)[-1]
        verdict = (
            f"At n = {last['n']} and τ = {main:g} the generalisation error is {last['GCL']:.4f} for GCL, "
            f"{last['NUCLR']:.4f} for NUCLR and {last['MLE']:.4f} for MLE; {Claim.count(claims)}."
        )
        tables = {"errors": rows, "popularity": popularity_rows}
        return Findings(verdict, checks, claims, tables, self._drawings(rows))

    def _claims(self, rows: list[Row], popularity: list[Row]) -> Iterator[Claim]:
        (long, short), first, last = self.temperatures[:2], self.sizes[0], self.sizes[-1]
        by = {(row["temperature"], row["n"]): row for row in rows}
        ends = {name: (by[long, first][name], by[long, last][name]) for name in METHODS}
        long_tail = [by[long, last][key] / by[short, last][key] for key in ("GCL", "GCL_term")]
        reduced = {
            (tau, key): by[tau, last][f"NUCLR{key}"] / by[tau, last][f"GCL{key}"]
            for tau in self.temperatures
            for key in ("", "_term")
        }
        not_smaller = [f"n = {row['n']}, τ = {row['temperature']:g}" for row in rows if row["NUCLR"] >= row["GCL"]]
        yield Claim(
            "The optimum of problem (8) finds the true popularity up to a constant factor.",
            "correlation of the logarithms: "
            + ", ".join(f"{row['correlation_of_logs']:.3f} {row['found_by']}" for row in popularity),
            popularity[0]["correlation_of_logs"] > 0.9,
        )
        yield Claim(
            "The uniform popularity of GCL leaves an error that does not diminish with n; NUCLR's is significantly "
            "smaller and almost matches MLE as n grows.",
            f"from n = {first} to {last}: "
            + ", ".join(f"{name} {before:.4f} to {after:.4f}" for name, (before, after) in ends.items()),
            ends["GCL"][1] > 0.5 * ends["GCL"][0] and ends["NUCLR"][1] < min(0.5 * ends["GCL"][1], 2 * ends["MLE"][1]),
        )
        yield Claim(
            f"GCL's generalisation error and error term are worse in the long-tailed world (τ = {long:g}) than at "
            f"τ = {short:g}.",
            f"at n = {last}: {long_tail[0]:.1f} times the error and {long_tail[1]:.2f} times the term",
            min(long_tail) > 1,
        )
        yield Claim(
            "NUCLR reduces both, in both worlds.",
            f"at n = {last}: "
            + ", ".join(
                f"{'term' if key else 'error'} times {ratio:.2f} at τ = {tau:g}"
                for (tau, key), ratio in reduced.items()
            )
            + (f"; error not smaller than GCL's at {' and '.join(not_smaller)}" if not_smaller else ""),
            max(reduced.values()) < 1,
        )

    def _drawings(self, rows: list[Row]) -> dict[str, Drawing]:
        shown, axes = panels(1, 2 + len(self.temperatures))
        for index, temperature in enumerate(self.temperatures):
            x, y = draw_pairs(self.shown, temperature, self.seed)
            exact = popularity(x, y, temperature)
            raw = estimated_popularity(x @ y.mT, temperature, self.iterations)
            estimate = raw * exact.max() / raw.max()
            if index == 0:
                for axis, values, name in zip(axes, (exact, estimate), ("true", "found"), strict=False):
                    dots = axis.scatter(
                        y[:, 0], y[:, 1], c=values, cmap="viridis", s=28, vmin=0.0, vmax=float(exact.max())
                    )
                    axis.set(title=f"{name} popularity", xlabel="y₁", ylabel="y₂", aspect="equal")
                shown.colorbar(dots, ax=axes[:2], shrink=0.8)
            axis = axes[2 + index]
            axis.plot(exact.sort(descending=True).values, color=BLACK, linewidth=3, label="true")
            axis.plot(estimate.sort(descending=True).values, color=BLUE, label="found")
            axis.set(title=f"τ = {temperature:g}", xlabel="rank", ylabel="popularity", ylim=(0, None))
            axis.legend(frameon=False)

        errors, axes = panels(2, len(self.temperatures))
        upper, lower = axes[: len(self.temperatures)], axes[len(self.temperatures) :]
        for temperature, above, below in zip(self.temperatures, upper, lower, strict=True):
            curve_rows = select(rows, temperature=temperature)
            for name, colour in METHODS.items():
                line(above.loglog, curve_rows, "n", name, "o-", color=colour, linewidth=1, label=name)
                if name != "MLE":
                    line(below.loglog, curve_rows, "n", f"{name}_term", "o-", color=colour, linewidth=1, label=name)
            above.set(title=f"τ = {temperature:g}", ylabel="generalisation error")
            below.set(xlabel="n", ylabel="error term of theorem 1")
        for axis in axes:
            ticks_at(axis, self.sizes, fontsize=8)
            low, high = axis.get_ylim()
            ticks = [tick for tick in TICKS if low <= tick <= high]
            axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        upper[0].legend(frameon=False)
        lower[0].legend(frameon=False)
        text = f"Figures 2 and 6: the popularity of n = {self.shown} samples, true and found; right: sorted."
        error_text = "Figures 2 and 6: generalisation error, and the term that the popularity costs, over n."
        return {"popularity": (shown, text), "errors": (errors, error_text)}


def learned_log_popularity(
    x: Tensor, y: Tensor, temperature: float, batch: int, steps: int, *, eta: float, momentum: float
) -> Tensor:
    """Update zeta with the NUCLR objective at fixed energies. Returns zeta / tau of the contrast items, [n]."""
    objective = NUCLR(
        temperature=temperature, gamma=1.0 if batch == len(x) else 0.8, zeta=0.0, xi=0.0, eta=eta, eta_image_factor=1.0,
        momentum=momentum, frozen_epochs=0, learn_zeta=True, positive="zeta", xi_update="step",
    )  # fmt: skip
    objective.double()
    objective.allocate(len(x))
    model = Model(vectors(2, 2), InnerProductHead(2, 2, embed_width=None, temperature=1.0))
    batches = InMemoryDataset(x, y).batches(
        seed=0, global_batch=batch, world=World(), start_step=0, stop_step=steps, trim_text=False
    )
    with torch.no_grad():
        for step, pairs in enumerate(batches):
            similarity = model.head(model.encoder.image(pairs.image), model.encoder.text(pairs.text))
            objective(similarity, pairs, Progress(step, steps, len(x), batch))
    return objective.zeta[1] / temperature  # of the texts


def draw_pairs(samples: int, temperature: float, seed: int) -> tuple[Tensor, Tensor]:
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
