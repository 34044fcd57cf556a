"""LLIP: the caption mixes the image's learned tokens (Lavoie et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from clipzoo.heads.base import ICML, Paper
from clipzoo.heads.conditional import ConditionalHead
from clipzoo.heads.points import leading_tokens, point_set, weighted_sum
from clipzoo.heads.vector import projection
from clipzoo.types import Count, Features, PointSet, Positive, checked


@checked
class LlipHead(ConditionalHead):
    """score = cosine(W_o mixture of the image's tokens by the caption, W_t caption).

    In each head m of the attention the caption g and token k of the image have the weight softmax_k(g Q_m . h_k K_m /
    attention_temperature). No code was released.

    image_tokens: number of learned tokens, the first of the image tower: class token and registers
        (encoder.image.reg_tokens); null: all its tokens.
    """

    citations = (
        Paper(
            "llip",
            "Modeling Caption Diversity in Contrastive Vision-Language Pretraining",
            "Lavoie, Samuel and others",
            ICML,
            2024,
        ),
    )
    published_with = ("siglip",)
    vectors_of_text = 2
    relations = {"embed_width % heads == 0": "embed_width must be a multiple of heads"}

    def __init__(
        self,
        image_width: Count,
        text_width: Count,
        embed_width: Count,
        heads: Count,
        image_tokens: Count | None,
        attention_temperature: Positive,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query_projection, self.text_projection = (projection(text_width, embed_width) for _ in range(2))
        self.key_projection, self.value_projection = (projection(image_width, embed_width) for _ in range(2))
        self.output_projection = projection(embed_width, embed_width)
        self._image_tokens, self._attention_temperature = image_tokens, attention_temperature

    def embed_image(self, features: Features) -> PointSet:
        """Keys and values of the tokens, [b, K, 2 d]."""
        tokens, mask = leading_tokens(features, self._image_tokens, "head.image_tokens")
        points = torch.cat([tokens @ self.key_projection, tokens @ self.value_projection], dim=2)
        return point_set(points, mask)

    def embed_text(self, features: Features) -> PointSet:
        """The query and the projected caption, [b, 1, 2 d]."""
        text = features.pooled
        return point_set(torch.cat([text @ self.query_projection, text @ self.text_projection], dim=1)[:, None])

    def keys_and_values(self, image: PointSet) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = image.points.chunk(2, dim=2)
        return keys, values, image.log_weights

    def queries_and_targets(self, text: PointSet) -> tuple[Tensor, Tensor]:
        queries, targets = text.points[:, 0].chunk(2, dim=1)
        return queries / self._attention_temperature, targets

    def output(self, pooled: Tensor) -> Tensor:
        return pooled @ self.output_projection

    def summary(self, image: PointSet) -> Tensor:
        """The mixture with equal weights."""
        values = weighted_sum(image.log_weights.softmax(dim=1), image.points.chunk(2, dim=2)[1])
        return self.output(values)
