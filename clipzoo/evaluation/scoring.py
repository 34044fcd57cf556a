"""Accuracy and recall as torchmetrics with exact integer counts. Importing torchmetrics takes seconds: import late."""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torchmetrics import Metric

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, number_of
from clipzoo.model import Model
from clipzoo.runs.metric_key import DEVIATION
from clipzoo.types import Embedding, Features, PointSet, map_embedding

# Checks for faults of an evaluation dataset that would otherwise give wrong numbers.


def check_labels(labels: Tensor, class_names: Sequence[str], where: str) -> None:
    """Raise ConfigError unless every label has a class name. where: dataset and split, for the message."""
    wrong = labels[(labels < 0) | (labels >= len(class_names))]
    if len(wrong):
        raise ConfigError(f"{where}: label {int(wrong[0])}, but its classes are 0 to {len(class_names) - 1}")


def check_classes(labels: Tensor, class_names: Sequence[str], where: str) -> None:
    """Raise ConfigError unless there are at least two classes and every class has a sample."""
    if len(class_names) < 2:
        raise ConfigError(f"{where}: {len(class_names)} class, nothing can be classified")
    empty = (torch.bincount(labels, minlength=len(class_names)) == 0).nonzero().flatten().tolist()
    if empty:
        shown = ", ".join(repr(class_names[index]) for index in empty[:5])
        raise ConfigError(
            f"{where}: {len(empty)} of {number_of(len(class_names), 'class', 'es')} have no sample ({shown})"
        )


def check_finite(features: Tensor, where: str) -> None:
    """Raise ConfigError if a feature is NaN or infinite."""
    broken = (~torch.isfinite(features)).any(dim=1).nonzero().flatten()
    if len(broken):
        raise ConfigError(
            f"{where}: {len(broken)} of {number_of(len(features), 'image')} have features that are NaN or infinite"
        )


def check_captions(caption_image: Tensor, images: int, captions: int, name: str) -> None:
    """Raise ConfigError unless every caption belongs to an image and every image has a caption.

    caption_image: [captions], index of each caption's image. images, captions: their numbers. name: of the dataset.
    """
    if len(caption_image) != captions:
        raise ConfigError(
            f"{name}: {number_of(captions, 'caption')}, but {len(caption_image)} entries in caption_image"
        )
    if captions == 0 or caption_image.min() < 0 or caption_image.max() >= images:
        shown = caption_image.tolist()[:5]
        raise ConfigError(
            f"{name}: captions belong to images {shown}..., but the dataset has {number_of(images, 'image')}"
        )
    without = (torch.bincount(caption_image, minlength=images) == 0).nonzero().flatten().tolist()
    if without:
        raise ConfigError(
            f"{name}: {len(without)} of {number_of(images, 'image')} have no caption (the first is number {without[0]})"
        )


def check_paired(caption_image: Tensor, name: str) -> None:
    """Raise ConfigError unless all images have equally many captions. caption_image: see `check_captions`."""
    counts = torch.bincount(caption_image)
    if counts.min() != counts.max():
        raise ConfigError(
            f"{name}: images have {int(counts.min())} to {int(counts.max())} captions, but the paired protocol needs "
            "equally many: set eval.paired=false"
        )


# Evaluation under several draws of a head's random features.


def embed_draws(
    model: Model, draws: int, embed: Callable[[Features], Embedding], features: Features
) -> list[Embedding]:
    """Embed the same features under each of `draws` draws of the head's random features."""
    if draws == 1:
        return [embed(features)]
    embeddings = []
    for draw in range(draws):
        model.head.resample(draw)
        embeddings.append(embed(features))
    model.head.resample(0)
    return embeddings


def mean_over_draws(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over several draws, followed by its sample deviation; the metrics of one draw as they are."""
    if len(metrics) == 1:
        return dict(metrics[0])
    summary = {}
    for name in metrics[0]:
        values = [draw[name] for draw in metrics]
        summary[name] = statistics.fmean(values)
        summary[f"{name}{DEVIATION}"] = statistics.stdev(values)
    return summary


class TopCounts(Metric):
    """Number of queries whose right answer is among the first k of all answers, per class of the query.

    torchmetrics' MulticlassAccuracy and RetrievalHitRate order scores by topk, whose order of equal scores is
    unspecified, and average in float32. Here the caller gives the position of the right answer (see `ranking`), and the
    states are integers: percentages are the same on any device and any number of ranks.

    Args:
        cutoffs: the values of k.
        classes: number of classes.
        world: the ranks whose counts `compute` adds up. Collective.
    """

    full_state_update = False
    hits: Tensor  # [cutoffs, classes]
    samples: Tensor  # [classes]

    def __init__(self, cutoffs: Sequence[int], classes: int, world: World) -> None:
        super().__init__(
            dist_sync_fn=lambda tensor, group: list(world.gather(tensor[None])),
            distributed_available_fn=lambda: world.size > 1,
        )
        self.cutoffs, self.classes = tuple(cutoffs), classes
        self.add_state("hits", torch.zeros(len(self.cutoffs), classes, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros(classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, position: Tensor, label: Tensor | None = None) -> None:
        """Count queries. position: [n], 0 for the best answer. label: [n], the query's class; None for one class."""
        label = torch.zeros_like(position) if label is None else label
        self.samples += torch.bincount(label, minlength=self.classes)
        for row, cutoff in enumerate(self.cutoffs):
            self.hits[row] += torch.bincount(label[position < cutoff], minlength=self.classes)

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Return metrics in percent by name."""

    def percent(self) -> list[float]:
        """Percentage of hits for each cutoff, over all queries."""
        return [100 * int(row.sum()) / int(self.samples.sum()) for row in self.hits]


class Accuracy(TopCounts):
    """top1, mean_per_class, and for more than five classes top5.

    mean_per_class: top-1 accuracy of each class, averaged over the classes that have samples.
    """

    def __init__(self, classes: int, world: World) -> None:
        super().__init__((1, 5) if classes > 5 else (1,), classes, world)

    def compute(self) -> dict[str, float]:
        present = self.samples > 0
        per_class = self.hits[0][present].double() / self.samples[present]
        names = [f"top{cutoff}" for cutoff in self.cutoffs]
        values = dict(zip(names, self.percent(), strict=True))
        return {"top1": values.pop("top1"), "mean_per_class": 100 * per_class.mean().item(), **values}


class Recall(TopCounts):
    """recall_at_k: the share of queries with any right answer among the first k."""

    def __init__(self, cutoffs: Sequence[int], world: World) -> None:
        super().__init__(cutoffs, 1, world)

    def compute(self) -> dict[str, float]:
        names = [f"recall_at_{cutoff}" for cutoff in self.cutoffs]
        return dict(zip(names, self.percent(), strict=True))


# Scores of images with texts, and positions in the order of the scores.
#
# Answers are in the order of descending scores; equal scores are in the order of their columns, as with argmax and a
# stable sort. A model that gives all answers the same score is then right by chance, not always.


BLOCK_POINT_PAIRS = 1 << 28
"""Pairs of points whose similarity is computed at a time; heads divide this further as they need."""


def positions(scores: Tensor, column: Tensor) -> Tensor:
    """scores [n, k], one answer's column per row [n] -> [n] int64, the number of answers before it; 0 for the best."""
    own = scores.gather(1, column[:, None])
    columns = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > own) | ((scores == own) & (columns < column[:, None]))
    return before.sum(dim=1)


@torch.no_grad()
def score_blocks(model: Model, image: Embedding, text: Embedding) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks of rows of the similarity matrix [n, k], with the index of each block's first row.

    Scores are in the head's own precision: bf16 and TF32 products change predictions (54 of 1000 in a trial of bf16).
    Raises ConfigError if a score is NaN.
    """
    rows = max(1, BLOCK_POINT_PAIRS // (_points(image) * _points(text) * len(text)))
    for start in range(0, len(image), rows):
        block = map_embedding(lambda tensor, start=start: tensor[start : start + rows], image)  # type: ignore[misc]
        with exact_products():
            scores = model.similarity(block, text)
        if scores.isnan().any():
            raise ConfigError("the model's similarities are NaN: its weights are broken; evaluate another checkpoint")
        yield start, scores


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 matrices in float32, whatever precision training has set."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _points(embedding: Embedding) -> int:
    return embedding.points.shape[1] if isinstance(embedding, PointSet) else 1
