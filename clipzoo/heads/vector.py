"""Heads that compare one vector per sample: CLIP, cosines, and inner products and distances."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from clipzoo.errors import ConfigError
from clipzoo.heads.base import ICML, Head, Paper, ScaledHead
from clipzoo.heads.pairs import Scope
from clipzoo.heads.scores import tiled_anchors, tiled_scores
from clipzoo.types import Count, Features, Positive, Scale, Scores, Similarity, Widths, checked


class VectorHead(Head[Tensor]):
    """Base class of heads with one vector per sample, [b, d]; scores are inner products of the two `factors`."""

    is_inner_product = True

    @abstractmethod
    def factors(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """[n, d] and [k, d] -> left [n, f] and right [k, f], such that left @ right.mT is the score, scale included.

        A row of a factor depends only on the same row of its argument, so that rows may be split and gathered.
        """

    def search_factors(self, image: Tensor, text: Tensor, basis: None = None) -> tuple[Tensor, Tensor]:
        return self.factors(image, text)

    def score(self, image: Tensor, text: Tensor) -> Tensor:
        left, right = self.factors(image, text)
        return left @ right.mT

    def ensemble(self, prompts: Tensor) -> Tensor:
        """[p, d] -> [1, d], the mean."""
        return prompts.mean(dim=0, keepdim=True)

    def probe(self, features: Features, where: str) -> Tensor:
        return features.pooled if where == "before" else self.embed_image(features)

    def similarity(self, image: Tensor, text: Tensor, scope: Scope = Scope()) -> Similarity:
        if scope.tile is None:
            return super().similarity(image, text, scope)
        left, right = self.factors(image, scope.gather(text))
        directions = tiled_scores(left, right, scope.tile, scope.world, scope.pairing)
        if scope.pairing is not None:
            return Similarity(*directions)
        within_image, within_text = (partial(self.anchored, vectors, vectors, scope) for vectors in (image, text))
        return Similarity(*directions, within_image, within_text)

    def anchored(self, anchors: Tensor, contrasts: Tensor, scope: Scope, texts: bool = False) -> Scores:
        if scope.tile is None:
            return super().anchored(anchors, contrasts, scope, texts)
        everything = scope.gather(contrasts)
        left, right = self.factors(everything, anchors)[::-1] if texts else self.factors(anchors, everything)
        return tiled_anchors(left, right, scope.tile, scope.world, scope.pairing)


class ProjectedHead(VectorHead):
    """Base class of heads with linear projections of the pooled features; `bias` adds a vector to each, or to images'.

    image_width, text_width: widths of the pooled features. embed_width: d; null: no projections.
    matryoshka: widths of prefixes of the embeddings that the objective trains as well, with weight 1.
    """

    def __init__(
        self,
        image_width: int,
        text_width: int,
        embed_width: int | None,
        bias: bool | Literal["image"] = False,
        matryoshka: Sequence[int] = (),
    ) -> None:
        super().__init__()
        if embed_width is not None and max(matryoshka, default=0) > embed_width:
            raise ConfigError(f"head.matryoshka={list(matryoshka)}: at most head.embed_width={embed_width}")
        self.matryoshka = [width for width in matryoshka if width != embed_width]
        self.image_projection = None if embed_width is None else projection(image_width, embed_width)
        self.text_projection = None if embed_width is None else projection(text_width, embed_width)
        self.image_bias = nn.Parameter(torch.zeros(embed_width)) if bias and embed_width else None
        self.text_bias = nn.Parameter(torch.zeros(embed_width)) if bias is True and embed_width else None

    def embed_image(self, features: Features) -> Tensor:
        return self.project(features.pooled, self.image_projection, self.image_bias)

    def embed_text(self, features: Features) -> Tensor:
        return self.project(features.pooled, self.text_projection, self.text_bias)

    def prefix(self, embedding: Tensor, width: int) -> Tensor:
        return embedding[:, :width]

    def project(self, pooled: Tensor, matrix: Tensor | None, bias: Tensor | None) -> Tensor:
        """[b, w] -> [b, d]."""
        if matrix is None:
            return pooled
        return pooled @ matrix if bias is None else torch.addmm(bias, pooled, matrix)


class UnitVectorHead(ProjectedHead):
    """Base class of heads with normalised linear projections of the pooled features; prefixes are normalised too."""

    image_projection: nn.Parameter
    text_projection: nn.Parameter

    def project(self, pooled: Tensor, matrix: Tensor | None, bias: Tensor | None) -> Tensor:
        """[b, w] -> [b, d], unit vectors."""
        return functional.normalize(super().project(pooled, matrix, bias), dim=-1)

    def prefix(self, embedding: Tensor, width: int) -> Tensor:
        return functional.normalize(super().prefix(embedding, width), dim=-1)

    def ensemble(self, prompts: Tensor) -> Tensor:
        """[p, d] unit vectors -> [1, d], their normalised mean."""
        return functional.normalize(super().ensemble(prompts), dim=-1)


def projection(width: int, embed_width: int) -> nn.Parameter:
    """Return a parameter [w, d], normal with standard deviation w^-1/2 (CLIP's initialisation)."""
    return nn.Parameter(torch.randn(width, embed_width) * width**-0.5)


# CLIP: unit vectors and a learnable inverse temperature (Radford et al. 2021).


@checked
class ClipHead(UnitVectorHead, ScaledHead[Tensor]):
    """logits = exp(log_scale) * unit(x P) . unit(y Q).

    learnable_temperature: False fixes tau (a fixed temperature of 1 gives plain cosines).
    bias: add a vector to each projection, as in SigLIP's models; "image": only to that of images, as in CLIP's ResNets.
    image_projection: False keeps the identity in place of P, without a bias, as in SigLIP's models.
    """

    citations = (
        Paper(
            "clip",
            "Learning Transferable Visual Models From Natural Language Supervision",
            "Radford, Alec and others",
            ICML,
            2021,
        ),
    )
    published_with = (
        *("infonce", "infoloob", "siglip", "dcl", "cyclip", "nuclr", "sogclr", "isogclr"),
        *("fastclip", "drrho", "glofnd"),
        *("conditional", "joint", "mmd_conditional", "mmd_joint"),
    )

    relations = {
        "not learnable_temperature or (at_most(1, 1 / temperature) and at_most(1 / temperature, max_scale))": (
            "every step clamps the scale 1 / temperature to [1, max_scale]: change one, or set "
            "learnable_temperature=false"
        ),
        "image_projection or image_width == embed_width": (
            "without an image projection the embeddings have the width of the image tower"
        ),
    }

    def __init__(
        self,
        image_width: Count,
        text_width: Count,
        embed_width: Count,
        temperature: Scale,
        max_scale: Positive,
        learnable_temperature: bool,
        bias: bool | Literal["image"] = False,
        image_projection: bool = True,
        matryoshka: Widths = (),
    ) -> None:
        super().__init__(image_width, text_width, embed_width, bias, matryoshka)
        if not image_projection:
            self.image_projection = nn.Parameter(torch.eye(image_width), requires_grad=False)
            if self.image_bias is not None:
                self.image_bias.requires_grad_(False)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)), requires_grad=learnable_temperature)
        self.learnable_temperature = learnable_temperature
        largest = max_scale if learnable_temperature else 1 / temperature
        self.score_range = -largest, largest

    def factors(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_scale.exp() * image, text

    def similarity(self, image: Tensor, text: Tensor, scope: Scope = Scope()) -> Similarity:
        return replace(super().similarity(image, text, scope), log_cosine_scale=self.log_scale.detach())

    def log_cosine_scale(self) -> Tensor:
        return self.log_scale

    def clamp_(self) -> None:
        if self.learnable_temperature:
            super().clamp_()


# Inner product and distance heads ("A mathematical perspective on contrastive learning", Baptista et al., 3.3).


PERSPECTIVE = Paper(
    "perspective",
    "A Mathematical Perspective On Contrastive Learning",
    "Baptista, Ricardo and Stuart, Andrew and Tran, Son",
    year=2025,
)


@checked
class InnerProductHead(ProjectedHead):
    """logits = <g_u, g_v> / temperature (eq. 25); g are the projected features, or the features.

    temperature: fixed.
    """

    citations = (PERSPECTIVE,)
    published_with = ("conditional", "joint", "mmd_conditional", "mmd_joint", "infonce")
    score_range = (-math.inf, math.inf)

    relations = {
        "embed_width is not None or image_width == text_width": (
            "without projections (embed_width null) the encoder's widths must be equal: set embed_width to a number"
        )
    }

    def __init__(
        self,
        image_width: Count,
        text_width: Count,
        embed_width: Count | None,
        temperature: Scale,
        matryoshka: Widths = (),
    ) -> None:
        super().__init__(image_width, text_width, embed_width, matryoshka=matryoshka)
        self._temperature = temperature

    def factors(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return image / self._temperature, text


class DistanceHead(InnerProductHead):
    """logits = -|g_u - g_v|^2 / (2 temperature) (eq. 26); arguments as for the inner product."""

    score_range = (-math.inf, 0.0)

    def score(self, image: Tensor, text: Tensor) -> Tensor:
        return squared_distances(image, text, -1 / (2 * self._temperature))

    def similarity(self, image: Tensor, text: Tensor, scope: Scope = Scope()) -> Similarity:
        # A vector common to all embeddings changes no distance, but costs precision in the tiles' products.
        center = scope.world.mean(text.detach().mean(dim=0))
        return super().similarity(image - center, text - center, scope)

    def factors(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """-|u - v|^2 / 2 = u.v - |u|^2 / 2 - |v|^2 / 2 is a product of vectors with four more entries.

        Two of them sum to -|u|^2 / (2 temperature), the other two to that of v. The first is exact in bf16, the second
        is the remainder: a GPU may multiply fp32 matrices in tf32 or bf16, and rounding a norm of some hundreds would
        change all logits of a row by 0.1 to 1.
        """
        norms = []
        for vectors in (image, text):
            whole = -vectors.square().sum(dim=1, keepdim=True) / (2 * self._temperature)
            coarse = whole.detach().to(torch.bfloat16).to(whole.dtype)
            norms.append(torch.cat([coarse, whole - coarse], dim=1))
        of_image, of_text = norms
        left = torch.cat([image / self._temperature, of_image, torch.ones_like(of_image)], dim=1)
        return left, torch.cat([text, torch.ones_like(of_text), of_text], dim=1)


# |u - v|^2 = |u|^2 + |v|^2 - 2 u.v is a matrix product, but in float32 it loses the digits of distances that are small
# compared with the norms: at |u| = 100 it is wrong by 5e-3. Here the product is in float64. The gradient, a difference
# of products in float32, is taken after subtracting a common vector.


BLOCK_ELEMENTS = 1 << 19
"""Number of distances in float64 at a time, 4 MiB."""


def squared_distances(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """[n, d], [k, d] -> scale |left_i - right_j|^2 [n, k], in the precision of the vectors."""
    if torch.compiler.is_exporting():
        rows, columns = _factors(left, right, scale)
        return (rows @ columns).to(left.dtype)
    return _SquaredDistances.apply(left, right, scale)


class _SquaredDistances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.scale = scale
        rows, columns = _factors(left, right, scale)
        result = left.new_empty(len(left), len(right))
        size = max(1, BLOCK_ELEMENTS // max(1, len(right)))
        for block, row_block in zip(result.split(size), rows.split(size), strict=True):
            block.copy_(row_block @ columns)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right = ctx.saved_tensors
        center = right.mean(dim=0)
        left, right = left - center, right - center
        of_left = gradient.sum(dim=1, keepdim=True) * left - gradient @ right
        of_right = gradient.sum(dim=0)[:, None] * right - gradient.mT @ left
        return 2 * ctx.scale * of_left, 2 * ctx.scale * of_right, None


def _factors(left: Tensor, right: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[n, d], [k, d] -> [n, d + 2], [d + 2, k] in float64, whose product is the scaled squared distances."""
    rows, columns = left.double(), right.double()
    row_norms, column_norms = (vectors.square().sum(dim=1, keepdim=True) for vectors in (rows, columns))
    # The norms are two more entries of the product.
    rows = scale * torch.cat([-2 * rows, row_norms, torch.ones_like(row_norms)], dim=1)
    return rows, torch.cat([columns, torch.ones_like(column_norms), column_norms], dim=1).mT
