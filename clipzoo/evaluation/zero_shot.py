"""Zero-shot classification: each class is an ensemble of prompts; images are assigned to the most similar class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from clipzoo import io
from clipzoo.evaluation import outputs, scoring
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, EvaluationDataset
from clipzoo.evaluation.encoder import BatchEncoder, gathered_batches, joined
from clipzoo.evaluation.task import Column, Evaluation, Metrics, Rows, Task, View, compute, require_classes
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


class ZeroShotClassification(Task[ClassificationDataset]):
    """Zero-shot classification of the test images: top1, mean_per_class, and top5 for more than five classes."""

    name: ClassVar[str] = "zero_shot"

    @property
    def settings(self) -> tuple[object, ...]:
        return ()

    def check(self, dataset: EvaluationDataset) -> None:
        dataset = require_classes(self.name, dataset)
        labels = torch.tensor(dataset.splits["test"].labels)
        scoring.check_labels(labels, dataset.class_names, f"{dataset.name}, test", complete=True)

    def columns(self, evaluation: Evaluation, dataset: ClassificationDataset) -> Mapping[View, Mapping[str, Column]]:
        return {View("test", evaluation.encoder.image_size): {self.name: _classification(evaluation, dataset)}}

    def measure(
        self,
        evaluation: Evaluation,
        dataset: ClassificationDataset,
        columns: Rows,
    ) -> Metrics:
        result = _result(evaluation, dataset, columns[View("test", evaluation.encoder.image_size)][self.name])
        path = io.below(evaluation.output, f"{self.name}/{dataset.name}.npz")
        evaluation.encoder.world.run_on_first(lambda: outputs.write_zero_shot(path, dataset, result))
        return {"": result.metrics}


def zero_shot(model: Model, dataset: ClassificationDataset, encoder: BatchEncoder, resize: int, draws: int) -> ZeroShot:
    """Classify the test images without files, as the task does. Collective.

    resize: shorter side in pixels before the central crop. draws: number of draws, for heads with random features.
    """
    ZeroShotClassification().check(dataset)
    evaluation, view = Evaluation(model, encoder, draws if model.head.stochastic else 1, Path()), View("test", resize)
    column = {ZeroShotClassification.name: _classification(evaluation, dataset)}
    return _result(evaluation, dataset, compute(evaluation, dataset, {view: column})[view][ZeroShotClassification.name])


def _classification(evaluation: Evaluation, dataset: ClassificationDataset) -> Column:
    """Column [b, draws, 3] float64: position of the label, predicted class, and the margin of its score."""
    model, draws = evaluation.model, evaluation.draws
    classifiers = build_classifiers(model, dataset.class_names, dataset.templates, evaluation.encoder, draws)
    labels = torch.tensor(dataset.splits["test"].labels, device=model.device)

    def classify(features: Features, indices: Tensor) -> Tensor:
        images = scoring.embed_draws(model, draws, model.head.embed_image, features)
        rows = [_classify(model, *pair, labels[indices]) for pair in zip(images, classifiers, strict=True)]
        return torch.stack(rows, dim=1)

    return classify


def _result(evaluation: Evaluation, dataset: ClassificationDataset, rows: Embedding) -> ZeroShot:
    """Metrics and predictions from the column of all images."""
    assert isinstance(rows, Tensor)
    position, predictions, margins = rows.unbind(dim=2)  # [n, draws] ...
    labels, world = torch.tensor(dataset.splits["test"].labels), evaluation.encoder.world
    device = evaluation.model.device
    local = slice(world.rank, None, world.size)
    metrics = [
        scoring.accuracy(positions.to(device), labels[local].to(device), len(dataset.class_names), world)
        for positions in position[local].unbind(dim=1)
    ]
    return ZeroShot(scoring.mean_over_draws(metrics), labels, predictions[:, 0].long(), margins[:, 0])


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


def _classify(model: Model, image: Embedding, classifier: Embedding, labels: Tensor) -> Tensor:
    """Return [b, 3]: positions of the labels, predicted classes, and the predictions' scores above the labels'."""
    rows = []
    for start, scores in scoring.score_blocks(model, image, classifier):
        block_labels = labels[start : start + len(scores)]
        best = scores.max(dim=1).values
        # Not the index of max, which differs among devices: the first of equal scores counts.
        predicted = (scores == best[:, None]).int().argmax(dim=1)
        margin = best - scores.gather(1, block_labels[:, None])[:, 0]
        rows.append(
            torch.stack([scoring.positions(scores, block_labels).double(), predicted.double(), margin.double()], 1)
        )
    return torch.cat(rows)
