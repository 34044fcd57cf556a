"""Convergence rates of the approximations in point-set heads: points (KME-CLIP) and random features (WPSE)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from clipzoo.heads.kme import KmeHead
from clipzoo.heads.wpse import GaussianKernel, InverseMultiquadricKernel, Kernel, WpseHead
from clipzoo.lab.studies.figures import BLACK, CYCLE, line, panels, ticks_at
from clipzoo.lab.studies.framework import Check, Claim, Findings, Row, Study
from clipzoo.types import Count, Features, NonNegative, PointSet, Positive, Range, Scale, Seed


@dataclass(frozen=True)
class Rates(Study):
    """Measure approximation errors over the number of points M and of random features D.

    dimensions: number of dimensions of the unit sphere. gamma: coefficient of KME-CLIP's kernel. concentration:
    concentration of the weights w on the sphere. population: number of points of the exact mean embedding. points:
    values of M. point_draws: point sets drawn per M. kernel_width: width of WPSE's two kernels. cosines: cosines
    between the two compared points. features: values of D. feature_draws: draws of random features per D.
    rate_tolerance: tolerance of slopes on double logarithmic scales. size_tolerance: relative tolerance of errors.
    """

    dimensions: Count
    gamma: Scale
    concentration: Positive
    population: Count
    points: list[Count]
    point_draws: Count
    kernel_width: Scale
    cosines: list[Annotated[float, Range(at_least=-1, at_most=1)]]
    features: list[Count]
    feature_draws: Count
    rate_tolerance: NonNegative
    size_tolerance: NonNegative
    seed: Seed

    title = "Rates of the approximations"
    source = "KME-CLIP, theorem 5; WPSE, section 5.3"
    question = (
        "A mean embedding f = E w(v) k(v, ·) is replaced by M points drawn from it: theorem 5 promises an error of "
        "order 1/√M in the RKHS, and its mean square is (E w² - |f|²)/M exactly. WPSE replaces the kernel by D random "
        "features, whose mean square error is (1 + k(2δ)/2 - k(δ)²)/D for points δ apart. Both are measured with the "
        "heads' own scores."
    )
    differs = (
        "Theorem 5 says that good points exist; drawn points are what its proof uses, and what is measured here.",
        "The population is a fixed set of points, so that |f| is exact.",
    )

    def run(self) -> Findings:
        points = list(self._point_errors())
        kernels = {
            "Gaussian": GaussianKernel(self.kernel_width),
            "inverse multiquadric": InverseMultiquadricKernel(self.kernel_width),
        }
        features = {name: list(self._feature_errors(name, kernel)) for name, kernel in kernels.items()}
        checks = [
            Check("points: slope of log error over log M", _slope(points, "M"), -0.5, self.rate_tolerance),
            *(
                Check(f"points: error at M = {row['M']}", row["error"], row["expected"], self.size_tolerance, True)
                for row in (points[0], points[-1])
            ),
        ]
        for name, rows in features.items():
            ratio = math.prod(row["error"] / row["expected"] for row in rows) ** (1 / len(rows))
            checks += [
                Check(f"{name}: slope of log error over log D", _slope(rows, "D"), -0.5, self.rate_tolerance),
                Check(f"{name}: error over its closed form", ratio, 1.0, self.size_tolerance),
            ]
        claim = Claim(
            "The error of M points decays as 1/√M (theorem 5).",
            f"slope {checks[0].measured:.3f} from M = {self.points[0]} to {self.points[-1]}",
            checks[0].met,
        )
        verdict = (
            f"On double logarithmic scales the errors fall with slope {checks[0].measured:.3f} over M and "
            f"{', '.join(f'{check.measured:.3f}' for check in checks[3::2])} over D, where -0.5 is promised; "
            f"{Check.count(checks)}."
        )
        tables = {"points": points, "features": [row for rows in features.values() for row in rows]}

        figure, (left, right) = panels(1, 2, 4, 3)
        line(left.loglog, points, "M", "error", "o", color=CYCLE[0], label="measured")
        line(left.loglog, points, "M", "expected", "-", color=BLACK, linewidth=1, label="closed form")
        left.set(xlabel="points M", ylabel="RKHS error")
        ticks_at(left, self.points)
        for (name, rows), colour in zip(features.items(), CYCLE, strict=False):
            line(right.loglog, rows, "D", "error", "o", color=colour, label=name)
            line(right.loglog, rows, "D", "expected", "-", color=colour, linewidth=1)
        right.set(xlabel="random features D", ylabel="error of the kernel")
        ticks_at(right, self.features, fontsize=8)
        for axis, ticks in ((left, (0.1, 0.2, 0.5, 1.0)), (right, (0.02, 0.05, 0.1))):
            axis.legend(frameon=False)
            axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        caption = "Measured errors (points) and their closed forms (lines): left theorem 5, right WPSE."
        return Findings(verdict, checks, [claim], tables, {"rates": (figure, caption)})

    def _point_errors(self) -> Iterator[Row]:
        """Root mean square of |f - f_M| over the draws, from <f, f'> = exp(score) of the KME head."""
        generator = torch.Generator().manual_seed(self.seed)
        head = KmeHead(1, 1, self.dimensions, self.gamma, None, "all").double()
        points = torch.randn(self.population, self.dimensions, generator=generator, dtype=torch.float64)
        points = points / points.norm(dim=-1, keepdim=True)
        log_weights = self.concentration * points[:, 0]
        whole = PointSet(points[None], (log_weights - math.log(self.population))[None])

        def inner(left: PointSet, right: PointSet) -> Tensor:
            with torch.no_grad():
                return head.score(left, right).exp()

        norm = float(inner(whole, whole))
        expected = float((2 * log_weights).exp().mean()) - norm
        for count in self.points:
            chosen = torch.randint(self.population, (self.point_draws, count), generator=generator)
            drawn = PointSet(points[chosen], log_weights[chosen] - math.log(count))
            sets = map(PointSet, drawn.points.split(1), drawn.log_weights.split(1))
            squares = torch.cat([inner(one, one) for one in sets]).flatten()
            error = float((norm - 2 * inner(drawn, whole).flatten() + squares).mean()) ** 0.5
            yield {"M": count, "error": error, "expected": (expected / count) ** 0.5}

    def _feature_errors(self, name: str, kernel: Kernel) -> Iterator[Row]:
        """Root mean square of the WPSE head's score minus the kernel, over draws and cosines."""
        cosines, width = torch.tensor(self.cosines), self.dimensions + 1
        first = torch.zeros(len(cosines), 1, width)
        first[:, :, 0] = 1.0
        second = torch.zeros_like(first)
        second[:, 0, 0], second[:, 0, 1] = cosines, (1 - cosines**2).sqrt()
        first[:, :, -1] = second[:, :, -1] = 1.0  # the weight's own entry
        squared = 2 - 2 * cosines
        exact = kernel.value(squared)
        variance = float((1 + kernel.value(4 * squared) / 2 - exact**2).mean())
        for count in self.features:
            head = WpseHead(
                width, width, self.dimensions, alpha=(0.0, 1.0), kernel=kernel, features=count,
                evaluation_features=count, weights="signed", weight_bound=100.0, reduction="mean", image_points=None,
                text_points="all", temperature=1.0, min_scale=1.0, max_scale=100.0, seed=self.seed,
            )  # fmt: skip
            errors = []
            with torch.no_grad():
                for side in (head.image, head.text):
                    side.projection.copy_(torch.eye(width, self.dimensions))
                    side.weight_projection.zero_()
                    # The bounded activation maps this to a weight of 1.
                    side.weight_projection[-1] = 100 * math.atanh(0.01)
                for draw in range(self.feature_draws):
                    head.resample(draw)
                    left, right = (head.embed_image(Features(view[:, 0], view)) for view in (first, second))
                    errors.append((left * right).sum(dim=1) - exact)
            error = float(torch.stack(errors).square().mean()) ** 0.5
            yield {"kernel": name, "D": count, "error": error, "expected": (variance / count) ** 0.5}


def _slope(rows: list[Row], x: str) -> float:
    """Slope of the least-squares line through the logarithms of the errors."""
    across, up = (torch.tensor([float(row[key]) for row in rows], dtype=torch.float64).log() for key in (x, "error"))
    across = across - across.mean()
    return float((across * up).sum() / across.square().sum())
