"""Types of the data that flows through a training step, in order.

    Batch -> encoder -> Features -> head -> Similarity -> objective -> Loss

Legend of shapes for the whole package: b local batch, N global batch, n dataset size, M points, L tokens, d width,
D random features.

The annotations of constructors (`Count`, `Scale`, ...) and the decorator `checked` are re-exported here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.config.schema import checked as checked
from clipzoo.config.vocabulary import *  # noqa: F403 (all annotations)
from clipzoo.config.vocabulary import Count as Count, NonNegativeCount as NonNegativeCount
from clipzoo.distributed.world import World as World
from clipzoo.errors import ConfigError


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode in the block."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


class Part:
    """Base class of the classes other than `torch.nn.Module` that a configuration may name."""


@dataclass(frozen=True)
class Views(Part):
    """Number of images and texts of each sample; by default one image and one caption, as in CLIP.

    captions: captions of the image, all of them positives.
    hard: wrong captions (hard negatives); columns of the image anchors, never anchors.
    boxes: captions of regions of the image; anchors that are compared with all images, never columns.
    crops: further crops of the image; anchors that are compared with all captions, never columns.
    """

    captions: Count = 1
    hard: NonNegativeCount = 0
    boxes: NonNegativeCount = 0
    crops: NonNegativeCount = 0

    @property
    def images(self) -> int:
        """Images of a sample: the plain image, then crops."""
        return 1 + self.crops

    @property
    def texts(self) -> int:
        """Texts of a sample: captions, then hard captions, then boxes."""
        return self.captions + self.hard + self.boxes


@dataclass(frozen=True)
class Batch:
    """The images and captions of b samples. CLIP needs `image`, `text` and `sample_id`; the other fields are options.

    image: [b, 3, H, W] uint8 (the encoder normalises), or any float view in studies.
    text: [b, L] int64 token ids, or any view in studies.
    sample_id: [b] int64, stable over epochs, ranks and resumes.
    image_key: [b] int64 digests of the image files, if the loader skips images whose features are cached.
    text_length: [b] int64 on the CPU, tokens of each text without padding; None if padding counts or is unknown.
    caption_key: [b] int64 digests of the texts; None: equal captions are found by their tokens.
    group: [b] int64, equal for samples that are not negatives of each other (`objective.same_caption`).
    views: numbers of images and texts of a sample, in this order. I > 1 images are [b, I, 3, H, W]; K > 1 texts are
    [b, K, L], and text_length and caption_key [b, K].
    """

    image: Tensor
    text: Tensor
    sample_id: Tensor
    image_key: Tensor | None = None
    text_length: Tensor | None = None
    caption_key: Tensor | None = None
    group: Tensor | None = None
    views: Views = Views()

    def __len__(self) -> int:
        return len(self.sample_id)

    @property
    def images(self) -> Tensor:
        """All images, [b * I, ...]; those of a sample are consecutive."""
        return self.image if self.views.images == 1 else self.image.flatten(0, 1)

    @property
    def texts(self) -> Tensor:
        """All texts, [b * K, L]; those of a sample are consecutive."""
        return self.text if self.views.texts == 1 else self.text.flatten(0, 1)

    @property
    def text_lengths(self) -> Tensor | None:
        """`text_length` of all texts, [b * K]."""
        return None if self.text_length is None else self.text_length.flatten()

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply a function of the leading dimension to all tensors."""
        tensors: dict[str, Any] = {
            name: function(value) for name, value in vars(self).items() if torch.is_tensor(value)
        }
        return replace(self, **tensors)

    def to(self, device: torch.device) -> Batch:
        return replace(self.map(lambda tensor: tensor.to(device, non_blocking=True)), text_length=self.text_length)

    def pin_memory(self) -> Batch:
        """Copy to pinned memory; torch's DataLoader calls this."""
        return self.map(Tensor.pin_memory)

    def split(self, size: int) -> list[Batch]:
        """Return consecutive slices of at most `size` samples."""
        return [self.map(itemgetter(slice(first, first + size))) for first in range(0, len(self), size)]


@dataclass(frozen=True)
class Features:
    """Encoder outputs for b samples, before projection.

    pooled: [b, w].
    tokens: [b, M, w] after the final norm; None if the encoder has no tokens.
    mask: [b, M] bool, False for padding; None if no token is padding.
    """

    pooled: Tensor
    tokens: Tensor | None = None
    mask: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Features:
        """Apply a function to every float tensor; the mask is unchanged."""
        return Features(function(self.pooled), None if self.tokens is None else function(self.tokens), self.mask)


@final
@dataclass(frozen=True)
class PointSet:
    """Weighted points: sum_i exp(log_weights_i) delta(points_i).

    points: [b, M, d]. log_weights: [b, M]; -inf marks padding, a point of weight zero.
    """

    points: Tensor
    log_weights: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> PointSet:
        """Apply a function of the leading dimension (slice, gather, move) to points and log-weights."""
        return PointSet(function(self.points), function(self.log_weights))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, rows: Any) -> PointSet:
        """Return the point sets of some rows; `rows` indexes the leading dimension as it does a tensor's."""
        return self.map(lambda tensor: tensor[rows])

    @property
    def mean(self) -> Tensor:
        """Weighted mean of the points of each set, [b, d]."""
        return (self.log_weights.softmax(dim=1).unsqueeze(1) @ self.points).squeeze(1)

    def padded(self, count: int) -> PointSet:
        """Return the same sets padded to `count` points, [b, count, d]; padding has weight zero."""
        missing = count - self.points.shape[1]
        log_weights = functional.pad(self.log_weights, (0, missing), value=float("-inf"))
        return PointSet(functional.pad(self.points, (0, 0, 0, missing)), log_weights)


Embedding = Tensor | PointSet
EmbeddingKind = TypeVar("EmbeddingKind", Tensor, PointSet)
"""Embedding type of a head: `class ClipHead(Head[Tensor])`, `class KmeHead(Head[PointSet])`."""


def map_embedding(function: Callable[[Tensor], Tensor], embedding: Embedding) -> Embedding:
    """Apply a function of the leading dimension (slice, move, detach) to an embedding of either type."""
    return embedding.map(function) if isinstance(embedding, PointSet) else function(embedding)


def as_captions(captions: str | Sequence[str]) -> list[str]:
    """Return one caption or several as a list. Raises ConfigError for a value other than text."""
    rows = [captions] if isinstance(captions, str) else list(captions)
    for row in rows:
        if not isinstance(row, str):
            raise ConfigError(f"captions are a string or a list of strings, not {type(row).__name__}: {row!r:.80}")
    return rows


def concatenate(embeddings: Sequence[Embedding]) -> Embedding:
    """Concatenate embeddings of one type along the rows, [sum b, ...]; point sets are padded to the largest set."""
    if not isinstance(embeddings[0], PointSet):
        return torch.cat([embedding for embedding in embeddings if isinstance(embedding, Tensor)])
    sets = [embedding for embedding in embeddings if isinstance(embedding, PointSet)]
    count = max(point_set.points.shape[1] for point_set in sets)
    padded = [point_set.padded(count) for point_set in sets]
    points = torch.cat([point_set.points for point_set in padded])
    return PointSet(points, torch.cat([point_set.log_weights for point_set in padded]))


def gather_embedding(embedding: EmbeddingKind, world: World, dtype: torch.dtype | None = None) -> EmbeddingKind:
    """Gather the embeddings of all ranks, [b, ...] -> [N, ...] in rank order. Differentiable.

    The number of points may differ among ranks.
    dtype: precision in which embeddings travel. Training passes `world.gather_dtype`; evaluation gathers exactly.
    """
    if world.size == 1:
        return embedding
    if isinstance(embedding, PointSet):
        count = int(world.maximum(torch.full((), embedding.points.shape[1], device=embedding.points.device)))
        padded = embedding.padded(count)
        # Log-weights stay exact: rounding them is a relative error of the weights.
        return PointSet(world.gather(padded.points, dtype), world.gather(padded.log_weights))
    return world.gather(embedding, dtype)


class Negatives(ABC):
    """Terms e_ij = factor * exp((s_ij - s_ii - offset_j) / temperature_i) of the negatives j of b local anchors i.

    The terms have no gradient; only `surrogate` is differentiable.
    """

    @abstractmethod
    def log_sum(self) -> Tensor:
        """Return log sum_{j != i} e_ij, [b]."""

    @abstractmethod
    def surrogate(self, log_denominator: Tensor) -> Tensor:
        """Return mean_i sum_j e_ij / denominator_i * (s_ij - s_ii), differentiable only in the scores.

        Its gradient is the moving-average estimator; its value has no meaning. log_denominator: [b].
        """

    @abstractmethod
    def mean_difference(self, log_denominator: Tensor) -> Tensor:
        """Return sum_j e_ij / denominator_i * (s_ij - s_ii) / temperature_i, [b]."""

    @abstractmethod
    def log_pull(self, log_denominator: Tensor, world: World) -> Callable[[], Tensor]:
        """Return a function for log sum_i e_ij / (factor * denominator_i), [N], over all ranks' anchors and positives.

        Requires one temperature. Call this for both directions before either function: one pass then serves both.
        """


class Scores(ABC):
    """Similarities s_ij of local anchors i (rows) to all ranks' samples j (columns), in one direction.

    In CLIP the b rows are images and the N columns captions, or the reverse. Row i has one positive, in column
    `first_positive + i`; the other columns are negatives. The loss of the direction is the mean of `log_sum_exp()`
    minus `positives()`. Most objectives use such sums, which a head may compute in tiles, without the matrix.

    With several captions a row may have several positives p, and pairs of samples with equal captions or groups may be
    left out: neither positives nor negatives. Results are differentiable, in the head's precision, one value a row.
    """

    first_positive: int
    """Column of row 0's positive, if every row has one positive."""
    columns: int
    """Number of columns, N."""

    @abstractmethod
    def positives(self) -> Tensor:
        """Return s_ii, the score of each anchor with its positive, [b]; the mean if there are several."""

    @abstractmethod
    def log_sum_exp(self, *, exclude_positive: bool = False) -> Tensor:
        """Return log sum_j exp(s_ij) over positives and negatives j, [b], or over negatives only."""

    @abstractmethod
    def positives_log_sum_exp(self) -> Tensor:
        """Return log sum_p exp(s_ip) over positives p, [b]; s_ii if there is one."""

    @abstractmethod
    def each_alone(self) -> Tensor:
        """Return the cross-entropy of each positive p among the negatives j, [b], averaged over p.

        mean_p [log(exp(s_ip) + sum_j exp(s_ij)) - s_ip]
        """

    @abstractmethod
    def expectation(self, other: Scores) -> Tensor:
        """Return sum_j softmax(other s_i)_j s_ij over positives and negatives j, [b]; `other` has no gradient."""

    def negative_counts(self) -> int | Tensor:
        """Return the number of negatives of each row, [b], or one number for all rows."""
        return self.columns - 1

    @abstractmethod
    def scaled(self, scaling: Callable[[Tensor], Tensor]) -> Scores:
        """Return the scores multiplied or divided by a scalar. Pass one function for both directions."""

    @abstractmethod
    def minus(self, other: Scores) -> Scores:
        """Return the differences to other scores of the same rows and columns."""

    @abstractmethod
    def binary_cross_entropy(self, scale: Tensor, bias: Tensor) -> Tensor:
        """Return SigLIP's loss 1/b sum_ij -log sigmoid(y_ij (scale * s_ij + bias)), []. b: local samples.

        y_ij is 1 for positives and -1 for negatives. The mean over ranks is the loss of the global batch.
        """

    @abstractmethod
    def squared_distance(self, other: Scores) -> Tensor:
        """Return sum_j (s_ij - other s_ij)^2, [b]."""

    @abstractmethod
    def negatives(
        self,
        temperature: float | Tensor,
        log_factor: float,
        offset: Tensor | None = None,
        threshold: Tensor | None = None,
    ) -> Negatives:
        """Return factor * exp((s_ij - s_ii - offset_j) / temperature_i) for the negatives j.

        temperature: one number, or [N] for all ranks' anchors. offset: [N] for the columns. threshold: [N] for all
        ranks' anchors; a negative with a higher score is left out. None of these has a gradient.
        Call this for both directions before using a sum of either: one pass over the scores then serves both.
        """

    def at(self, columns: Tensor) -> Tensor:
        """columns [b, S] int64 -> the scores of row i with the columns columns[i], [b, S]."""
        return self.dense().gather(1, columns)

    @abstractmethod
    def dense(self) -> Tensor:
        """Return all scores, [b, N]. Only for formulas that need single scores: the other methods need less memory."""


# torch.compile reads globals, but no objects that are default values.
ONE_RANK, ONE_VIEW = World(), Views()


@dataclass(frozen=True)
class Similarity:
    """Scores of both directions; the rows are local samples.

    For most heads text_to_image is the transpose of image_to_text over the global batch; for CLOOB it is not.
    `within_image` and `within_text` compute scores inside a modality on demand (CyCLIP), None if a head has none.
    `world` holds the ranks whose samples are the columns; objectives gather their statistics over it.

    image, text: embeddings of all local images and texts, `views` of a sample, for terms; None if they were not kept.
    further: scores of the anchors that are not columns: crops with all captions, and boxes with all images.
    teacher: the teacher's similarity of the same rows and columns, without gradient; None without a teacher.
    log_cosine_scale: log of the factor of the cosines of `image` and `text` in the scores; None for other scores.
    prefixes: similarities of the embeddings' prefixes, by width (see `Head.matryoshka`).
    """

    image_to_text: Scores
    text_to_image: Scores
    within_image: Callable[[], Scores] | None = None
    within_text: Callable[[], Scores] | None = None
    world: World = field(default_factory=lambda: ONE_RANK)
    image: Embedding | None = None
    text: Embedding | None = None
    views: Views = field(default_factory=lambda: ONE_VIEW)
    further: tuple[Scores, ...] = ()
    teacher: Similarity | None = None
    log_cosine_scale: Tensor | None = None
    prefixes: Mapping[int, Similarity] = field(default_factory=dict)

    @property
    def directions(self) -> tuple[Scores, Scores]:
        """Scores of image anchors and of text anchors."""
        return self.image_to_text, self.text_to_image


class Term(NamedTuple):
    """A part of the loss that a head, an objective or a distillation adds: weight * value.

    value: scalar, a mean over local samples, so that its mean over ranks is that of the global batch.
    """

    weight: float
    value: Tensor


@dataclass(frozen=True)
class Loss:
    """Result of an objective.

    total: scalar whose mean over ranks is the loss of the global batch. logs: detached scalars of this rank.
    """

    total: Tensor
    logs: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """Position in the training: `step` of `total_steps`. An epoch has `samples` rows, samples / N steps."""

    step: int
    total_steps: int
    samples: int
    global_batch: int

    @property
    def epoch(self) -> float:
        """Epochs done, as a fraction, for display."""
        return self.step * self.global_batch / self.samples

    def steps(self, epochs: float) -> Fraction:
        """Return the exact number of steps in `epochs` epochs."""
        return decimal(epochs) * self.samples / self.global_batch

    def completed(self, epochs: float = 1) -> int:
        """Return the number of completed periods of `epochs` epochs."""
        steps = self.steps(epochs)  # torch.compile divides no step by a fraction
        return self.step * steps.denominator // steps.numerator

    @property
    def begins_epoch(self) -> bool:
        """True for the first step and for those that complete an epoch."""
        return self.step == 0 or self.completed() > replace(self, step=self.step - 1).completed()


def decimal(number: float) -> Fraction:
    """Return the number as written in decimal: 0.1 is 1/10, not the nearest binary fraction."""
    return Fraction(str(number))
