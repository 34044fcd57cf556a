"""CLOOB, appendix A.2: estimating the mutual information of correlated Gaussians."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from clipzoo.config.vocabulary import Count, NonNegative, Positive, Rate, Scale, Seed
from clipzoo.data.in_memory import InMemoryDataset
from clipzoo.heads.cloob import CloobHead
from clipzoo.lab.studies.encoders import Perceptrons
from clipzoo.lab.studies.figures import BLACK, BLUE, GREEN, VERMILION, Drawing, line, panels
from clipzoo.lab.studies.framework import (
    Check,
    Claim,
    Findings,
    Row,
    Study,
    count_borne_out,
    fit,
    seeded,
    select,
)
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.objectives.infoloob import InfoLOOB
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.types import Batch, Scores

INFONCE, INFOLOOB, HOPFIELD = "InfoNCE", "InfoLOOB", "InfoLOOB with Hopfield"
COLOURS = {INFONCE: BLUE, INFOLOOB: VERMILION, HOPFIELD: GREEN}
PAPER = {10.0: (0.67, 0.33), 14.0: (1.00, 0.48)}
"""Published average variances without and with Hopfield, by mutual information in training (section 3, A.2)."""


@dataclass(frozen=True)
class MutualInformation(Study):
    """Train estimators of mutual information and compare their estimates with the truth.

    dimensions: of x and of y. information: true values in nats. batch: batch size. steps: training batches, all new.
    hidden: widths of the encoders' hidden layers. embed_width: width of the embeddings. rate: learning rate of Adam.
    inverse_temperatures, betas: grid for InfoLOOB and for the Hopfield retrieval; at each value of trained_at the model
    whose estimate on validation_batches is closest to the truth is selected.
    test_batches: batches per mean and variance. tolerance: of InfoNCE at the highest information, relative to
    log batch.
    """

    dimensions: Count
    information: list[Positive]
    trained_at: list[Positive]
    batch: Count
    steps: Count
    hidden: list[Count]
    embed_width: Count
    rate: Rate
    inverse_temperatures: list[Scale]
    betas: list[Scale]
    validation_batches: Count
    test_batches: Count
    seed: Seed
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
        matched = [self._matched(kind, truth, selected) for kind in COLOURS for truth in self.information]
        transferred = [
            self._row(kind, trained, truth, *selected[kind, trained])
            for kind in (INFOLOOB, HOPFIELD)
            for trained in self.trained_at
            for truth in self.information
        ]
        top = max(self.information)
        by_kind = {kind: {row["truth"]: row for row in select(matched, estimator=kind)} for kind in COLOURS}
        quantity = f"InfoNCE at {top:g} nats: log {self.batch}"
        reached = by_kind[INFONCE][top]["estimate"]
        check = Check(quantity, reached, math.log(self.batch), self.tolerance, relative=True)
        claims = [
            claim_saturation(by_kind, self.batch),
            claim_follows(by_kind),
            claim_steadier(by_kind),
            *claims_variance(transferred, grid),
        ]
        averages = "; ".join(
            f"{average_variance(transferred, HOPFIELD, level):.2f} with Hopfield and "
            f"{average_variance(transferred, INFOLOOB, level):.2f} without, trained at {level:g} nats"
            for level in self.trained_at
        )
        verdict = (
            f"At {top:g} nats InfoNCE says {by_kind[INFONCE][top]['estimate']:.2f} (log {self.batch} is "
            f"{math.log(self.batch):.2f}) and InfoLOOB {by_kind[INFOLOOB][top]['estimate']:.1f}; InfoLOOB's average "
            f"variance is {averages}; {count_borne_out(claims)}."
        )
        drawings = {
            "estimates": _draw_estimates(by_kind, self.batch),
            "variance": _draw_transferred(transferred, self.trained_at),
        }
        tables = {"estimates": matched, "transferred": transferred, "grid": grid}
        return Findings(verdict, [check], claims, tables, drawings)

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

    def _matched(self, kind: str, truth: float, selected: dict[tuple[str, float], tuple[Model, float, float]]) -> Row:
        """Train and test at the same information, with the settings selected at the nearest value of trained_at."""
        nearest = min(self.trained_at, key=lambda level: abs(level - truth))
        model, inverse_temperature, beta = selected[kind, nearest]
        if truth != nearest:
            model = self._train(kind, truth, inverse_temperature, beta)
        return self._row(kind, truth, truth, model, inverse_temperature, beta)

    def _row(
        self, kind: str, trained: float, truth: float, model: Model, inverse_temperature: float, beta: float
    ) -> Row:
        estimates = self._estimates(model, kind, truth, self.test_batches, seed=self.seed + 2)
        return {
            "estimator": kind, "trained_at": trained, "truth": truth, "estimate": float(estimates.mean()),
            "variance": float(estimates.var()), "inverse_temperature": inverse_temperature,
            **({"beta": beta} if kind == HOPFIELD else {}),
        }  # fmt: skip

    def _train(self, kind: str, truth: float, inverse_temperature: float, beta: float) -> Model:
        encoder = seeded(lambda: Perceptrons(self.dimensions, self.hidden, self.embed_width), self.seed)
        width = self.embed_width
        head = seeded(
            lambda: CloobHead(width, width, width, inverse_temperature, hopfield=kind == HOPFIELD, beta=beta), self.seed
        )
        data = InMemoryDataset(*correlated(truth, self.dimensions, self.steps * self.batch, self.seed))
        objective: Objective = InfoLOOB(scale=1.0, image_to_text=0.5, text_to_image=0.5)
        if kind == INFONCE:
            objective = InfoNCE(image_to_text=0.5, text_to_image=0.5)
        return fit(encoder, head, objective, data, steps=self.steps, batch=self.batch, rate=self.rate, seed=self.seed)

    def _estimates(self, model: Model, kind: str, truth: float, batches: int, seed: int) -> Tensor:
        """Estimates of the information, one per batch, averaged over both directions: [batches]."""
        x, y = correlated(truth, self.dimensions, batches * self.batch, seed)
        parts = Batch(x, y, torch.arange(len(x))).split(self.batch)
        with torch.no_grad():
            directions = [model(part).directions for part in parts]
            return torch.stack([(_estimate(a, kind) + _estimate(b, kind)) / 2 for a, b in directions])


def correlated(information: float, dimensions: int, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw standard normal x and y, [n, d], whose coordinates are correlated to give this mutual information."""
    correlation = math.sqrt(1 - math.exp(-2 * information / dimensions))
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(2, samples, dimensions, generator=generator)
    return x, correlation * x + math.sqrt(1 - correlation**2) * noise


def _estimate(scores: Scores, kind: str) -> Tensor:
    """Bound from one direction: positives minus the log-mean-exp over all scores, or over all but the positive."""
    leave_out = kind != INFONCE
    log_mean = scores.log_sum_exp(exclude_positive=leave_out) - math.log(scores.columns - leave_out)
    return (scores.positives() - log_mean).mean()


def _draw_estimates(by_kind: dict[str, dict[float, Row]], batch: int) -> Drawing:
    figure, (axis,) = panels(1, 1, 5, 3.6)
    truths = list(by_kind[INFONCE])
    axis.plot(truths, truths, "--", color=BLACK, linewidth=1, label="truth")
    axis.axhline(math.log(batch), color=BLACK, linestyle=":", linewidth=1, label=f"log {batch}")
    for kind, rows in by_kind.items():
        spread = [float(row["variance"]) ** 0.5 for row in rows.values()]
        estimates = [float(row["estimate"]) for row in rows.values()]
        axis.errorbar(truths, estimates, spread, fmt="o-", color=COLOURS[kind], linewidth=1, capsize=2, label=kind)
    axis.set(xlabel="true mutual information, nats", ylabel="estimate, nats")
    axis.legend(frameon=False)
    return Drawing(
        figure, "Figure A1: each model trained and tested at one information; bars: one deviation among batches."
    )


def _draw_transferred(rows: list[Row], trained_at: list[float]) -> Drawing:
    figure, axes = panels(2, len(trained_at), sharex=True)
    for column, trained in enumerate(trained_at):
        for kind in (INFOLOOB, HOPFIELD):
            mine = select(rows, estimator=kind, trained_at=trained)
            for index, key in enumerate(("estimate", "variance")):
                axis = axes[index * len(trained_at) + column]
                line(axis.plot, mine, "truth", key, "o-", color=COLOURS[kind], linewidth=1, label=kind)
                axis.set_ylabel(("estimate, nats", "variance, nats²")[index] if column == 0 else "")
        truths = [row["truth"] for row in mine]
        axes[column].plot(truths, truths, "--", color=BLACK, linewidth=1, label="truth")
        axes[column].set_title(f"trained at {trained:g} nats")
        axes[len(trained_at) + column].set(xlabel="tested at, nats", xticks=truths, ylim=(0, None))
    axes[0].legend(frameon=False, fontsize=8)
    return Drawing(
        figure, "Figure 2: models trained at one information and tested at all; above the mean, below the variance."
    )


def claim_saturation(by_kind: dict[str, dict[float, Row]], batch: int) -> Claim:
    estimates = {truth: float(row["estimate"]) for truth, row in by_kind[INFONCE].items()}
    return Claim(
        f"InfoNCE's estimates saturate at log {batch} = {math.log(batch):.2f}.",
        ", ".join(f"{value:.2f} at {truth:g}" for truth, value in estimates.items()),
        max(estimates.values()) <= math.log(batch) and estimates[max(estimates)] > 0.95 * math.log(batch),
    )


def claim_follows(by_kind: dict[str, dict[float, Row]]) -> Claim:
    def mean_error(kind: str) -> float:
        high = [row for truth, row in by_kind[kind].items() if truth > 6]
        return sum(abs(float(row["estimate"]) - float(row["truth"])) for row in high) / len(high)

    errors = {kind: mean_error(kind) for kind in by_kind}
    return Claim(
        "InfoLOOB, with and without Hopfield, estimates high mutual information (above 6 nats) better than InfoNCE.",
        "mean error " + ", ".join(f"{value:.1f} {kind}" for kind, value in errors.items()),
        max(errors[INFOLOOB], errors[HOPFIELD]) < 0.5 * errors[INFONCE],
    )


def claim_steadier(by_kind: dict[str, dict[float, Row]]) -> Claim:
    variances = {
        truth: (float(row["variance"]), float(by_kind[HOPFIELD][truth]["variance"]))
        for truth, row in by_kind[INFOLOOB].items()
        if truth > 6
    }
    return Claim(
        "Hopfield lowers the variance of InfoLOOB's estimates of high mutual information (figure A1).",
        ", ".join(f"from {before:.3f} to {after:.3f} at {truth:g}" for truth, (before, after) in variances.items()),
        all(after < before for before, after in variances.values()),
    )


def claims_variance(rows: list[Row], grid: list[Row]) -> list[Claim]:
    claims = []
    for trained in dict.fromkeys(float(row["trained_at"]) for row in rows):
        variance = {
            kind: {row["truth"]: row["variance"] for row in select(rows, estimator=kind, trained_at=trained)}
            for kind in (INFOLOOB, HOPFIELD)
        }
        without, with_hopfield = (average_variance(rows, kind, trained) for kind in (INFOLOOB, HOPFIELD))
        lower = [truth for truth, value in variance[HOPFIELD].items() if value < variance[INFOLOOB][truth]]
        where = " and ".join(f"{truth:g}" for truth in lower) or "no level"
        searched = select(grid, estimator=INFOLOOB, trained_at=trained)
        plain = {row["inverse_temperature"]: row["average_variance"] for row in searched}
        tried = select(grid, estimator=HOPFIELD, trained_at=trained)
        fewer = sum(row["average_variance"] < plain[row["inverse_temperature"]] for row in tried)
        said = "lowers the average variance over all levels"
        if trained in PAPER:
            said += " from {:.2f} to {:.2f}".format(*PAPER[trained])
        claims.append(
            Claim(
                f"Hopfield, in models trained at {trained:g} nats, {said}.",
                f"{without:.2f} without and {with_hopfield:.2f} with (lower with it when tested at {where}); at equal "
                f"inverse temperatures lower with it in {fewer} of the grid's {len(tried)} settings",
                with_hopfield < without,
            )
        )
    return claims


def average_variance(rows: list[Row], kind: str, trained: float) -> float:
    """Variance averaged over the tested levels of mutual information."""
    mine = select(rows, estimator=kind, trained_at=trained)
    return sum(row["variance"] for row in mine) / len(mine)
