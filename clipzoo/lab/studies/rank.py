"""WPSE, section 5.1: an inner product in d dimensions has rank at most d + 1; point sets are not limited so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from clipzoo.heads.base import Head
from clipzoo.heads.vector import InnerProductHead
from clipzoo.heads.wpse import GaussianKernel, WpseHead
from clipzoo.lab.studies.figures import BLACK, BLUE, GREEN, PURPLE, VERMILION, Drawing, line, panels
from clipzoo.lab.studies.framework import Check, Claim, Findings, Row, Study, Views, all_scores, fit, select
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.types import Batch, Count, Loss, NonNegative, Positive, Progress, Rate, Scale, Seed, Similarity, Weight

INNER, WPSE = "inner product", "WPSE"


@dataclass(frozen=True)
class Rank(Study):
    """Fit inner products and WPSE to a planted matrix of full rank.

    items: number N of items on each side. sharpness, floor: settings of the planted density ratio, floor + bump
    exp(sharpness (cos - 1)). inner_widths: widths d of the inner product. wpse_widths, points: widths d and numbers of
    points of WPSE. item_width: width of a point's free token vector. kernel_width, alpha, features: settings of WPSE,
    features being D in training. steps, rate, wpse_rate: settings of Adam. evaluation_features: D in evaluation;
    small_features: values of D for which the error due to random features is shown; evaluation_draws: draws per value.
    tolerance: relative tolerance of the trained inner product's error to its closed form.
    """

    items: Count
    sharpness: Positive
    floor: Positive
    inner_widths: list[Count]
    wpse_widths: list[Count]
    points: list[Count]
    item_width: Count
    kernel_width: Scale
    alpha: tuple[Weight, Weight]
    features: Count
    steps: Count
    rate: Rate
    wpse_rate: Rate
    evaluation_features: Count
    small_features: list[Count]
    evaluation_draws: Count
    seed: Seed
    tolerance: NonNegative

    title = "The rank of the similarity"
    source = "WPSE, section 5.1, proposition C.1 and theorem 5.1"
    question = (
        "N items on a circle have a planted pointwise mutual information of full rank. An inner product in d "
        "dimensions and a constant can be fitted to it only as well as the singular values beyond the d-th allow, "
        "which is known exactly; theorem 5.1 says that weighted point sets in few dimensions are not bound so. "
        "Both heads are fitted to the matrix with free vectors for the items."
    )
    differs = (
        "The paper proves the limit and measures nothing here. The fit is to the matrix itself, by least squares, "
        "instead of through InfoNCE: the question is what a similarity can hold.",
        "A WPSE item of M points in d dimensions has M (d + 1) free numbers, an inner product's d: the last claim "
        "compares it with an inner product of as many, which the paper does not.",
    )

    def run(self) -> Findings:
        planted = planted_pmi(self.items, self.sharpness, self.floor)
        rows: list[Row] = []
        for width in self.inner_widths:
            build = partial(InnerProductHead, self.item_width, self.item_width, width, temperature=1.0)
            model = self._fitted(planted, build, 1, self.rate)
            errors = _errors(all_scores(model, self.items), planted)
            bound = least_error(planted, width)
            rows.append({"head": INNER, "width": width, "points": 1, "numbers": width, **errors, "bound": bound})
        models: dict[tuple[int, int], Model] = {}
        for width, points in product(self.wpse_widths, self.points):
            wpse = partial(self._wpse, width, self.evaluation_features)
            models[width, points] = model = self._fitted(planted, wpse, points, self.wpse_rate)
            model.head.resample(0)
            errors = _errors(all_scores(model, self.items), planted)
            rows.append({"head": WPSE, "width": width, "points": points, "numbers": points * (width + 1), **errors})
        inner, sets = select(rows, head=INNER), select(rows, head=WPSE)
        best = min(sets, key=lambda row: row["error"])

        # The best WPSE, evaluated with fewer random features.
        model = models[best["width"], best["points"]]
        by_features: list[Row] = []
        for count in self.small_features:
            head = self._wpse(best["width"], count)
            head.load_state_dict(model.head.state_dict())
            reduced = Model(model.encoder, head).eval()
            total = 0.0
            for draw in range(self.evaluation_draws):
                head.resample(draw)
                total += _errors(all_scores(reduced, self.items), planted)["error"] ** 2
            by_features.append({"features": count, "error": (total / self.evaluation_draws) ** 0.5})
        checks = [
            Check(f"inner product, d = {row['width']}: root mean square error", row["error"], row["bound"],
                  self.tolerance, relative=True)
            for row in inner
        ]  # fmt: skip
        undercut = max(0.0, max(1 - row["error"] / row["bound"] for row in inner))
        bounds = {row["width"]: row["bound"] for row in inner if row["width"] in self.wpse_widths}
        nearest = {width: min(row["error"] for row in select(sets, width=width)) for width in self.wpse_widths}
        # With as many dimensions as items the inner product can represent any matrix.
        equal = [least_error(planted, min(row["numbers"], self.items)) for row in sets]
        nearer = [row["error"] < bound for row, bound in zip(sets, equal, strict=True)]
        claims = [
            Claim(
                "An inner product in d dimensions cannot hold a matrix of higher rank, whatever is trained.",
                f"largest share of its bound that a trained one undercuts: {undercut:.4f}",
                all(row["error"] >= 0.999 * row["bound"] for row in inner),
            ),
            Claim(
                "Weighted point sets approximate it better than the inner product of the same dimension can.",
                ", ".join(f"d = {d}: {nearest[d]:.3f} for {bounds[d]:.3f}" for d in self.wpse_widths if d in bounds),
                all(nearest[width] < bound for width, bound in bounds.items()),
            ),
            Claim(
                "(Not in the paper.) They do so with as many free numbers an item as the inner product has.",
                f"nearer than the inner product's closed form in {sum(nearer)} of {len(equal)} settings; "
                f"{best['points']} points, d = {best['width']}, {best['numbers']} numbers: "
                f"{best['error']:.3f}, closed form {equal[sets.index(best)]:.3g}",
                all(nearer),
            ),
        ]
        least = next(width for width in range(1, self.items + 1) if least_error(planted, width) <= best["error"])
        verdict = (
            f"WPSE with {best['points']} points in {best['width']} dimensions fits the planted matrix to "
            f"{best['error']:.3f}, for which an inner product needs d = {least} at least; trained inner products meet "
            f"their closed form in {sum(check.met for check in checks)} of {len(checks)} widths; {Claim.count(claims)}."
        )
        drawings = {"rank": self._draw(planted, rows, by_features)}
        return Findings(verdict, checks, claims, {"errors": rows, "features": by_features}, drawings)

    def _fitted(self, planted: Tensor, head: Callable[[], Head], points: int, rate: float) -> Model:
        """Fit with all items in one batch, so that a step covers the whole matrix."""
        all_items = torch.arange(self.items)
        return fit(
            lambda: lookup(self.items, points, self.item_width), head, MatrixFit(planted), all_items,
            all_items, steps=self.steps, batch=self.items, rate=rate, seed=self.seed,
        )  # fmt: skip

    def _wpse(self, width: int, evaluation_features: int) -> WpseHead:
        return WpseHead(
            self.item_width, self.item_width, width, alpha=(self.alpha[0], self.alpha[1]),
            kernel=GaussianKernel(self.kernel_width), features=self.features, evaluation_features=evaluation_features,
            weights="signed", weight_bound=100.0, reduction="mean", image_points=None, text_points="all",
            temperature=0.07, min_scale=1.0, max_scale=100.0, seed=self.seed,
        )  # fmt: skip

    def _draw(self, planted: Tensor, rows: list[Row], by_features: list[Row]) -> Drawing:
        figure, (picture, errors, features) = panels(1, 3, 3.6, 3)
        image = picture.imshow(planted, cmap="viridis")
        picture.set(title="planted PMI", xlabel="text item", ylabel="image item")
        figure.colorbar(image, ax=picture, shrink=0.8)
        widths = range(1, self.items - 1)
        bounds = [least_error(planted, width) for width in widths]
        errors.semilogy(widths, bounds, color=BLACK, linewidth=1, label="closed form")
        line(errors.semilogy, select(rows, head=INNER), "width", "error", "o", color=VERMILION, label=INNER)
        for index, count in enumerate(self.points):
            colour, name = (BLUE, GREEN, PURPLE)[index % 3], f"{WPSE}, {count} points"
            wpse_rows = select(rows, head=WPSE, points=count)
            line(errors.semilogy, wpse_rows, "width", "error", "s--", color=colour, linewidth=1, label=name)
        errors.set(xlabel="embedding width d", ylabel="root mean square error", ylim=(4e-3, None))
        line(features.loglog, by_features, "features", "error", "o-", color=BLUE)
        limit = min(row["error"] for row in select(rows, head=WPSE))
        features.axhline(limit, color=BLACK, linestyle="--", linewidth=1, label=f"D = {self.evaluation_features}")
        features.set(xlabel="random features D in evaluation", ylabel="error of the best WPSE")
        for axis in (errors, features):
            axis.legend(frameon=False, fontsize=7)
        caption = "The planted matrix; the error of fits over d, with the inner product's closed form; WPSE over D."
        return figure, caption


def lookup(items: int, points: int, width: int) -> Views:
    """Trainable token vectors for finitely many items; a view is an item number, [b] int64.

    items: number of items on each side. points: tokens per item. width: width of a token.
    """
    tables = (nn.Embedding(items, points * width) for _ in range(2))
    image, text = (nn.Sequential(table, nn.Unflatten(1, (points, width))) for table in tables)
    return Views(image, text, width, width)


class MatrixFit(Objective):
    """Least squares to a target matrix: mean (S - c - target)^2 with the best constant c, addressed by item."""

    name = "matrix_fit"
    target: Tensor

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.register_buffer("target", target.float())

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        difference = similarity.image_to_text.dense() - self.target[batch.sample_id][:, batch.sample_id]
        return Loss((difference - difference.mean()).square().mean())


def planted_pmi(items: int, sharpness: float, floor: float) -> Tensor:
    """log p(x, y) / (p(x) p(y)) for items on a circle, [N, N] float64; the marginals are uniform by symmetry."""
    angle = 2 * math.pi * torch.arange(items, dtype=torch.float64) / items
    bump = (sharpness * (torch.cos(angle[:, None] - angle) - 1)).exp()
    return (floor + (1 - floor) * bump / bump.mean()).log()


def least_error(planted: Tensor, width: int) -> float:
    """Minimum root mean square error of a matrix of rank `width` plus a constant.

    The planted matrix is circulant: the constant vector is one of its singular vectors, and the constant removes it.
    """
    values = torch.linalg.svdvals(planted - planted.mean())
    return float(values[width:].square().sum()) ** 0.5 / len(planted)


def _errors(scores: Tensor, planted: Tensor) -> dict[str, float]:
    """Root mean square and largest error after subtracting the best constant."""
    difference = scores - planted
    return {
        "error": float((difference - difference.mean()).square().mean()) ** 0.5,
        "largest": float(difference.max() - difference.min()) / 2,
    }
