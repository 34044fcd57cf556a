"""Interface of similarity heads."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

import torch
from torch import Tensor, nn

from clipzoo.errors import ConfigError
from clipzoo.heads.pairs import Scope, samples_pairing, split_views, text_anchors
from clipzoo.heads.scores import DenseScores, automatic_tile
from clipzoo.types import EmbeddingKind, Features, PointSet, Scores, Similarity, Term, Views, map_embedding


class Head(nn.Module, Generic[EmbeddingKind]):
    """Base class of heads: a head computes similarities from the features of both modalities.

    It owns projections, point weights and temperature. A subclass defines `embed_image`, `embed_text`, `score`,
    `ensemble` and `probe`, and sets the attributes below. `Model` runs heads outside autocast, on features in the
    precision of the head's parameters.
    """

    score_range: tuple[float, float]
    """Bounds of `score` over all inputs and all allowed parameter values; +-inf without a bound."""
    needs_tokens: bool = False
    """True if the head reads `Features.tokens`."""
    needs_padding: bool = False
    """True if padding tokens are points: captions are then not trimmed to the longest of the batch."""
    stochastic: bool = False
    """True if the head draws random features: `resample` then changes the scores."""
    learnable_temperature: bool = False
    """True if a parameter scales the scores; objectives with their own temperature refuse such heads."""
    is_inner_product: bool = False
    """True if the score is the inner product of `search_factors`, or an increasing function of it."""
    needs_teacher: bool = False
    """True if `terms` reads `Similarity.teacher`."""
    compares_within: bool = True
    """True if `similarity` sets `within_image` and `within_text`."""
    matryoshka: Sequence[int] = ()
    """Widths of the prefixes of an embedding that are trained as embeddings too (Matryoshka, Kusupati et al. 2022)."""
    published_with: tuple[str, ...] = ()
    """Names of the objectives (`Objective.name`) with which papers train this head."""
    citations: tuple[Paper, ...] = ()
    """Papers that define the head."""

    @abstractmethod
    def embed_image(self, features: Features) -> EmbeddingKind:
        """Image features of b samples -> embeddings, one row per image."""

    @abstractmethod
    def embed_text(self, features: Features) -> EmbeddingKind:
        """Text features of b samples -> embeddings, one row per caption."""

    @abstractmethod
    def score(self, image: EmbeddingKind, text: EmbeddingKind) -> Tensor:
        """n image and k text embeddings -> logits [n, k]. Each logit depends only on its own two rows."""

    def both_scores(self, image: EmbeddingKind, text: EmbeddingKind) -> tuple[Tensor, Tensor]:
        """n image and k text embeddings -> logits [n, k] for image anchors and for text anchors; equal by default."""
        scores = self.score(image, text)
        return scores, scores

    @abstractmethod
    def ensemble(self, prompts: EmbeddingKind) -> EmbeddingKind:
        """Text embeddings of the p prompts of one class -> one row. A single prompt is returned unchanged."""

    @abstractmethod
    def probe(self, features: Features, where: str) -> Tensor:
        """Image features -> inputs of a linear probe, [b, w]. where: "before" or "after" the projection."""

    def forward(self, image: Features, text: Features, scope: Scope = Scope()) -> Similarity:
        """Features of the b local samples -> similarities to the global batch of all ranks: embed, gather, score."""
        images, texts = self.embed_image(image), self.embed_text(text)
        similarity = self.compare(images, texts, scope)
        prefixes = {
            width: self.compare(self.prefix(images, width), self.prefix(texts, width), scope)
            for width in self.matryoshka
        }
        return replace(similarity, prefixes=prefixes)

    def compare(self, images: EmbeddingKind, texts: EmbeddingKind, scope: Scope = Scope()) -> Similarity:
        """Embeddings of all images and texts of the b local samples -> similarities to the global batch."""
        views = scope.views
        if views == Views():
            return replace(self.similarity(images, texts, scope), image=images, text=texts, world=scope.world)
        flat: Any = [map_embedding(lambda rows: rows.flatten(0, 1), part) for part in split_views(images, texts, views)]
        plain, crops, columns, boxes = flat
        device = images.device if isinstance(images, Tensor) else images.points.device
        pairing = scope.pairing or samples_pairing(len(plain), views, scope.world, device)
        of_columns = replace(scope, pairing=pairing) if views.captions + views.hard > 1 else scope
        compared: Similarity = self.similarity(plain, columns, of_columns)
        further = [*compared.further]
        if views.crops:
            further.append(self.anchored(crops, columns, replace(scope, pairing=pairing.of_crops(views.crops))))
        if views.boxes:
            of_boxes = replace(scope, pairing=pairing.of_boxes(views.boxes))
            further.append(self.anchored(boxes, plain, of_boxes, texts=True))
        return replace(compared, further=tuple(further), views=views, image=images, text=texts, world=scope.world)

    def similarity(self, image: EmbeddingKind, text: EmbeddingKind, scope: Scope = Scope()) -> Similarity:
        """Embeddings of local images and captions -> scores in the global batch; `compare` sets the other fields."""
        world, pairing, all_texts = scope.world, scope.pairing, scope.gather(text)
        # Each rank compares its own images with all texts; the rows of the other direction are redistributed.
        image_to_text, text_to_image = self.both_scores(image, all_texts)
        text_to_image = world.transpose(text_to_image)[text_anchors(pairing, world)]
        first = world.rank * len(image)
        directions = (
            DenseScores(image_to_text, first, pairing),
            DenseScores(text_to_image, world.rank * len(text_to_image), pairing and pairing.transposed),
        )
        if pairing is not None or not self.compares_within:
            return Similarity(*directions)
        within_image = partial(self.anchored, image, image, scope)
        return Similarity(*directions, within_image, lambda: DenseScores(self.score(text, all_texts), first))

    def anchored(self, anchors: EmbeddingKind, contrasts: EmbeddingKind, scope: Scope, texts: bool = False) -> Scores:
        """Return the scores of local anchors with the contrasts of all ranks, whose pairs are `scope.pairing`.

        texts: whether the anchors are texts, and the contrasts images.
        """
        everything = scope.gather(contrasts)
        matrix = self.both_scores(everything, anchors)[1].mT if texts else self.score(anchors, everything)
        return DenseScores(matrix, scope.world.rank * len(anchors), scope.pairing)

    def terms(self, similarity: Similarity) -> Mapping[str, Term]:
        """Return parts of the loss that the head adds to any objective, by name; each is logged as `term_NAME`."""
        return {}

    def prefix(self, embedding: EmbeddingKind, width: int) -> EmbeddingKind:
        """Return the embeddings made of the first `width` coordinates, for the widths of `matryoshka`."""
        raise ConfigError(f"{type(self).__name__} defines no prefix: leave its matryoshka empty")

    def resample(self, index: int) -> None:
        """Draw new random features, equal on all ranks and for both modalities. No-op for deterministic heads.

        index: number of the draw; the trainer passes the step, evaluation the draw.
        """

    @torch.no_grad()
    def clamp_(self) -> None:
        """Clamp parameters to their range after an optimizer step."""

    def logs(self) -> Mapping[str, Tensor]:
        """Return scalars to log, such as the temperature."""
        return {}

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        """Cost of a step; by default of projections of the pooled features and one product [b, d] [d, N]."""
        return cost_of_vectors(shape, shape.width, projections(shape))

    def log_cosine_scale(self) -> Tensor | None:
        """Return log t if the score is t cos(x P, y Q) of the pooled features, as in CLIP; None for other scores.

        P and Q are the parameters `image_projection` and `text_projection`.
        """
        return None

    def score_parts(self, image: Features, text: Features) -> ScoreParts | None:
        """Features of b pairs -> terms of their scores by point; None for a head without points."""
        return None

    def memory_weights(self, query: EmbeddingKind, memory: EmbeddingKind) -> Tensor | None:
        """b and N embeddings -> weights [b, N] with which training retrieves from a memory; None without a memory."""
        return None

    def vectors(self, image: EmbeddingKind, text: EmbeddingKind) -> tuple[Tensor, Tensor]:
        """n image and k text embeddings -> vectors [n, e] and [k, e] for the diagnosis of their geometry.

        By default the embedding, or the mean point of a point set.
        """
        image_vectors, text_vectors = (part.mean if isinstance(part, PointSet) else part for part in (image, text))
        return image_vectors, text_vectors

    def search_basis(self, images: EmbeddingKind) -> Any:
        """Return the statistics of an index's images that `search_factors` needs; None if it needs none."""
        return None

    def search_factors(self, image: EmbeddingKind, text: EmbeddingKind, basis: Any = None) -> tuple[Tensor, Tensor]:
        """n images and k texts -> [n, f] and [k, f], whose inner products find the images with the highest scores.

        Where `is_inner_product` is False, images are found by these products, then scored. basis: see `search_basis`.
        """
        raise ConfigError(f"{type(self).__name__} defines no search_factors: search without candidates")


class ScaledHead(Head[EmbeddingKind]):
    """Base class of heads whose scores have a learned factor, exp(log_scale).

    temperature: initial tau, scale = 1 / tau. max_scale: the scale is clamped to [1, max_scale] after every step.
    """

    learnable_temperature = True
    log_scale: nn.Parameter

    @torch.no_grad()
    def clamp_(self) -> None:
        """Clamp the scale; the score of a cosine of 1 is at most `max_scale`."""
        self.log_scale.clamp_(0.0, math.log(self.score_range[1]))

    def logs(self) -> Mapping[str, Tensor]:
        return {"temperature": (-self.log_scale.detach()).exp()}


@dataclass(frozen=True)
class ScoreParts:
    """Terms of the scores of b pairs, one for each point of the image and each point of the caption.

    values: [b, M, L]; padding has the value 0. is_logarithm: the score is the logarithm of their sum, as in KME-CLIP.
    image_weights, text_weights: [b, M] and [b, L], weights of the points.
    """

    values: Tensor
    image_weights: Tensor
    text_weights: Tensor
    is_logarithm: bool = False

    @property
    def score(self) -> Tensor:
        """Scores of the pairs, [b]."""
        total = self.values.sum(dim=(1, 2))
        return total.log() if self.is_logarithm else total


ICLR = "International Conference on Learning Representations"
ICML = "International Conference on Machine Learning"
NEURIPS = "Advances in Neural Information Processing Systems"


@dataclass(frozen=True)
class Paper:
    """A paper to cite. key: key of its BibTeX entry. venue: conference; None for a preprint."""

    key: str
    title: str
    authors: str | None = None
    venue: str | None = None
    year: int | None = None

    @property
    def bibtex(self) -> str:
        fields = {"title": f"{{{self.title}}}", "author": self.authors, "booktitle": self.venue, "year": self.year}
        lines = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items() if value is not None)
        return f"@{'inproceedings' if self.venue else 'misc'}{{{self.key},\n{lines}\n}}"


# Cost of a head in a training step: floating-point operations, bytes that ranks exchange, memory of scores.

FLOAT = 4


@dataclass(frozen=True)
class Shape:
    """Sizes of a step: local batch, ranks, widths, points per image and caption, random features of WPSE."""

    local: int
    ranks: int
    image_width: int = 768
    text_width: int = 512
    width: int = 512
    features: int = 1024
    image_points: int = 197
    text_points: int = 77

    @property
    def batch(self) -> int:
        return self.local * self.ranks

    @property
    def tiled(self) -> bool:
        return automatic_tile(self.local, self.batch) is not None


@dataclass(frozen=True)
class Cost:
    """Cost of a step for one rank, forward and backward.

    flops: floating-point operations. gathered: numbers of a sample that all ranks gather, and whose gradient returns.
    exchanged: bytes sent to other ranks, besides gathers. scores: bytes of scores in memory at once. points: bytes
    of projected points and their gradients.
    """

    flops: float
    gathered: float
    exchanged: float
    scores: float
    points: float = 0.0


def cost_of_vectors(shape: Shape, width: int, flops: float, points: float = 0.0) -> Cost:
    """Cost of scores that are inner products: text vectors and their gradients, a matrix or tiles computed twice.

    Ranks transpose a matrix for the captions, and its gradient back; with tiles they exchange only sums. flops, points:
    those of the projections.
    """
    product = 2 * shape.local * shape.batch * width
    points += 2 * shape.batch * width * FLOAT
    if shape.tiled:
        sums = 4 * (shape.ranks - 1) * shape.local * 2
        return Cost(flops + 4 * product, width, sums, 1024 * 1024 * FLOAT, points)
    return Cost(flops + 3 * product, width, transposed(shape), 3 * shape.local * shape.batch * FLOAT, points)


def cost_of_points(shape: Shape, products: int, scores: float) -> Cost:
    """Cost of products of all image points with all text points of the global batch. products: their number."""
    flops = projections(shape, shape.image_points, shape.text_points)
    flops += 2 * products * shape.local * shape.image_points * shape.batch * shape.text_points * shape.width
    gathered = shape.text_points * (shape.width + 1)
    points = 2 * shape.local * shape.image_points * shape.width * FLOAT + 2 * shape.batch * gathered * FLOAT
    return Cost(flops, gathered, transposed(shape), scores, points)


def projections(shape: Shape, image_points: int = 1, text_points: int = 1) -> float:
    """FLOPs of the projections of the features of both modalities."""
    return 6 * shape.local * (image_points * shape.image_width + text_points * shape.text_width) * shape.width


def transposed(shape: Shape) -> float:
    """Bytes received when a matrix [b, N] is transposed, and its gradient back."""
    return 2 * (shape.ranks - 1) * shape.local * shape.local * FLOAT
