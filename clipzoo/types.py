"""The types that one batch passes through, in the order it meets them.

    Batch -> encoder -> Features -> head -> Similarity -> objective -> Loss

Legend of shapes for the whole package: b local batch, N global batch, n dataset size, M points, L tokens, d width,
D random features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, final

import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.distributed.world import World

Positive = float
"""In a constructor: a number above zero; the configuration (`clipzoo/config/schema.py`) refuses others."""
Count = int
"""The same of whole numbers."""


@dataclass(frozen=True)
class Batch:
    """Two views of the same b samples.

    image: [b, 3, H, W] uint8 (the encoder normalises), or any float view in studies.
    text: [b, L] int64 token ids, or any view in studies.
    sample_id: [b] int64, stable over epochs, ranks and resumes.
    """

    image: Tensor
    text: Tensor
    sample_id: Tensor

    def __len__(self) -> int:
        return len(self.sample_id)

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(function(self.image), function(self.text), function(self.sample_id))

    def to(self, device: torch.device) -> Batch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Called by torch's DataLoader."""
        return self.map(Tensor.pin_memory)

    def split(self, size: int) -> list[Batch]:
        """Consecutive slices of at most `size` samples."""
        parts = zip(*(view.split(size) for view in (self.image, self.text, self.sample_id)), strict=True)
        return [Batch(*part) for part in parts]


@dataclass(frozen=True)
class Features:
    """What an encoder says of b samples, before any projection.

    pooled: [b, w].
    tokens: [b, M, w] after the final norm, or None where the encoder has none.
    mask: [b, M] bool, True where the token is real; None where all are. Padding of captions is False.
    """

    pooled: Tensor
    tokens: Tensor | None = None
    mask: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Features:
        """Apply to every float tensor; the mask stays."""
        return Features(function(self.pooled), None if self.tokens is None else function(self.tokens), self.mask)

    def first(self, rows: int) -> Features:
        """Of the first `rows` samples only."""
        some = self.map(lambda tensor: tensor[:rows])
        return Features(some.pooled, some.tokens, None if self.mask is None else self.mask[:rows])


@final
@dataclass(frozen=True)
class PointSet:
    """Weighted points: sum_i exp(log_weights_i) delta(points_i).

    points: [b, M, d]; log_weights: [b, M], -inf for a point that is not there.
    """

    points: Tensor
    log_weights: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> PointSet:
        """Apply a function of the leading dimension (slice, gather, move) to both tensors."""
        return PointSet(function(self.points), function(self.log_weights))

    def __len__(self) -> int:
        return len(self.points)

    def padded(self, count: int) -> PointSet:
        """The same sets with room for `count` points: [b, count, d], the new ones with weight zero."""
        missing = count - self.points.shape[1]
        return PointSet(
            functional.pad(self.points, (0, 0, 0, missing)),
            functional.pad(self.log_weights, (0, missing), value=float("-inf")),
        )


Embedding = Tensor | PointSet
EmbeddingKind = TypeVar("EmbeddingKind", Tensor, PointSet)
"""Which of the two a head makes: `class ClipHead(Head[Tensor])`, `class KmeHead(Head[PointSet])`."""


def map_embedding(function: Callable[[Tensor], Tensor], embedding: Embedding) -> Embedding:
    """Apply a function of the leading dimension (slice, move, detach) to either kind of embedding."""
    return embedding.map(function) if isinstance(embedding, PointSet) else function(embedding)


def concatenate(embeddings: Sequence[Embedding]) -> Embedding:
    """Rows of all the embeddings, [sum b, ...]; point sets are padded to the largest with weight zero."""
    first = embeddings[0]
    if not isinstance(first, PointSet):
        return torch.cat([each for each in embeddings if isinstance(each, Tensor)])
    sets = [each for each in embeddings if isinstance(each, PointSet)]
    count = max(each.points.shape[1] for each in sets)
    padded = [each.padded(count) for each in sets]
    return PointSet(torch.cat([each.points for each in padded]), torch.cat([each.log_weights for each in padded]))


def gather_embedding(embedding: EmbeddingKind, world: World, dtype: torch.dtype | None = None) -> EmbeddingKind:
    """All ranks' embeddings in rank order, differentiable; point sets may differ in their number of points.

    dtype: precision in which the embeddings travel; training passes `world.gather_dtype`, evaluation rounds nothing.
    """
    if world.size == 1:
        return embedding
    if isinstance(embedding, PointSet):
        count = int(world.maximum(torch.full((), embedding.points.shape[1], device=embedding.points.device)))
        padded = embedding.padded(count)
        # Log-weights stay exact: rounding them is a relative error of the weights.
        return PointSet(world.gather(padded.points, dtype), world.gather(padded.log_weights))
    return world.gather(embedding, dtype)


class Scores(ABC):
    """Similarities of the b local anchors (rows) to the N samples of the global batch (columns), one direction.

    Row i's positive is its own other view. Every answer is differentiable and in the head's precision.
    """

    @abstractmethod
    def positives(self) -> Tensor:
        """[b], the score of each anchor with its positive."""

    @abstractmethod
    def log_sum_exp(self, *, exclude_positive: bool = False) -> Tensor:
        """[b], log of the sum over the columns of exp(score), with or without the positive's own column."""

    @abstractmethod
    def dense(self) -> Tensor:
        """[b, N]. Costs memory that the other two answers do not need: ask only where the formula needs each score."""

    @property
    @abstractmethod
    def first_positive(self) -> int:
        """The column of row 0's positive; row i's is `first_positive + i`."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """N."""


@dataclass(frozen=True)
class Similarity:
    """The two directions, rows anchored on local samples.

    For most heads text_to_image is the transpose of image_to_text over the global batch; for CLOOB it is not.
    `within_image` and `within_text` compute scores inside a modality on demand (CyCLIP), None if a head has none.
    `world` holds the ranks whose samples are the columns; objectives gather their statistics over it.
    """

    image_to_text: Scores
    text_to_image: Scores
    within_image: Callable[[], Scores] | None = None
    within_text: Callable[[], Scores] | None = None
    world: World = World()

    @property
    def directions(self) -> tuple[Scores, Scores]:
        return self.image_to_text, self.text_to_image


@dataclass(frozen=True)
class Loss:
    """total: scalar whose mean over ranks is the loss of the global batch. logs: detached scalars of this rank."""

    total: Tensor
    logs: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """Where training stands: `step` counts optimiser steps already done, an epoch is `samples / global_batch` steps."""

    step: int
    total_steps: int
    samples: int
    global_batch: int

    @property
    def epoch(self) -> float:
        """Epochs done, with their fraction."""
        return self.step * self.global_batch / self.samples

    @property
    def total_epochs(self) -> float:
        return self.total_steps * self.global_batch / self.samples
