"""ProLIP: Gaussians with diagonal covariance, scored by their expected squared distance (Chun et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.heads.base import ICLR, Cost, Paper, ScaledHead, Shape, cost_of_vectors, projections
from clipzoo.heads.pairs import split_views
from clipzoo.heads.vector import UnitVectorHead, projection
from clipzoo.types import Count, Features, Positive, Range, Scale, Similarity, Term, Weight, checked

LOG_VARIANCES = -30.0, 10.0
"""Range of log variances: float32 holds their exponentials and the inverses of those."""


@checked
class ProLipHead(UnitVectorHead, ScaledHead[Tensor]):
    """logits = exp(log_scale) * (mu.mu' - sum_d (sigma_d^2 + sigma'_d^2) / 2), embeddings [mu, log sigma^2], [b, 2d].

    mu = unit(x P), log sigma^2 = x V + v. The released encoders have an [UNC] token for the variances; here they are a
    second projection of the pooled features, which every encoder has.

    initial_log_variance: v at the start.
    inclusion, part_inclusion, bottleneck: weights of the terms, see `terms`.
    inclusion_scale, inclusion_log_factor: see `inclusion`. released_terms: terms as in the authors' code.
    """

    citations = (
        Paper(
            "prolip",
            "Probabilistic Language-Image Pre-Training",
            "Chun, Sanghyuk and Kim, Wonjae and Park, Song and Yun, Sangdoo",
            ICLR,
            2025,
        ),
    )
    published_with = ("siglip",)
    relations = {
        "at_most(1, 1 / temperature) and at_most(1 / temperature, max_scale)": (
            "every step clamps the scale 1 / temperature to [1, max_scale]: change one"
        ),
    }

    def __init__(
        self,
        image_width: Count,
        text_width: Count,
        embed_width: Count,
        temperature: Scale,
        max_scale: Positive,
        initial_log_variance: Annotated[float, Range(at_least=-30, at_most=10)],
        inclusion: Weight,
        part_inclusion: Weight,
        bottleneck: Weight,
        inclusion_scale: Positive,
        inclusion_log_factor: Annotated[float, Range(at_least=-50, at_most=10)],
        released_terms: bool,
    ) -> None:
        super().__init__(image_width, text_width, embed_width)
        self.image_variance = nn.Linear(image_width, embed_width)
        self.text_variance = nn.Linear(text_width, embed_width)
        for layer in (self.image_variance, self.text_variance):
            layer.weight.data = projection(layer.in_features, embed_width).data.mT.contiguous()
            nn.init.constant_(layer.bias, initial_log_variance)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)))
        self._weights = inclusion, part_inclusion, bottleneck
        self._inclusion = inclusion_scale, inclusion_log_factor, released_terms
        self.score_range = -math.inf, max_scale

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        """Two projections; ranks gather means and log variances, of which a product has width d + 2."""
        product = cost_of_vectors(shape, shape.width + 2, 2 * projections(shape))
        return replace(product, gathered=2 * shape.width)

    def embed_image(self, features: Features) -> Tensor:
        log_variances = self.image_variance(features.pooled).clamp(*LOG_VARIANCES)
        return torch.cat([super().embed_image(features), log_variances], dim=1)

    def embed_text(self, features: Features) -> Tensor:
        log_variances = self.text_variance(features.pooled).clamp(*LOG_VARIANCES)
        return torch.cat([super().embed_text(features), log_variances], dim=1)

    def factors(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """[mu, -1/2 sum sigma^2, 1] and [mu', 1, -1/2 sum sigma'^2], [n, d + 2]."""
        (left, of_left), (right, of_right) = image.chunk(2, dim=1), text.chunk(2, dim=1)
        of_left, of_right = (-x.exp().sum(dim=1, keepdim=True) / 2 for x in (of_left, of_right))
        left = self.log_scale.exp() * torch.cat([left, of_left, torch.ones_like(of_left)], dim=1)
        return left, torch.cat([right, torch.ones_like(of_right), of_right], dim=1)

    def terms(self, similarity: Similarity) -> Mapping[str, Term]:
        """Inclusion of images in their captions, of both in their crops and boxes if there are any, and a bottleneck.

        The released code includes masked views; crops and boxes show less of an image or caption, too.
        """
        views = similarity.views
        image, crops, texts, boxes = split_views(similarity.image, similarity.text, views)
        captions = texts[:, : views.captions]
        whole, part, bottlenecks = self._weights
        released = self._inclusion[-1]
        divergence = bottleneck(image, released) + bottleneck(captions, released)
        terms = {"image_in_caption": Term(whole, inclusion(image, captions, *self._inclusion))}
        if crops.numel():
            terms["image_in_crop"] = Term(part, inclusion(image, crops, *self._inclusion))
        if boxes.numel():
            terms["caption_in_box"] = Term(part, inclusion(captions[:, :, None], boxes[:, None], *self._inclusion))
        terms["bottleneck"] = Term(bottlenecks, divergence)
        return {name: term for name, term in terms.items() if term.weight}

    def ensemble(self, prompts: Tensor) -> Tensor:
        """[p, 2d] -> [1, 2d], the normalised mean of the means, and the mean of the variances."""
        means, log_variances = prompts.chunk(2, dim=1)
        log_variance = log_variances.logsumexp(dim=0, keepdim=True) - math.log(len(prompts))
        return torch.cat([super().ensemble(means), log_variance], dim=1)

    def probe(self, features: Features, where: str) -> Tensor:
        """After the projection: the means."""
        return features.pooled if where == "before" else super().embed_image(features)

    def vectors(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """The means."""
        return image.chunk(2, dim=1)[0], text.chunk(2, dim=1)[0]


# Relations of Gaussians, given as [mu, log sigma^2], [..., 2d].


def inclusion(inner: Tensor, outer: Tensor, scale: float, log_factor: float, released: bool = False) -> Tensor:
    """Return mean -log sigmoid(scale * (H(inner, outer) - H(outer, inner))), []: small if `outer` includes `inner`.

    H(1, 2) = log int p1^2 p2 in each dimension, of inverse variances times exp(log_factor), without a constant.
    released: H takes the log variance for the log of the deviation, as the authors' code.
    """
    difference = log_overlap(inner, outer, log_factor, released) - log_overlap(outer, inner, log_factor, released)
    return -functional.logsigmoid(scale * difference).mean()


def log_overlap(first: Tensor, second: Tensor, log_factor: float, released: bool = False) -> Tensor:
    """Return H(first, second), [..., d]."""
    (mean, log_variance), (other_mean, other_log_variance) = first.chunk(2, dim=-1), second.chunk(2, dim=-1)
    # The integrand is exp(-a (x - mean)^2 - b (x - other_mean)^2), times a norm.
    a, b = (log_factor - log_variance).exp(), (log_factor - other_log_variance).exp() / 2
    norm = (log_variance + other_log_variance / 2) * (2 if released else 1)
    return -a * b / (a + b) * (mean - other_mean).square() - (a + b).log() / 2 - norm


def bottleneck(gaussians: Tensor, released: bool = False) -> Tensor:
    """Return the mean over elements of KL(N(mu, sigma^2) || N(0, 1)), []. released: with log sigma for log sigma^2."""
    means, log_variances = gaussians.chunk(2, dim=-1)
    log_variances = log_variances / 2 if released else log_variances
    return (log_variances.exp() + means.square() - 1 - log_variances).mean() / 2
