"""FLAIR: the caption pools the image's tokens by attention (Xiao et al. 2025)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.heads.base import Paper
from clipzoo.heads.conditional import ConditionalHead
from clipzoo.heads.pairs import Pairing
from clipzoo.heads.points import leading_tokens
from clipzoo.heads.scores import DenseScores, tiled_anchors
from clipzoo.heads.vector import projection
from clipzoo.types import Count, Features, PointSet, Scores, Similarity, World, checked, gather_embedding


@checked
class FlairHead(ConditionalHead):
    """score = cosine(pool of the image's tokens by the caption, caption); training also compares the pooled image.

    The query is the projected caption, keys and values are the projected tokens and one zero vector, each side with
    its layer norm; without a residual connection (text-conditioned attention pooling).

    image_width, text_width: widths of the tokens. embed_width: d. heads: number of attention heads.
    """

    citations = (
        Paper(
            "flair",
            "FLAIR: VLM with Fine-grained Language-informed Image Representations",
            "Xiao, Rui and others",
            "Conference on Computer Vision and Pattern Recognition",
            2025,
        ),
    )
    published_with = ("flair",)
    relations = {"embed_width % heads == 0": "embed_width must be a multiple of heads"}

    def __init__(self, image_width: Count, text_width: Count, embed_width: Count, heads: Count) -> None:
        super().__init__()
        self.heads = heads
        self.image_projection = projection(image_width, embed_width)
        self.text_projection = projection(text_width, embed_width)
        self.query_norm, self.key_norm, self.value_norm = (nn.LayerNorm(embed_width) for _ in range(3))
        self.attention = nn.MultiheadAttention(embed_width, heads, add_zero_attn=True, batch_first=True)

    def embed_image(self, features: Features) -> PointSet:
        """The pooled features, then the tokens, [b, 1 + M, d]."""
        tokens, mask = leading_tokens(features, None, "")
        points = torch.cat([features.pooled[:, None], tokens], dim=1) @ self.image_projection
        mask = functional.pad(mask, (1, 0), value=True)
        return PointSet(points, torch.zeros_like(points[:, :, 0]).masked_fill(~mask, -math.inf))

    def embed_text(self, features: Features) -> PointSet:
        points = (features.pooled @ self.text_projection)[:, None]
        return PointSet(points, torch.zeros_like(points[:, :, 0]))

    def keys_and_values(self, image: PointSet) -> tuple[Tensor, Tensor, Tensor]:
        tokens = image.points[:, 1:]
        _, *weights = self.attention.in_proj_weight.chunk(3)
        _, *biases = self.attention.in_proj_bias.chunk(3)
        # With a zero key and value for captions of which the image shows nothing.
        keys, values = (
            functional.pad(functional.linear(norm(tokens), weight, bias), (0, 0, 0, 1))
            for norm, weight, bias in zip((self.key_norm, self.value_norm), weights, biases, strict=True)
        )
        return keys, values, functional.pad(image.log_weights[:, 1:], (0, 1))

    def queries_and_targets(self, text: PointSet) -> tuple[Tensor, Tensor]:
        targets = text.points[:, 0]
        weight, bias = self.attention.in_proj_weight.chunk(3)[0], self.attention.in_proj_bias.chunk(3)[0]
        queries = functional.linear(self.query_norm(targets), weight, bias)
        return queries * (queries.shape[1] // self.heads) ** -0.5, targets

    def output(self, pooled: Tensor) -> Tensor:
        return functional.linear(pooled, self.attention.out_proj.weight, self.attention.out_proj.bias)

    def summary(self, image: PointSet) -> Tensor:
        return image.points[:, 0]

    def similarity(
        self,
        image: PointSet,
        text: PointSet,
        world: World = World(),
        tile: int | None = None,
        pairing: Pairing | None = None,
    ) -> Similarity:
        """Conditional scores, and in `further` the cosines of the pooled images with the captions."""
        similarity = super().similarity(image, text, world, tile, pairing)
        images, texts = self.search_factors(image, gather_embedding(text, world, world.gather_dtype))
        if tile is None:
            of_pooled: Scores = DenseScores(images @ texts.mT, world.rank * len(image), pairing)
        else:
            of_pooled = tiled_anchors(images, texts, tile, world, pairing)
        return replace(similarity, further=(of_pooled,))
