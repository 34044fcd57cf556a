"""Zero-shot classification: each class is an ensemble of prompts; images are assigned to the most similar class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from clipzoo.evaluation import scoring
from clipzoo.evaluation.datasets.dataset import ClassificationDataset
from clipzoo.evaluation.encoder import BatchEncoder, gathered_batches, joined
from clipzoo.model import Model
from clipzoo.types import Embedding, Features, concatenate, map_embedding


@dataclass(frozen=True)
class ZeroShot:
    """Metrics in percent, and the predictions of the first draw.

    labels, predictions: [n]. margins: [n], score of the predicted class minus score of the label.
    """

    metrics: dict[str, float]
    labels: Tensor
    predictions: Tensor
    margins: Tensor


def zero_shot(model: Model, dataset: ClassificationDataset, encoder: BatchEncoder, resize: int, draws: int) -> ZeroShot:
    """Classify the test images: top1, mean_per_class, and top5 for more than five classes. Collective.

    resize: shorter side in pixels before the central crop. draws: number of draws, for heads with random features.
    """
    draws = draws if model.head.stochastic else 1
    names, world, test = dataset.class_names, encoder.world, dataset.splits["test"]
    scoring.check_labels(torch.tensor(test.labels), names, f"{dataset.name}, test", complete=True)
    classifiers = build_classifiers(model, names, dataset.templates, encoder, draws)

    def classify(features: Features, labels: Tensor) -> list[Embedding]:
        images = scoring.embed_draws(model, draws, model.head.embed_image, features)
        classified = [_classify(model, *pair, labels) for pair in zip(images, classifiers, strict=True)]
        return [labels, *(torch.stack(column, dim=1) for column in zip(*classified, strict=True))]

    batches = encoder.images(model, test, resize, classify, f"zero-shot {dataset.name}")
    columns = zip(*[[part.cpu() for part in batch if isinstance(part, Tensor)] for batch in batches], strict=True)
    labels, position, predictions, margins = (torch.cat(column) for column in columns)  # [n], [n, draws] ...
    local_rows = slice(world.rank, None, world.size)
    local, local_labels = position[local_rows].to(model.device), labels[local_rows].to(model.device)
    metrics = [scoring.accuracy(local[:, draw], local_labels, len(names), world) for draw in range(draws)]
    return ZeroShot(scoring.mean_over_draws(metrics), labels, predictions[:, 0], margins[:, 0])


def build_classifiers(
    model: Model, class_names: Sequence[str], templates: Sequence[str], encoder: BatchEncoder, draws: int
) -> list[Embedding]:
    """Embed the classes for each draw, one row per class. "{c}" in a template is replaced by the class name."""
    count = len(templates)

    def embed(classes: Sequence[int]) -> list[Embedding]:
        prompts = [template.replace("{c}", class_names[index]) for index in classes for template in templates]
        rows = [slice(row * count, (row + 1) * count) for row in range(len(classes))]
        return [
            concatenate([model.head.ensemble(map_embedding(itemgetter(row), embedded)) for row in rows])
            for embedded in encoder.embed_captions(model, prompts, draws)
        ]

    block = max(1, encoder.batch_size // count)
    return joined(list(gathered_batches(len(class_names), block, embed, encoder.world)))


def _classify(model: Model, image: Embedding, classifier: Embedding, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return [b] positions of the labels, predicted classes, and the predictions' scores above the labels'."""
    position, predicted, margin = [], [], []
    for start, scores in scoring.score_blocks(model, image, classifier):
        block_labels = labels[start : start + len(scores)]
        position.append(scoring.positions(scores, block_labels))
        best = scores.max(dim=1).values
        # Not the index of max, which differs among devices: the first of equal scores counts.
        predicted.append((scores == best[:, None]).int().argmax(dim=1))
        margin.append(best - scores.gather(1, block_labels[:, None])[:, 0])
    return torch.cat(position), torch.cat(predicted), torch.cat(margin)
