"""FLAIR: the caption pools the image's tokens by attention (Xiao et al. 2025)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.heads.base import Paper
from clipzoo.heads.conditional import ConditionalHead
from clipzoo.heads.pairs import Scope
from clipzoo.heads.points import leading_tokens, point_set
from clipzoo.heads.scores import DenseScores, tiled_anchors
from clipzoo.heads.vector import projection
from clipzoo.types import Count, Features, PointSet, Scores, checked


@checked
class FlairHead(ConditionalHead):
    """score = cosine(pool of the image's tokens by the caption, caption); training also compares the pooled image.

    The query is the projected caption, keys and values are the projected tokens and one zero vector, each side with
    its layer norm; without a residual connection (text-conditioned attention pooling).
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
        tokens, mask = leading_tokens(features)
        points = torch.cat([features.pooled[:, None], tokens], dim=1) @ self.image_projection
        return point_set(points, functional.pad(mask, (1, 0), value=True))

    def embed_text(self, features: Features) -> PointSet:
        return point_set((features.pooled @ self.text_projection)[:, None])

    def keys_and_values(self, image: PointSet) -> tuple[Tensor, Tensor, Tensor]:
        tokens = image.points[:, 1:]
        # With a zero key and value for captions of which the image shows nothing.
        keys, values = (
            functional.pad(self.attention_input(part, norm(tokens)), (0, 0, 0, 1))
            for part, norm in ((1, self.key_norm), (2, self.value_norm))
        )
        return keys, values, functional.pad(image.log_weights[:, 1:], (0, 1))

    def queries_and_targets(self, text: PointSet) -> tuple[Tensor, Tensor]:
        targets = text.points[:, 0]
        queries = self.attention_input(0, self.query_norm(targets))
        return queries * (queries.shape[1] // self.heads) ** -0.5, targets

    def attention_input(self, part: int, vectors: Tensor) -> Tensor:
        """[..., d] -> queries (part 0), keys (1) or values (2) of the attention, [..., d]."""
        weight, bias = (
            stacked.chunk(3)[part] for stacked in (self.attention.in_proj_weight, self.attention.in_proj_bias)
        )
        return functional.linear(vectors, weight, bias)

    def output(self, pooled: Tensor) -> Tensor:
        return functional.linear(pooled, self.attention.out_proj.weight, self.attention.out_proj.bias)

    def summary(self, image: PointSet) -> Tensor:
        return image.points[:, 0]

    def further(self, image: PointSet, all_texts: PointSet, scope: Scope) -> tuple[Scores, ...]:
        """Return the cosines of the pooled images with the captions."""
        images, texts = self.search_factors(image, all_texts)
        if scope.tile is None:
            return (DenseScores(images @ texts.mT, scope.world.rank * len(image), scope.pairing),)
        return (tiled_anchors(images, texts, scope.tile, scope.world, scope.pairing),)
