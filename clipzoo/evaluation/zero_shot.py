"""Zero-shot classification: each class is an ensemble of prompts; images are assigned to the most similar class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from clipzoo.distributed.world import World
from clipzoo.evaluation import scoring
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, EvaluationDataset
from clipzoo.evaluation.encoder import BatchEncoder, gathered_batches, joined
from clipzoo.evaluation.task import Column, Evaluation, Metrics, Rows, Task, View, compute, require_kind, thumbnails
from clipzoo.model import Model
from clipzoo.types import Embedding, Features, concatenate

MISTAKES = 12
RANKED = "mean_average_precision"
"""Metric of the datasets whose images are ranked for each class."""


@dataclass(frozen=True)
class ZeroShot:
    """Metrics in percent, and the predictions of the first draw.

    labels, predictions: [n]; the label of a right prediction is the predicted class, if an image has several labels.
    margins: [n], score of the predicted class minus score of the label. group_top1: [groups] in percent.
    """

    metrics: dict[str, float]
    labels: Tensor
    predictions: Tensor
    margins: Tensor
    group_top1: Tensor | None = None

    def arrays(self, dataset: ClassificationDataset) -> dict[str, np.ndarray]:
        """Return the confusion matrix [K, K] (rows: labels, columns: predictions), predictions, and the worst mistakes.

        With groups: their names and top-1, "groups" and "group_top1" [groups].
        """
        mistakes = (self.labels != self.predictions).nonzero().flatten()
        worst = mistakes[self.margins[mistakes].argsort(descending=True, stable=True)][:MISTAKES]
        classes, images = len(dataset.class_names), dataset.split_images("test")
        cells = torch.bincount(self.labels * classes + self.predictions, minlength=classes**2)
        arrays = {
            "confusion": cells.view(classes, classes).numpy(),
            "class_names": np.array(dataset.class_names),
            "images": thumbnails([images[int(index)] for index in worst]),
            "labels": self.labels[worst].numpy(),
            "predictions": self.predictions[worst].numpy(),
            "margins": self.margins[worst].float().numpy(),
            "all_labels": self.labels.numpy(),
            "all_predictions": self.predictions.numpy(),
        }
        if self.group_top1 is not None:
            arrays |= {"groups": np.array(dataset.groups), "group_top1": self.group_top1.numpy()}
        return arrays


class ZeroShotClassification(Task[ClassificationDataset]):
    """Zero-shot classification of the test images: top1, mean_per_class, and top5 for more than five classes.

    With several labels for an image any of them is right, and there is no mean_per_class. Datasets whose metric is
    mean_average_precision have only this one. calibrated: see `scoring.calibration`.
    """

    name: ClassVar[str] = "zero_shot"

    def __init__(self, calibrated: bool = False) -> None:
        self._calibrated, self._column = calibrated, f"{self.name}.calibrated" if calibrated else self.name

    def check(self, dataset: EvaluationDataset) -> None:
        dataset = require_kind(ClassificationDataset, self.name, dataset)
        test, is_ranked = dataset.splits["test"], dataset.metric == RANKED
        every = [label for labels in test.all_labels or () for label in labels]
        # WILDS's macro F1 is the mean over the classes that have samples.
        complete = is_ranked or (test.all_labels is None and dataset.metric != "macro_f1")
        parts = [test.labels] if test.all_labels is None else [every] if is_ranked else [every, test.labels]
        for labels in parts:
            scoring.check_labels(torch.tensor(labels), dataset.class_names, f"{dataset.name}, test", complete)

    def columns(self, evaluation: Evaluation, dataset: ClassificationDataset) -> Mapping[str, Column]:
        return {self._column: _classification(evaluation, dataset, self._calibrated)}

    def measure(self, evaluation: Evaluation, dataset: ClassificationDataset, columns: Rows) -> Metrics:
        (view,) = self.views(evaluation, dataset)
        rows = columns[view][self._column]
        if dataset.metric == RANKED:
            assert isinstance(rows, Tensor)
            precisions = [scoring.average_precision(scores, _members(dataset)).mean() for scores in rows.unbind(dim=1)]
            return {"": scoring.mean_over_draws([{dataset.metric: 100 * value.item()} for value in precisions])}
        result = _result(evaluation.model.pair_scale, dataset, rows)
        self.write(evaluation, dataset, lambda: result.arrays(dataset))
        return {"": result.metrics}


def zero_shot(model: Model, dataset: ClassificationDataset, encoder: BatchEncoder, resize: int, draws: int) -> ZeroShot:
    """Classify the test images without files, as the task does. resize: size of the `View`. Collective."""
    ZeroShotClassification().check(dataset)
    evaluation = Evaluation(model, encoder, draws if model.head.stochastic else 1, Path())
    column = {"": _classification(evaluation, dataset)}
    return _result(1, dataset, compute(evaluation, dataset, View("test", resize), column)[""])


def _members(dataset: ClassificationDataset) -> Tensor:
    """[n, k]: whether a class is one of the labels of a test image."""
    test = dataset.splits["test"]
    members = torch.zeros(len(test), len(dataset.class_names), dtype=torch.bool)
    for index, labels in enumerate(test.all_labels or ()):
        members[index, list(labels)] = True
    return members


def _classification(evaluation: Evaluation, dataset: ClassificationDataset, calibrated: bool = False) -> Column:
    """Column [b, draws, 3] float64: position of the label, predicted class, and the margin of its score.

    calibrated: log-confidences follow, [b, draws, 3 + T]. For a mean average precision: scores [b, draws, k].
    """
    model, draws, test = evaluation.model, evaluation.draws, dataset.splits["test"]
    classifiers = build_classifiers(model, dataset.class_names, dataset.templates, evaluation.encoder, draws)
    labels = torch.tensor(test.labels).to(model.device)
    members = None if test.all_labels is None else _members(dataset).to(model.device)

    def answer(scores: Tensor, indices: Tensor) -> Tensor:
        if dataset.metric == RANKED:
            return scores
        label, best = labels[indices], scores.amax(dim=1, keepdim=True)
        if members is not None:
            of_labels = scores.masked_fill(~members[indices], -math.inf)
            label = _first(of_labels == of_labels.amax(dim=1, keepdim=True))
        # Not the index of max, which differs among devices: the first of equal scores counts.
        position, margin = scoring.positions(scores, label), best - scores.gather(1, label[:, None])
        rows = torch.stack([part.double() for part in (position, _first(scores == best), margin[:, 0])], dim=1)
        return torch.cat([rows, scoring.log_confidences(scores, model.pair_scale).double()], 1) if calibrated else rows

    def answers(image: Embedding, classifier: Embedding, indices: Tensor) -> Tensor:
        blocks = scoring.score_blocks(model, image, classifier)
        return torch.cat([answer(scores, indices[start : start + len(scores)]) for start, scores in blocks])

    def classify(features: Features, indices: Tensor) -> Tensor:
        images = scoring.embed_draws(model, draws, model.head.embed_image, features)
        return torch.stack([answers(*pair, indices) for pair in zip(images, classifiers, strict=True)], dim=1)

    return classify


def _first(mask: Tensor) -> Tensor:
    """[b, k] -> [b]: the first column that is True."""
    return mask.int().argmax(dim=1)


def _result(pair_scale: float, dataset: ClassificationDataset, rows: Embedding) -> ZeroShot:
    """Metrics and predictions from the column of all images. pair_scale: see `Model`."""
    assert isinstance(rows, Tensor)
    test, classes, results = dataset.splits["test"], len(dataset.class_names), []
    for draw in rows.unbind(dim=1):
        position, predictions, margins = draw[:, 0], draw[:, 1].long(), draw[:, 2]
        labels, group_top1 = torch.tensor(test.labels), None
        metrics = scoring.accuracy(position, labels, classes, World())
        if test.all_labels is not None:
            labels = torch.where(position == 0, predictions, labels)
            del metrics["mean_per_class"]
        if dataset.metric == "macro_f1":
            metrics["macro_f1"] = scoring.macro_f1(predictions, labels, classes)
        if test.groups:
            groups, count = torch.tensor(test.groups), len(dataset.groups)
            compared, group_top1 = scoring.group_accuracies(position, groups, count, classes)
            metrics |= compared
        if draw.shape[1] > 3:
            metrics |= scoring.calibration(draw[:, 3:], pair_scale * margins, position == 0)
        results.append(ZeroShot(metrics, labels, predictions, margins, group_top1))
    return replace(results[0], metrics=scoring.mean_over_draws([result.metrics for result in results]))


def build_classifiers(
    model: Model, class_names: Sequence[str], templates: Sequence[str], encoder: BatchEncoder, draws: int
) -> list[Embedding]:
    """Embed the classes for each draw, one row per class. "{c}" in a template is replaced by the class name."""
    count = len(templates)

    def embed(classes: Sequence[int]) -> list[Embedding]:
        prompts = [template.replace("{c}", class_names[index]) for index in classes for template in templates]
        return [
            concatenate([model.head.ensemble(rows[row : row + count]) for row in range(0, len(prompts), count)])
            for rows in encoder.embed_captions(model, prompts, draws)
        ]

    block = max(1, encoder.batch_size // count)
    return joined(list(gathered_batches(len(class_names), block, embed, encoder.world)))
