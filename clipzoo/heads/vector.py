"""Heads whose score is an inner product of two vectors."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.heads.base import Head
from clipzoo.heads.similarity.dense import DenseScores
from clipzoo.heads.similarity.tiled import tiled_anchors, tiled_scores
from clipzoo.types import Features, Scores, Similarity, World, gather_embedding


class VectorHead(Head[Tensor]):
    """Base class of heads with one vector per sample, [b, d]; scores are inner products of the two `factors`."""

    @abstractmethod
    def factors(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """[n, d] and [k, d] -> left [n, f] and right [k, f], such that left @ right.mT is the score, scale included.

        A row of a factor depends on the same row of its argument alone, so that rows may be split and gathered.
        """

    is_inner_product = True

    def search_factors(self, image: Tensor, text: Tensor, basis: None = None) -> tuple[Tensor, Tensor]:
        return self.factors(image, text)

    def score(self, image: Tensor, text: Tensor) -> Tensor:
        left, right = self.factors(image, text)
        return left @ right.mT

    def similarity(self, image: Tensor, text: Tensor, world: World = World(), tile: int | None = None) -> Similarity:
        if tile is None:
            return super().similarity(image, text, world)
        all_texts = gather_embedding(text, world, world.gather_dtype)
        return Similarity(
            *tiled_scores(*self.factors(image, all_texts), tile, world),
            within_image=lambda: self.anchored(image, image, world, tile),
            within_text=lambda: self.anchored(text, text, world, tile),
            world=world,
        )

    def anchored(self, anchors: Tensor, contrasts: Tensor, world: World, tile: int | None) -> Scores:
        """Local anchors [b, d] and local contrasts [b, d] -> scores of the anchors with the contrasts of all ranks."""
        all_contrasts = gather_embedding(contrasts, world, world.gather_dtype)
        if tile is not None:
            return tiled_anchors(*self.factors(anchors, all_contrasts), tile, world)
        return DenseScores(self.score(anchors, all_contrasts), world.rank * len(anchors))


class UnitVectorHead(VectorHead):
    """Base class of heads with normalised linear projections of the pooled features; `bias` adds a vector to each."""

    def __init__(self, image_width: int, text_width: int, embed_width: int, bias: bool = False) -> None:
        super().__init__()
        self.image_projection = projection(image_width, embed_width)
        self.text_projection = projection(text_width, embed_width)
        self.image_bias = nn.Parameter(torch.zeros(embed_width)) if bias else None
        self.text_bias = nn.Parameter(torch.zeros(embed_width)) if bias else None

    def embed_image(self, features: Features) -> Tensor:
        return functional.normalize(_projected(features.pooled, self.image_projection, self.image_bias), dim=-1)

    def embed_text(self, features: Features) -> Tensor:
        return functional.normalize(_projected(features.pooled, self.text_projection, self.text_bias), dim=-1)

    def ensemble(self, prompts: Tensor) -> Tensor:
        """[p, d] unit vectors -> [1, d], their normalised mean."""
        return functional.normalize(prompts.mean(dim=0, keepdim=True), dim=-1)

    def probe(self, features: Features, where: str) -> Tensor:
        return features.pooled if where == "before" else self.embed_image(features)


def _projected(pooled: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return pooled @ matrix if bias is None else torch.addmm(bias, pooled, matrix)


def projection(width: int, embed_width: int) -> nn.Parameter:
    """Return a parameter [w, d], normal with standard deviation w^-1/2 (CLIP's initialisation)."""
    return nn.Parameter(torch.randn(width, embed_width) * width**-0.5)
