"""KME-CLIP: the log of an inner product of positive kernel mean embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.heads.base import FLOAT, Cost, Head, Paper, ScoreParts, Shape, cost_of_points
from clipzoo.heads.points import TokenPoints, weighted_sum
from clipzoo.ops.kme import kme_score
from clipzoo.types import Count, Features, PointSet, Range, checked

LANDMARKS, SAMPLED, JITTER = 1024, 20_000, 1e-6
"""Numbers of landmarks of a search and of images they are drawn from; number added to the kernel's diagonal."""


@checked
class KmeHead(Head[PointSet]):
    """logit = log sum_ij w_i w'_j exp(-gamma |v_i - u_j|^2) (eq. 3), w = softplus(token . p), v unit vectors.

    image_width, text_width: widths of the tokens. embed_width: d.
    gamma: initial 1 / (2 sigma^2); with one point of weight 1 the logit is (cosine - 1) / temperature for
        gamma = 1 / (2 temperature) (proposition 2).
    image_points: number of leading image tokens that are points; null: all.
    text_points: "all" positions, including padding, or those of the "caption".
    merge: maximum number of points of an image; nearby points are merged (an approximation); null: all, exact.
    """

    needs_tokens = True
    learnable_temperature = True
    citations = (Paper("kme", "Theoretical Refinement of CLIP by Utilizing Linear Structure of Optimal Similarity"),)
    published_with = ("infonce",)
    score_range = (-math.inf, math.inf)

    def __init__(
        self,
        image_width: Count,
        text_width: Count,
        embed_width: Count,
        gamma: Annotated[float, Range(at_least=1e-3, at_most=1e6)],
        image_points: Count | None,
        text_points: Literal["all", "caption"],
        merge: Count | None = None,
    ) -> None:
        super().__init__()
        self.needs_padding = text_points == "all"
        self.image = TokenPoints(image_width, embed_width, image_points, padding=False)
        self.text = TokenPoints(text_width, embed_width, None, padding=self.needs_padding)
        # The inverse of softplus.
        self.raw_gamma = nn.Parameter(torch.tensor(gamma + math.log(-math.expm1(-gamma))))
        self.merge = merge
        self._spread: Tensor | None = None

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        """The forward pass, its recomputation and two gradients. A CPU recomputes one tile less.

        Ranks gather captions with their padding; only `text_points` of them are multiplied.
        """
        return cost_of_points(shape, 4, 3 * shape.local * shape.batch * FLOAT)

    @property
    def gamma(self) -> Tensor:
        """softplus of the parameter: always positive, and above 1 nearly the paper's parameter gamma."""
        return _softplus(self.raw_gamma)

    def embed_image(self, features: Features) -> PointSet:
        points = _point_set(self.image, features)
        if self.merge is not None:
            points = merged(points, self.merge)
            self._spread = spread(points.map(Tensor.detach))
        return points

    def embed_text(self, features: Features) -> PointSet:
        return _point_set(self.text, features)

    def score(self, image: PointSet, text: PointSet) -> Tensor:
        return kme_score(image.points, image.log_weights, text.points, text.log_weights, self.gamma)

    def score_parts(self, image: Features, text: Features) -> ScoreParts:
        """w_i w'_j exp(-gamma |v_i - u_j|^2); merged points share the term of their group by weight."""
        unmerged, left, right = _point_set(self.image, image), self.embed_image(image), self.embed_text(text)
        exponents = 2 * self.gamma * (left.points @ right.points.mT - 1)
        values = (exponents + left.log_weights[:, :, None] + right.log_weights[:, None]).exp()  # [b, M, L]
        if left.points.shape != unmerged.points.shape:
            owner = groups(unmerged, left.points.shape[1])
            shares = (unmerged.log_weights - left.log_weights.gather(1, owner)).exp().nan_to_num(0.0)
            values = values.gather(1, owner[:, :, None].expand(-1, -1, values.shape[2])) * shares[:, :, None]
        return ScoreParts(values, unmerged.log_weights.exp(), right.log_weights.exp(), is_logarithm=True)

    def search_basis(self, images: PointSet) -> tuple[Tensor, Tensor]:
        """Return LANDMARKS points z of the images [l, d], drawn by weight, and R^-1 [l, l], where k(z, z) = R^T R."""
        sampled = images[torch.linspace(0, len(images) - 1, min(len(images), SAMPLED)).long()]
        weights = sampled.log_weights.flatten().exp().cpu()
        count = min(LANDMARKS, int(weights.count_nonzero()))
        drawn = weights.multinomial(count, generator=torch.Generator().manual_seed(0))
        points = sampled.points.flatten(0, 1)[drawn.to(sampled.points.device)]
        kernel = self._kernel(points.double(), points.double())
        kernel.diagonal().add_(JITTER)
        root, identity = torch.linalg.cholesky(kernel, upper=True), torch.eye(count).to(kernel)
        return points, torch.linalg.solve_triangular(root, identity, upper=True).to(points.dtype)

    def search_factors(
        self, image: PointSet, text: PointSet, basis: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Kernel mean embeddings, projected to the span of the landmarks (Nystroem): products approximate exp(score).

        basis: None takes the points of `image` as landmarks, so that the products are exact.
        """
        points, inverse = self.search_basis(image) if basis is None else basis

        def embedded(sets: PointSet) -> Tensor:
            kernel = self._kernel(sets.points, points)  # [b, M, l]
            return weighted_sum(sets.log_weights.exp(), kernel) @ inverse

        return embedded(image), embedded(text)

    def _kernel(self, left: Tensor, right: Tensor) -> Tensor:
        """[..., d] and [l, d] -> [..., l]."""
        squares = left.square().sum(-1, keepdim=True) + right.square().sum(-1)
        return torch.exp(self.gamma * (2 * left @ right.mT - squares))

    def ensemble(self, prompts: PointSet) -> PointSet:
        """[p, M, d] -> [1, p M, d], the mean of the mean embeddings; scores become the log-mean-exp of p scores."""
        log_weights = prompts.log_weights - math.log(len(prompts))
        return PointSet(prompts.points.flatten(0, 1)[None], log_weights.flatten()[None])

    def probe(self, features: Features, where: str) -> Tensor:
        """The weighted sum of the tokens before the projection, or of the points after it.

        The paper probes before the projection only, because the embedding has infinitely many dimensions.
        """
        tokens, raw_weights, present = self.image.select(features)
        weights = _softplus(raw_weights).masked_fill(~present, 0.0)
        return weighted_sum(weights, tokens if where == "before" else self.image.points(tokens))

    def logs(self) -> Mapping[str, Tensor]:
        gamma = self.gamma.detach()
        # A bound of the error to second order: half the variance of 2 gamma v.u in a group.
        error = {} if self._spread is None else {"merge_error": 2 * gamma.square() * self._spread}
        return {"gamma": gamma, **error}


def _point_set(side: TokenPoints, features: Features) -> PointSet:
    tokens, raw_weights, present = side.select(features)
    return PointSet(side.points(tokens), log_softplus(raw_weights).masked_fill(~present, -math.inf))


_softplus = partial(functional.softplus, threshold=40)
"""softplus, exact: torch returns its argument above a threshold, 20 by default, where the error is 2e-9."""


def log_softplus(raw: Tensor) -> Tensor:
    """log log(1 + e^a), elementwise, exact for any a; a direct evaluation is -inf below a = -104 in float32."""
    low = -20.0
    # For low a, log(1 + t) = t - t^2 / 2 with t = e^a. Clamping keeps both branches finite everywhere.
    tail = raw - raw.clamp(max=0.0).exp() / 2
    return torch.where(raw <= low, tail, _softplus(raw.clamp(min=low)).log())


# Merge nearby points of a weighted set, an approximation that makes KME-CLIP's score cheaper.
#
# A group of points of weights w_i becomes one of weight sum w_i at their weighted mean. By Jensen's inequality the
# score is never higher than the exact one; it is lower by at most (gamma D)^2 / 2 for groups of diameter D (Hoeffding's
# lemma).


def merged(points: PointSet, count: int) -> PointSet:
    """[b, M, d] -> [b, min(M, count), d]: in rounds, the even points nearest to an odd one join it.

    Differentiable in points and weights; the choice of the groups has no gradient. A round merges at most half of the
    points (bipartite matching as in ToMe, Bolya et al. 2023).
    """
    return points if points.points.shape[1] <= count else _joined(points, groups(points, count), count)


def spread(points: PointSet) -> Tensor:
    """Weighted mean over all samples of 1 - |x|^2: of merged unit points, their mean squared distance from the mean."""
    weights = points.log_weights.softmax(dim=1)
    return (weights * (1 - points.points.square().sum(dim=2))).sum(dim=1).mean()


def groups(points: PointSet, count: int) -> Tensor:
    """Return the group of each point, [b, M], 0 to count - 1. There are more than `count` points, unit vectors."""
    points = remaining = points.map(Tensor.detach)
    owner = torch.arange(points.points.shape[1], device=points.points.device).expand_as(points.log_weights)
    while True:
        # `joining` even points merge with their nearest odd points. Absent points go first: they have no weight.
        units, absent = remaining.points, remaining.log_weights == -torch.inf
        size = max(count, units.shape[1] - units.shape[1] // 2)
        joining = units.shape[1] - size
        cosines = units[:, ::2] @ units[:, 1::2].mT
        best, partner = cosines.masked_fill(absent[:, 1::2].unsqueeze(1), -2.0).max(dim=2)
        order = best.masked_fill(absent[:, ::2], torch.inf).argsort(dim=1, descending=True)
        # Groups: the odd points, then the even points that stay.
        evens, odds = cosines.shape[1:]
        of_evens = torch.empty_like(order).scatter_(1, order[:, :joining], partner.gather(1, order[:, :joining]))
        staying = torch.arange(odds, odds + evens - joining, device=order.device)
        of_evens.scatter_(1, order[:, joining:], staying.expand_as(order[:, joining:]))
        group = torch.empty_like(absent, dtype=torch.int64)
        group[:, ::2], group[:, 1::2] = of_evens, torch.arange(odds, device=order.device)
        owner = group.gather(1, owner)
        if size == count:
            return owner
        means = _joined(points, owner, size)
        remaining = PointSet(functional.normalize(means.points, dim=-1), means.log_weights)


def _joined(points: PointSet, owner: Tensor, count: int) -> PointSet:
    """Points of the groups: weighted means and log total weights. owner: [b, M], the group of each point, none empty.

    Sums of weighted rows read each point once; a product with a matrix [count, M] per sample took twice as long.
    """
    samples, _, width = points.points.shape
    first = torch.arange(samples, device=owner.device)[:, None]
    group = (owner + count * first).flatten()
    ordered, members = group.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(samples * count, device=owner.device))
    logs = points.log_weights.flatten()
    # The bound is for groups without present points: -inf minus -inf would be NaN.
    largest = functional.embedding_bag(members, logs.detach()[:, None], starts, mode="max").squeeze(1)
    largest = largest.clamp(min=torch.finfo(logs.dtype).min)
    weights = (logs - largest[group]).exp()
    totals = functional.embedding_bag(members, weights[:, None], starts, mode="sum").squeeze(1)
    present = totals > 0
    totals = totals.where(present, 1.0)
    shares = (weights / totals[group])[members]
    vectors = points.points.reshape(-1, width)
    means = functional.embedding_bag(members, vectors, starts, mode="sum", per_sample_weights=shares)
    joint = (totals.log() + largest).masked_fill(~present, -torch.inf)
    return PointSet(means.view(samples, count, width), joint.view(samples, count))
