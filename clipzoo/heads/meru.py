"""MERU: distances in hyperbolic space (Desai et al. 2023), and HyCoCLIP, which adds boxes (Pal et al. 2025).

A point of the hyperboloid of curvature -c is given by its space components x [d]; its time component is
t(x) = sqrt(1/c + |x|^2), and <x, y> = x.y - t(x) t(y).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from clipzoo.heads.base import FLOAT, ICLR, ICML, Cost, Paper, ScaledHead, Shape, projections, transposed
from clipzoo.heads.pairs import split_views
from clipzoo.heads.vector import projection, squared_distances
from clipzoo.types import Count, Features, Positive, Scale, Similarity, Term, Weight, checked

SMALLEST = 1e-8
"""Floor of norms, and of -c <x, y> - 1 at c = 1, as in the released code."""
LARGEST_RADIUS = math.asinh(2**15)
"""Largest distance to the origin, times sqrt c."""
CONE_RADIUS = 0.1
"""Points closer to the origin than about this have no cone (K of Ganea et al. 2018)."""


@checked
class MeruHead(ScaledHead[Tensor]):
    """logits = -exp(log_scale) * acosh(-c <x, y>) / sqrt c, x = lift(alpha_x f P), y = lift(alpha_y g Q).

    A distance is an increasing function of an inner product of width d + 1, so that search is one for inner products.
    Training computes a matrix of distances [b, N], not tiles.

    image_width, text_width: widths of the pooled features. embed_width: d.
    temperature: initial 1 / scale. max_scale: upper bound of the scale after every step.
    curvature: initial c; a learned c stays within a factor of ten of it. learnable_curvature: False fixes c.
    entailment: weight of the terms of entailment, see `terms`.
    between_aperture, within_aperture: factors of the cones of captions for images, and within a modality.
    """

    is_inner_product = True
    citations = (
        Paper(
            "meru",
            "Hyperbolic Image-Text Representations",
            "Desai, Karan and Nickel, Maximilian and Rajpurohit, Tanmay and Johnson, Justin and Vedantam, Ramakrishna",
            ICML,
            2023,
        ),
        Paper(
            "hycoclip",
            "Compositional Entailment Learning for Hyperbolic Vision-Language Models",
            "Pal, Avik and others",
            ICLR,
            2025,
        ),
    )
    published_with = ("infonce",)
    relations = {
        "at_most(1 / temperature, max_scale)": "every step clamps the scale 1 / temperature to max_scale: change one",
    }

    def __init__(
        self,
        image_width: Count,
        text_width: Count,
        embed_width: Count,
        temperature: Scale,
        max_scale: Positive,
        curvature: Positive,
        learnable_curvature: bool,
        entailment: Weight,
        between_aperture: Positive,
        within_aperture: Positive,
    ) -> None:
        super().__init__()
        self.image_projection = projection(image_width, embed_width)
        self.text_projection = projection(text_width, embed_width)
        # A projection has entries of about 1 at the start; alpha = d^-1/2 makes its norm 1.
        alpha = torch.tensor(-0.5 * math.log(embed_width))
        self.image_log_alpha, self.text_log_alpha = nn.Parameter(alpha), nn.Parameter(alpha.clone())
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)))
        self.log_curvature = nn.Parameter(torch.tensor(math.log(curvature)), requires_grad=learnable_curvature)
        self._max_scale, self._curvatures = max_scale, (curvature / 10, curvature * 10)
        self._entailment, self._between, self._within = entailment, between_aperture, within_aperture
        self.score_range = -max_scale * 2 * LARGEST_RADIUS / math.sqrt(self._curvatures[0]), 0.0

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        """One product at width d + 2 and its gradients; distances are always a matrix, of five intermediate values."""
        matrix = shape.local * shape.batch
        points = 2 * shape.batch * shape.width * FLOAT
        flops = projections(shape) + 6 * matrix * (shape.width + 2)
        return Cost(flops, shape.width, transposed(shape), 5 * matrix * FLOAT, points)

    @property
    def curvature(self) -> Tensor:
        return self.log_curvature.exp()

    def embed_image(self, features: Features) -> Tensor:
        return lift(self.image_log_alpha.exp() * (features.pooled @ self.image_projection), self.curvature)

    def embed_text(self, features: Features) -> Tensor:
        return lift(self.text_log_alpha.exp() * (features.pooled @ self.text_projection), self.curvature)

    def score(self, image: Tensor, text: Tensor) -> Tensor:
        curvature = self.curvature
        heights = height(image, curvature) - height(text, curvature).mT
        # acosh(1 + e) = 2 asinh sqrt(e / 2)
        halves = excess(squared_distances(image, text), heights, curvature) / 2
        return -self.log_scale.exp() * 2 * halves.sqrt().asinh() / curvature.sqrt()

    def terms(self, similarity: Similarity) -> Mapping[str, Term]:
        """Mean angles by which images are outside of the cones of their captions.

        With crops and boxes (HyCoCLIP) images are also in the cones of their crops, captions in those of their boxes,
        and crops in those of their boxes, by place. The sum of several terms is halved, as in the released code.
        """
        if not self._entailment:
            return {}
        views = similarity.views
        image, crops, texts, boxes = split_views(similarity.image, similarity.text, views)
        captions = texts[:, : views.captions]
        pairs = {"image_in_caption": (captions, image, self._between)}
        if crops.numel():
            pairs["image_in_crop"] = crops, image, self._within
        if boxes.numel():
            pairs["caption_in_box"] = boxes[:, None], captions[:, :, None], self._within
        if both := min(crops.shape[1], boxes.shape[1]):
            pairs["crop_in_box"] = boxes[:, :both], crops[:, :both], self._between
        terms = {}
        for name, (apex, points, factor) in pairs.items():
            apertures = factor * half_aperture(apex, self.curvature)
            angles = exterior_angle(apex, points, self.curvature) - apertures
            terms[name] = Term(self._entailment / min(2, len(pairs)), angles.clamp(min=0).mean())
        return terms

    def ensemble(self, prompts: Tensor) -> Tensor:
        """[p, d] -> [1, d], the mean in the tangent space of the origin."""
        return lift(tangent(prompts, self.curvature).mean(dim=0, keepdim=True), self.curvature)

    def probe(self, features: Features, where: str) -> Tensor:
        """After the projection: the vector in the tangent space of the origin, which linear classifiers separate."""
        return features.pooled if where == "before" else tangent(self.embed_image(features), self.curvature)

    def search_factors(self, image: Tensor, text: Tensor, basis: None = None) -> tuple[Tensor, Tensor]:
        """Return [x, t(x)] and [y, -t(y)], whose product is <x, y>."""
        times = [(1 / self.curvature + points.square().sum(dim=1, keepdim=True)).sqrt() for points in (image, text)]
        return torch.cat([image, times[0]], dim=1), torch.cat([text, -times[1]], dim=1)

    @torch.no_grad()
    def clamp_(self) -> None:
        self.log_scale.clamp_(max=math.log(self._max_scale))
        self.image_log_alpha.clamp_(max=0.0)
        self.text_log_alpha.clamp_(max=0.0)
        self.log_curvature.clamp_(*map(math.log, self._curvatures))

    def logs(self) -> Mapping[str, Tensor]:
        return {
            **super().logs(),
            "curvature": self.curvature.detach(),
            "image_alpha": self.image_log_alpha.detach().exp(),
            "text_alpha": self.text_log_alpha.detach().exp(),
        }


# Geometry of the hyperboloid. All arguments `curvature` are c > 0, [].


def lift(vectors: Tensor, curvature: Tensor) -> Tensor:
    """Exponential map at the origin: tangent vectors [b, d] -> points [b, d]."""
    radii = curvature.sqrt() * vectors.norm(dim=-1, keepdim=True)
    return radii.clamp(SMALLEST, LARGEST_RADIUS).sinh() / radii.clamp(min=SMALLEST) * vectors


def tangent(points: Tensor, curvature: Tensor) -> Tensor:
    """Logarithmic map at the origin, the inverse of `lift`: [b, d] -> [b, d]."""
    radii = (curvature.sqrt() * points.norm(dim=-1, keepdim=True)).clamp(min=SMALLEST)
    return radii.asinh() / radii * points


def height(points: Tensor, curvature: Tensor) -> Tensor:
    """Points [..., d] -> t(x) - t(0), [..., 1], without the cancellation of the difference."""
    squares = points.square().sum(dim=-1, keepdim=True)
    return squares / ((1 / curvature + squares).sqrt() + curvature.rsqrt())


def excess(squares: Tensor, heights: Tensor, curvature: Tensor) -> Tensor:
    """|x - y|^2 and t(x) - t(y) of pairs -> -c <x, y> - 1, at least c * SMALLEST.

    The difference of <x, y> and -1/c itself would lose all digits of close points, in float32 also those of its floor.
    """
    return curvature * ((squares - heights.square()) / 2).clamp(min=SMALLEST)


def half_aperture(apex: Tensor, curvature: Tensor) -> Tensor:
    """Points [..., d] -> half of the angle of their cones of entailment, [...]."""
    sine = 2 * CONE_RADIUS / (apex.norm(dim=-1) * curvature.sqrt() + SMALLEST)
    return sine.clamp(max=_below_one(sine)).asin()


def exterior_angle(apex: Tensor, points: Tensor, curvature: Tensor) -> Tensor:
    """Apexes and points [..., d] -> angle at the apex, from the ray away from the origin to the point, [...]."""
    heights = (height(points, curvature) - height(apex, curvature)).squeeze(-1)
    difference = excess((points - apex).square().sum(dim=-1), heights, curvature)  # c <apex, point> = -1 - difference
    time = (1 / curvature + apex.square().sum(dim=-1)).sqrt()
    sine = (difference * (difference + 2)).clamp(min=SMALLEST).sqrt()
    cosine = (heights - difference * time) / (apex.norm(dim=-1) * sine + SMALLEST)
    return cosine.clamp(-_below_one(cosine), _below_one(cosine)).acos()


def _below_one(values: Tensor) -> float:
    """Return the bound of sines and cosines, whose inverse functions have infinite slopes at 1."""
    return 1 - max(SMALLEST, torch.finfo(values.dtype).eps)
