"""FILIP: for each token the largest cosine with the other modality's tokens (Yao et al. 2022)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.heads.base import FLOAT, ICLR, Cost, Paper, ScaledHead, ScoreParts, Shape, cost_of_points
from clipzoo.heads.points import leading_tokens, point_set
from clipzoo.heads.vector import projection
from clipzoo.ops.filip import filip_scores
from clipzoo.types import Count, Features, PointSet, Positive, Scale, checked


@checked
class FilipHead(ScaledHead[PointSet]):
    """logits = exp(log_scale) * mean over tokens of the largest cosine with a token of the other modality.

    The mean is over the tokens of the anchor: image_to_text and text_to_image are different matrices. Padding is left
    out of both. `score` is image_to_text, with which the paper classifies and ranks.

    image_width, text_width: widths of the tokens. embed_width: d.
    """

    needs_tokens = True
    compares_within = False
    published_with = ("infonce",)
    citations = (
        Paper(
            "filip", "FILIP: Fine-grained Interactive Language-Image Pre-Training", "Yao, Lewei and others", ICLR, 2022
        ),
    )
    relations = {
        "at_most(1, 1 / temperature) and at_most(1 / temperature, max_scale)": (
            "every step clamps the scale 1 / temperature to [1, max_scale]: change one"
        ),
    }

    def __init__(
        self, image_width: Count, text_width: Count, embed_width: Count, temperature: Scale, max_scale: Positive
    ) -> None:
        super().__init__()
        self.image_projection = projection(image_width, embed_width)
        self.text_projection = projection(text_width, embed_width)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)))
        self.score_range = -max_scale, max_scale

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        """Forward and two gradients; in memory are two matrices and the positions of the maxima, a byte each."""
        return cost_of_points(
            shape, 3, shape.local * shape.batch * (6 * FLOAT + shape.image_points + shape.text_points)
        )

    def embed_image(self, features: Features) -> PointSet:
        return _unit_points(features, self.image_projection)

    def embed_text(self, features: Features) -> PointSet:
        return _unit_points(features, self.text_projection)

    def both_scores(self, image: PointSet, text: PointSet) -> tuple[Tensor, Tensor]:
        masks = image.log_weights > -math.inf, text.log_weights > -math.inf
        to_text, to_image = filip_scores(image.points, masks[0], text.points, masks[1])
        return self.log_scale.exp() * to_text, self.log_scale.exp() * to_image

    def score(self, image: PointSet, text: PointSet) -> Tensor:
        """image_to_text; for an ensemble the mean over its prompts."""
        if torch.compiler.is_exporting():
            return self.both_scores(image, text)[0]
        counts = (-text.log_weights.amax(dim=1)).exp().round().long()  # prompts of each row
        # Point j of prompt p is in column j * count + p. A row without prompt p scores 0.
        prompts = torch.arange(text.points.shape[1], device=counts.device) % counts[:, None]
        scores = image.points.new_zeros(len(image), len(text))
        for prompt in range(max(counts.tolist(), default=0)):
            log_weights = text.log_weights.masked_fill(prompts != prompt, -math.inf)
            scores = scores + self.both_scores(image, PointSet(text.points, log_weights))[0]
        return scores / counts

    def ensemble(self, prompts: PointSet) -> PointSet:
        """[p, L, d] -> [1, L p, d]; its score is the mean score of the prompts, from which p is read."""
        points = prompts.points.transpose(0, 1).flatten(0, 1)
        log_weights = prompts.log_weights.mT.flatten() - math.log(len(prompts))
        return PointSet(points[None], log_weights[None])

    def score_parts(self, image: Features, text: Features) -> ScoreParts:
        """Terms of image_to_text: each image token with its nearest text token."""
        left, right = self.embed_image(image), self.embed_text(text)
        cosines = left.points @ right.points.mT + right.log_weights[:, None]  # [b, M, L]
        largest, position = cosines.max(dim=2, keepdim=True)
        image_weights, text_weights = (points.log_weights.softmax(dim=1) for points in (left, right))
        terms = self.log_scale.exp() * image_weights[:, :, None] * largest
        return ScoreParts(torch.zeros_like(cosines).scatter(2, position, terms), image_weights, text_weights)

    def probe(self, features: Features, where: str) -> Tensor:
        """The pooled features before the projection, the mean point after it."""
        return features.pooled if where == "before" else self.embed_image(features).mean

    def search_factors(self, image: PointSet, text: PointSet, basis: None = None) -> tuple[Tensor, Tensor]:
        """Mean points: candidates are found by the mean cosine of all pairs of tokens."""
        return image.mean, text.mean


def _unit_points(features: Features, matrix: Tensor) -> PointSet:
    tokens, mask = leading_tokens(features)
    return point_set(functional.normalize(tokens @ matrix, dim=-1), mask)
