"""Inner product and distance heads ("A mathematical perspective on contrastive learning", Baptista et al., 3.3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clipzoo.heads.vector import VectorHead, projection
from clipzoo.ops.squared_distances import squared_distances
from clipzoo.types import Count, Features, Scale, Similarity, World, checked


@checked
class InnerProductHead(VectorHead):
    """logits = <g_u, g_v> / temperature (eq. 25).

    image_width, text_width: widths of the pooled features.
    embed_width: output width of the linear maps G and H; null: no maps, the encoder is all of g.
    temperature: fixed.
    """

    published_with = ("conditional", "joint", "mmd_conditional", "mmd_joint", "infonce")
    score_range = (-math.inf, math.inf)

    relations = {
        "embed_width is not None or image_width == text_width": (
            "without projections (embed_width null) the encoder's widths must be equal: set embed_width to a number"
        )
    }

    def __init__(self, image_width: Count, text_width: Count, embed_width: Count | None, temperature: Scale) -> None:
        super().__init__()
        self.image_projection = None if embed_width is None else projection(image_width, embed_width)
        self.text_projection = None if embed_width is None else projection(text_width, embed_width)
        self._temperature = temperature

    def embed_image(self, features: Features) -> Tensor:
        return _projected(features.pooled, self.image_projection)

    def embed_text(self, features: Features) -> Tensor:
        return _projected(features.pooled, self.text_projection)

    def factors(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return image / self._temperature, text

    def ensemble(self, prompts: Tensor) -> Tensor:
        """[p, d] -> [1, d], the mean."""
        return prompts.mean(dim=0, keepdim=True)

    def probe(self, features: Features, where: str) -> Tensor:
        return features.pooled if where == "before" else self.embed_image(features)


class DistanceHead(InnerProductHead):
    """logits = -|g_u - g_v|^2 / (2 temperature) (eq. 26); arguments as for the inner product."""

    score_range = (-math.inf, 0.0)

    def score(self, image: Tensor, text: Tensor) -> Tensor:
        return squared_distances(image, text, -1 / (2 * self._temperature))

    def similarity(self, image: Tensor, text: Tensor, world: World = World(), tile: int | None = None) -> Similarity:
        # A vector common to all embeddings changes no distance, but costs digits of the tiles' products.
        center = world.mean(text.detach().mean(dim=0))
        return super().similarity(image - center, text - center, world, tile)

    def factors(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """-|u - v|^2 / 2 = u.v - |u|^2 / 2 - |v|^2 / 2 is a product of vectors with four more entries."""
        ones = [vectors.new_ones(len(vectors), 2) for vectors in (image, text)]
        left = torch.cat([image / self._temperature, self._norms(image), ones[0]], dim=1)
        return left, torch.cat([text, ones[1], self._norms(text)], dim=1)

    def _norms(self, vectors: Tensor) -> Tensor:
        """[b, d] -> [b, 2], two numbers whose sum is -|v|^2 / (2 temperature).

        The first is exact in bf16, the second is the remainder: a GPU may multiply fp32 matrices in tf32 or bf16, and
        rounding a norm of some hundreds would change all logits of a row by 0.1 to 1.
        """
        whole = -vectors.square().sum(dim=1, keepdim=True) / (2 * self._temperature)
        coarse = whole.detach().to(torch.bfloat16).to(whole.dtype)
        return torch.cat([coarse, whole - coarse], dim=1)


def _projected(pooled: Tensor, matrix: Tensor | None) -> Tensor:
    return pooled if matrix is None else pooled @ matrix
