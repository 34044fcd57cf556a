"""Base class of heads that pool an image's tokens anew for every caption, FLAIR and LLIP."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from clipzoo.heads.base import FLOAT, Cost, Head, Shape, projections, transposed
from clipzoo.heads.pairs import Pairing, Scope, text_anchors
from clipzoo.heads.scores import DenseScores
from clipzoo.types import Features, PointSet, Scores, Similarity

ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Numbers of attention weights, or entries of pooled vectors, in memory at a time."""


class ConditionalHead(Head[PointSet]):
    """Base class of heads with score cosine(pooled tokens of the image given the caption, caption).

    An image is a set of points, a caption a single point. Pooled vectors [n, k, d] and attention weights [n, k, M] are
    in memory for blocks of pairs only, and are recomputed for the gradient.

    image_width, text_width: widths of the tokens. embed_width: d. heads: number of attention heads.
    """

    needs_tokens = True
    compares_within = False
    score_range = (-1.0, 1.0)
    heads: int
    vectors_of_text: ClassVar[int] = 1
    """Vectors [d] that ranks exchange for a caption."""

    @abstractmethod
    def keys_and_values(self, image: PointSet) -> tuple[Tensor, Tensor, Tensor]:
        """n images -> keys and values [n, M, d], and what is added to all exponents of a key [n, M]: 0, or -inf."""

    @abstractmethod
    def queries_and_targets(self, text: PointSet) -> tuple[Tensor, Tensor]:
        """k captions -> queries [k, d], scaled, and the vectors [k, e] with which pooled tokens are compared."""

    @abstractmethod
    def summary(self, image: PointSet) -> Tensor:
        """n images -> vectors [n, e] that depend on no caption, for a linear probe and for candidates of a search."""

    @abstractmethod
    def output(self, pooled: Tensor) -> Tensor:
        """[..., d], concatenated heads of the attention -> [..., e]."""

    def score(self, image: PointSet, text: PointSet) -> Tensor:
        if torch.compiler.is_exporting():
            return self.block(*self.keys_and_values(image), *self.queries_and_targets(text))
        return self.chosen(image, text)

    def chosen(self, image: PointSet, text: PointSet, columns: Tensor | None = None) -> Tensor:
        """Scores of image i with the captions columns[i], [n, S], in blocks of pairs; None: with all captions."""
        keys, (queries, targets) = self.keys_and_values(image), self.queries_and_targets(text)
        images, tokens, width = keys[0].shape
        captions = len(queries) if columns is None else columns.shape[1]
        pair = max(self.heads * tokens, width)
        elements = ELEMENTS["cuda" if queries.is_cuda else "cpu"]
        size = max(1, min(captions, math.isqrt(elements // pair)))
        step = max(1, elements // (pair * size))
        scores = []
        for start in range(0, images, step):
            rows, of_row = slice(start, start + step), []
            for first in range(0, captions, size):
                block: slice | Tensor = slice(first, first + size)
                if columns is not None:
                    block = columns[rows, block]
                sides = *(x[rows] for x in keys), queries[block], targets[block]
                of_row.append(checkpoint(self.block, *sides, use_reentrant=False, preserve_rng_state=False))
            scores.append(torch.cat(of_row, dim=1))
        return torch.cat(scores)

    def block(self, keys: Tensor, values: Tensor, shift: Tensor, queries: Tensor, targets: Tensor) -> Tensor:
        """[r, M, d] twice, [r, M], [c, d] or [r, c, d], [c, e] or [r, c, e] -> [r, c]."""
        keys, values, queries = (
            x.expand(keys.shape[0], -1, -1).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for x in (keys, values, queries)
        )
        pooled = functional.scaled_dot_product_attention(queries, keys, values, shift[:, None, None], scale=1.0)
        vectors = functional.normalize(self.output(pooled.transpose(1, 2).flatten(2)), dim=-1)
        return (vectors * functional.normalize(targets, dim=-1)).sum(dim=2)

    def similarity(self, image: PointSet, text: PointSet, scope: Scope = Scope()) -> Similarity:
        """Scores that are computed when an objective asks for them."""
        world, pairing, all_texts = scope.world, scope.pairing, scope.gather(text)
        chosen = partial(self.chosen, image, all_texts)
        to_text = LazyScores(chosen, len(all_texts), world.rank * len(image), pairing, chosen)
        rows, other = (len(text), None) if pairing is None else (len(pairing.transpose_rows), pairing.transposed)
        to_image = LazyScores(
            lambda: world.transpose(to_text.dense())[text_anchors(pairing, world)],
            len(image) * world.size,
            world.rank * rows,
            other,
        )
        return Similarity(to_text, to_image, further=self.further(image, all_texts, scope))

    def further(self, image: PointSet, all_texts: PointSet, scope: Scope) -> tuple[Scores, ...]:
        """Return the further scores of the images with all ranks' captions that training compares."""
        return ()

    def ensemble(self, prompts: PointSet) -> PointSet:
        """[p, 1, d] -> [1, 1, d], the mean direction with the mean norm."""
        norms = prompts.points.norm(dim=2, keepdim=True)
        units = functional.normalize(prompts.points, dim=2)
        return PointSet((units.mean(dim=0) * norms.mean(dim=0))[None], prompts.log_weights[:1])

    def probe(self, features: Features, where: str) -> Tensor:
        return features.pooled if where == "before" else self.summary(self.embed_image(features))

    def search_factors(self, image: PointSet, text: PointSet, basis: None = None) -> tuple[Tensor, Tensor]:
        """Unit vectors of the images without a caption, and of the captions."""
        _, targets = self.queries_and_targets(text)
        return functional.normalize(self.summary(image), dim=1), functional.normalize(targets, dim=1)

    def vectors(self, image: PointSet, text: PointSet) -> tuple[Tensor, Tensor]:
        return self.search_factors(image, text)

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        """Attention and its output projection for every pair, four times: forward, recomputed, two gradients.

        An objective that asks for some pairs only, such as FLAIR's, costs less.
        """
        pairs, points = shape.local * shape.batch, shape.local * shape.image_points * shape.width
        flops = projections(shape, shape.image_points) + 12 * points * shape.width
        flops += 4 * pairs * (4 * shape.image_points * shape.width + 2 * shape.width**2)
        scores = (3 * pairs + ELEMENTS["cuda"]) * FLOAT
        return Cost(flops, cls.vectors_of_text * shape.width + 1, transposed(shape), scores, 6 * points * FLOAT)


class LazyScores(DenseScores):
    """Scores of a matrix [r, c] that is computed when it is first read, or only at some columns of each row."""

    def __init__(
        self,
        matrix: Callable[[], Tensor],
        columns: int,
        first_positive: int,
        pairing: Pairing | None,
        chosen: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._compute, self._chosen = matrix, chosen
        self.columns, self.first_positive, self.pairing = columns, first_positive, pairing

    @cached_property
    def _matrix(self) -> Tensor:  # type: ignore[override]
        return self._compute()

    def at(self, columns: Tensor) -> Tensor:
        return super().at(columns) if self._chosen is None else self._chosen(columns)
