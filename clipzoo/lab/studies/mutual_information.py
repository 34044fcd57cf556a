"""CLOOB, appendix A.2: estimating the mutual information of correlated Gaussians."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torchvision.ops import MLP

from clipzoo.heads.cloob import CloobHead
from clipzoo.lab.studies.figures import BLACK, BLUE, GREEN, VERMILION, Drawing, line, panels
from clipzoo.lab.studies.framework import AdamStudy, Check, Claim, Findings, Row, Views, fit, select
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.objectives.infoloob import InfoLOOB
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.types import Batch, Count, NonNegative, Positive, Scale

INFONCE, INFOLOOB, HOPFIELD = "InfoNCE", "InfoLOOB", "InfoLOOB with Hopfield"
COLOURS = {INFONCE: BLUE, INFOLOOB: VERMILION, HOPFIELD: GREEN}
PAPER = {10.0: (0.67, 0.33), 14.0: (1.00, 0.48)}
"""Published average variances without and with Hopfield, by mutual information in training (section 3, A.2)."""


@dataclass(frozen=True)
class MutualInformation(AdamStudy):
    """Train estimators of mutual information and compare their estimates with the truth.

    dimensions: number of dimensions of x and of y. information: true values in nats. All training batches are new.
    hidden: widths of the encoders' hidden layers. embed_width: width of the embeddings. inverse_temperatures, betas:
    grid for InfoLOOB and for the Hopfield retrieval; at each value of trained_at the model whose estimate on
    validation_batches is closest to the truth is selected. test_batches: batches per mean and variance. tolerance:
    tolerance of InfoNCE at the highest information, relative to log batch.
    """

    dimensions: Count
    information: list[Positive]
    trained_at: list[Positive]
    hidden: list[Count]
    embed_width: Count
    inverse_temperatures: list[Scale]
    betas: list[Scale]
    validation_batches: Count
    test_batches: Count
    tolerance: NonNegative

    title = "Mutual information"
    source = "CLOOB, appendix A.2, figures 2 and A1"
    question = (
        "x and y are correlated Gaussians whose mutual information is known, -d/2 log(1 - ρ²). Two encoders train on "
        "batches of 64, and the trained loss is read as an estimate of the information. InfoNCE cannot exceed "
        "log 64; InfoLOOB leaves the positive out of the denominator; Hopfield retrieval over the batch should lower "
        "InfoLOOB's variance."
    )
    differs = (
        "The paper gives neither the networks nor the temperatures, only that the parameters were chosen on a "
        "validation set: here the inverse temperature and β come from a small grid by the estimate's error on held-out "
        "batches (grid.csv).",
        "Encoders are ReLU networks with unit-length outputs and a fixed inverse temperature, CLOOB's own head.",
    )

    def run(self) -> Findings:
        grid: list[Row] = []
        selected = {(kind, truth): self._best(kind, truth, grid) for kind in COLOURS for truth in self.trained_at}
        matched = []
        for kind, truth in product(COLOURS, self.information):
            # The settings selected at the nearest value of trained_at.
            nearest = min(self.trained_at, key=lambda level: abs(level - truth))
            model, *settings = selected[kind, nearest]
            if truth != nearest:
                model = self._train(kind, truth, *settings)
            matched.append(self._row(kind, truth, truth, model, *settings))
        transferred = [
            self._row(kind, trained, truth, *selected[kind, trained])
            for kind, trained, truth in product((INFOLOOB, HOPFIELD), self.trained_at, self.information)
        ]
        top = max(self.information)
        by_kind = {kind: {row["truth"]: row for row in select(matched, estimator=kind)} for kind in COLOURS}
        reached = by_kind[INFONCE][top]["estimate"]
        check = Check(f"InfoNCE at {top:g} nats: log {self.batch}", reached, math.log(self.batch), self.tolerance, True)
        claims = list(_claims(by_kind, transferred, grid, self.batch))
        averages = "; ".join(
            f"{average_variance(transferred, HOPFIELD, level):.2f} with Hopfield and "
            f"{average_variance(transferred, INFOLOOB, level):.2f} without, trained at {level:g} nats"
            for level in self.trained_at
        )
        verdict = (
            f"At {top:g} nats InfoNCE says {reached:.2f} (log {self.batch} is "
            f"{math.log(self.batch):.2f}) and InfoLOOB {by_kind[INFOLOOB][top]['estimate']:.1f}; InfoLOOB's average "
            f"variance is {averages}; {Claim.count(claims)}."
        )
        tables = {"estimates": matched, "transferred": transferred, "grid": grid}
        return Findings(verdict, [check], claims, tables, self._drawings(by_kind, transferred))

    def _drawings(self, by_kind: dict[str, dict[float, Row]], transferred: list[Row]) -> dict[str, Drawing]:
        estimated, (axis,) = panels(1, 1, 5, 3.6)
        truths = list(by_kind[INFONCE])
        axis.plot(truths, truths, "--", color=BLACK, linewidth=1, label="truth")
        axis.axhline(math.log(self.batch), color=BLACK, linestyle=":", linewidth=1, label=f"log {self.batch}")
        for kind, rows in by_kind.items():
            spread = [row["variance"] ** 0.5 for row in rows.values()]
            estimates = [row["estimate"] for row in rows.values()]
            axis.errorbar(truths, estimates, spread, fmt="o-", color=COLOURS[kind], linewidth=1, capsize=2, label=kind)
        axis.set(xlabel="true mutual information, nats", ylabel="estimate, nats")
        axis.legend(frameon=False)

        variance, axes = panels(2, len(self.trained_at), sharex=True)
        for column, trained in enumerate(self.trained_at):
            above, below = axes[column], axes[len(self.trained_at) + column]
            for kind in (INFOLOOB, HOPFIELD):
                tested = select(transferred, estimator=kind, trained_at=trained)
                for axis, key, unit in ((above, "estimate", "nats"), (below, "variance", "nats²")):
                    line(axis.plot, tested, "truth", key, "o-", color=COLOURS[kind], linewidth=1, label=kind)
                    axis.set_ylabel(f"{key}, {unit}" if column == 0 else "")
            line(above.plot, tested, "truth", "truth", "--", color=BLACK, linewidth=1, label="truth")
            above.set_title(f"trained at {trained:g} nats")
            below.set(xlabel="tested at, nats", xticks=[row["truth"] for row in tested], ylim=(0, None))
        axes[0].legend(frameon=False, fontsize=8)
        bars = "Figure A1: each model trained and tested at one information; bars: one deviation among batches."
        means = "Figure 2: models trained at one information and tested at all; above the mean, below the variance."
        return {"estimates": (estimated, bars), "variance": (variance, means)}

    def _best(self, kind: str, truth: float, grid: list[Row]) -> tuple[Model, float, float]:
        """Search the grid: return the selected model, its inverse temperature and beta; append all trials to `grid`."""
        betas = self.betas if kind == HOPFIELD else self.betas[:1]
        tried = []
        for inverse_temperature, beta in product(self.inverse_temperatures, betas):
            model = self._train(kind, truth, inverse_temperature, beta)
            estimates = {
                level: self._estimates(model, kind, level, self.validation_batches, seed=self.seed + 1)
                for level in self.information
            }
            estimate = float(estimates[truth].mean())
            tried.append((abs(estimate - truth), model, inverse_temperature, beta))
            grid.append({
                "estimator": kind, "trained_at": truth, "inverse_temperature": inverse_temperature,
                "beta": beta if kind == HOPFIELD else "", "estimate": estimate,
                "average_variance": sum(float(values.var()) for values in estimates.values()) / len(estimates),
            })  # fmt: skip
        return min(tried, key=lambda trial: trial[0])[1:]

    def _row(self, kind: str, level: float, truth: float, model: Model, inverse_temperature: float, beta: float) -> Row:
        estimates = self._estimates(model, kind, truth, self.test_batches, seed=self.seed + 2)
        return {
            "estimator": kind, "trained_at": level, "truth": truth, "estimate": float(estimates.mean()),
            "variance": float(estimates.var()), "inverse_temperature": inverse_temperature,
            **({"beta": beta} if kind == HOPFIELD else {}),
        }  # fmt: skip

    def _train(self, kind: str, truth: float, inverse_temperature: float, beta: float) -> Model:
        width = self.embed_width
        objective: Objective = InfoLOOB(scale=1.0, image_to_text=0.5, text_to_image=0.5)
        if kind == INFONCE:
            objective = InfoNCE(image_to_text=0.5, text_to_image=0.5)

        def encoder() -> Views:
            image, text = (MLP(self.dimensions, [*self.hidden, width]) for _ in range(2))
            return Views(image, text, width, width)

        return fit(
            encoder, lambda: CloobHead(width, width, width, inverse_temperature, hopfield=kind == HOPFIELD, beta=beta),
            objective, *correlated(truth, self.dimensions, self.steps * self.batch, self.seed), steps=self.steps,
            batch=self.batch, rate=self.rate, seed=self.seed,
        )  # fmt: skip

    @torch.no_grad()
    def _estimates(self, model: Model, kind: str, truth: float, batches: int, seed: int) -> Tensor:
        """Estimates of the information, one per batch, averaged over both directions: [batches].

        The bound from one direction is the positives minus the log-mean-exp over all scores, or over all but the
        positive.
        """
        x, y = correlated(truth, self.dimensions, batches * self.batch, seed)
        leave_out = kind != INFONCE
        estimates = []
        for part in Batch(x, y, torch.arange(len(x))).split(self.batch):
            bounds = []
            for scores in model(part).directions:
                log_mean = scores.log_sum_exp(exclude_positive=leave_out) - math.log(scores.columns - leave_out)
                bounds.append((scores.positives() - log_mean).mean())
            estimates.append((bounds[0] + bounds[1]) / 2)
        return torch.stack(estimates)


def correlated(information: float, dimensions: int, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw standard normal x and y, [n, d], whose coordinates are correlated to give this mutual information."""
    correlation = math.sqrt(1 - math.exp(-2 * information / dimensions))
    x, noise = torch.randn(2, samples, dimensions, generator=torch.Generator().manual_seed(seed))
    return x, correlation * x + math.sqrt(1 - correlation**2) * noise


def _claims(by_kind: dict[str, dict[float, Row]], rows: list[Row], grid: list[Row], batch: int) -> Iterator[Claim]:
    estimates = {truth: row["estimate"] for truth, row in by_kind[INFONCE].items()}
    high = [truth for truth in estimates if truth > 6]
    errors = {
        kind: sum(abs(rows[truth]["estimate"] - truth) for truth in high) / len(high)
        for kind, rows in by_kind.items()
    }  # fmt: skip
    variances = {truth: [by_kind[kind][truth]["variance"] for kind in (INFOLOOB, HOPFIELD)] for truth in high}
    yield Claim(
        f"InfoNCE's estimates saturate at log {batch} = {math.log(batch):.2f}.",
        ", ".join(f"{value:.2f} at {truth:g}" for truth, value in estimates.items()),
        max(estimates.values()) <= math.log(batch) and estimates[max(estimates)] > 0.95 * math.log(batch),
    )
    yield Claim(
        "InfoLOOB, with and without Hopfield, estimates high mutual information (above 6 nats) better than InfoNCE.",
        "mean error " + ", ".join(f"{value:.1f} {kind}" for kind, value in errors.items()),
        max(errors[INFOLOOB], errors[HOPFIELD]) < 0.5 * errors[INFONCE],
    )
    yield Claim(
        "Hopfield lowers the variance of InfoLOOB's estimates of high mutual information (figure A1).",
        ", ".join(f"from {before:.3f} to {after:.3f} at {truth:g}" for truth, (before, after) in variances.items()),
        all(after < before for before, after in variances.values()),
    )
    for trained in dict.fromkeys(row["trained_at"] for row in rows):
        plain, hopfield = (
            {row["truth"]: row["variance"] for row in select(rows, estimator=kind, trained_at=trained)}
            for kind in (INFOLOOB, HOPFIELD)
        )
        without, with_hopfield = (average_variance(rows, kind, trained) for kind in (INFOLOOB, HOPFIELD))
        lower = " and ".join(f"{truth:g}" for truth, value in hopfield.items() if value < plain[truth]) or "no level"
        searched, tried = (select(grid, estimator=kind, trained_at=trained) for kind in (INFOLOOB, HOPFIELD))
        at_same = {row["inverse_temperature"]: row["average_variance"] for row in searched}
        fewer = sum(row["average_variance"] < at_same[row["inverse_temperature"]] for row in tried)
        statement = "lowers the average variance over all levels"
        if trained in PAPER:
            statement += " from {:.2f} to {:.2f}".format(*PAPER[trained])
        yield Claim(
            f"Hopfield, in models trained at {trained:g} nats, {statement}.",
            f"{without:.2f} without and {with_hopfield:.2f} with (lower with it when tested at {lower}); at equal "
            f"inverse temperatures lower with it in {fewer} of the grid's {len(tried)} settings",
            with_hopfield < without,
        )


def average_variance(rows: list[Row], kind: str, trained: float) -> float:
    """Variance averaged over the tested levels of mutual information."""
    tested = select(rows, estimator=kind, trained_at=trained)
    return sum(row["variance"] for row in tested) / len(tested)
