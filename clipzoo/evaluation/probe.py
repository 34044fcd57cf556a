"""Linear probes: logistic regression on frozen features, and the search for its penalty."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clipzoo import io
from clipzoo.distributed.launch import say
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, number_of
from clipzoo.evaluation import scoring
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, EvaluationDataset, Metric
from clipzoo.evaluation.encoder import SECONDS_BETWEEN_LINES
from clipzoo.evaluation.logistic import LogisticRegression
from clipzoo.evaluation.task import PROJECTIONS, Column, Evaluation, Metrics, Rows, Solve, Task, View, require_kind

GRID = torch.logspace(-6, 6, 97, dtype=torch.float64).tolist()
"""Values of C."""
STRIDES = (16, 8, 4, 2, 1)


class FeatureTask(Task[ClassificationDataset]):
    """Task on features "before" and "after" the projection. resize: shorter side in pixels before the central crop."""

    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    reads: ClassVar[tuple[str, ...]] = splits
    """Splits that are encoded if the dataset has them."""

    def __init__(self, resize: int) -> None:
        self.resize = resize

    def check(self, dataset: EvaluationDataset) -> None:
        dataset = require_kind(ClassificationDataset, self.name, dataset)
        for split in self.splits:
            if dataset.splits[split].all_labels is not None:
                raise ConfigError(f"{dataset.name} has several labels for an image: remove it from eval.{self.name}")
            labels = torch.tensor(dataset.splits[split].labels)
            scoring.check_labels(labels, dataset.class_names, f"{dataset.name}, {split}", complete=True)

    def views(self, evaluation: Evaluation, dataset: ClassificationDataset) -> Sequence[View]:
        return [View(split, self.resize) for split in self.reads if split in dataset.splits]

    def columns(self, evaluation: Evaluation, dataset: ClassificationDataset) -> Mapping[str, Column]:
        return evaluation.feature_columns()

    def features(
        self, evaluation: Evaluation, dataset: ClassificationDataset, columns: Rows, name: str
    ) -> dict[str, LabelledFeatures]:
        """Rows of a column and labels by split, on the model's device."""
        parts, device = {}, evaluation.model.device
        for view in self.views(evaluation, dataset):
            features, labels = columns[view][name], torch.tensor(dataset.splits[view.split].labels)
            assert isinstance(features, Tensor)
            parts[view.split] = LabelledFeatures(features.to(device), labels.to(device))
        return parts


class LinearProbe(FeatureTask):
    """Linear probes on features "before" and "after" the projection.

    resize: see `FeatureTask`. validation_share: share of train held out if a dataset has no validation split. seed:
    seeds the draw of held-out samples.
    """

    name: ClassVar[str] = "linear_probe"
    reads = ("train", "val", "test")

    def __init__(self, resize: int, validation_share: float, seed: int) -> None:
        super().__init__(resize)
        self._validation_share, self._seed = validation_share, seed

    def solves(self, evaluation: Evaluation, dataset: ClassificationDataset, columns: Rows) -> Mapping[str, Solve]:
        # Values of C are not shared among ranks: each starts from the solutions of earlier ones.
        def solve(projection: str) -> dict[str, Any]:
            parts = self.features(evaluation, dataset, columns, projection)
            name = f"{dataset.name}, {projection} projection"
            return probe(parts, dataset.class_names, dataset.metric, self._validation_share, self._seed, name)

        cost = float(len(dataset.splits["train"]) * len(dataset.class_names))
        return {projection: Solve(cost, partial(solve, projection)) for projection in PROJECTIONS}

    def measure(self, evaluation: Evaluation, dataset: ClassificationDataset, columns: Rows) -> Metrics:
        """Write the search for C to linear_probe/<dataset>.search.json, predictions to linear_probe/<dataset>.npz."""
        solved = evaluation.solved
        for projection, result in solved.items():
            if not result["converged"]:
                say(
                    f"evaluation: probe of {dataset.name}, {projection} projection: the final fit at "
                    f"C={result['C']:.3g} did not converge in {number_of(result['iterations'], 'iteration')}; its "
                    "accuracy is approximate"
                )
        keys, path = ("metrics", "C", "converged", "search"), f"{self.name}/{dataset.name}.search.json"
        content = {projection: {key: result[key] for key in keys} for projection, result in solved.items()}
        evaluation.encoder.world.run_on_first(lambda: io.write_json(io.below(evaluation.output, path), content))
        answers = {"labels": dataset.splits["test"].labels}
        answers |= {projection: result["predictions"] for projection, result in solved.items()}
        self.write(evaluation, dataset, lambda: {f"all_{name}": np.array(answers[name], np.int64) for name in answers})
        return {projection: result["metrics"] for projection, result in solved.items()}


class LabelledFeatures(NamedTuple):
    """features [n, d] and labels [n]."""

    features: Tensor
    labels: Tensor

    def rows(self, chosen: Tensor) -> LabelledFeatures:
        return LabelledFeatures(self.features[chosen], self.labels[chosen])


def probe(
    splits: Mapping[str, LabelledFeatures],
    class_names: Sequence[str],
    metric: Metric,
    validation_share: float,
    seed: int,
    name: str,
) -> dict[str, Any]:
    """Choose C on validation, fit on train and validation, measure on test.

    Returns the test metrics in percent, the predictions of the test samples, C, the search (validation metric by C),
    and whether the final fit has converged, with its number of iterations.

    splits: train, test, optionally val. metric: maximised by the choice of C; the smallest C wins a tie.
    validation_share, seed: see `LinearProbe`. name: of the dataset and features, for messages.
    """
    for split, part in splits.items():
        scoring.check_labels(part.labels, class_names, f"{name}, {split}", complete=split != "val")
        invalid = int((~torch.isfinite(part.features)).any(dim=1).sum())
        if invalid:
            raise ConfigError(
                f"{name}, {split}: {invalid} of {number_of(len(part.features), 'image')} have features that are NaN or "
                "infinite"
            )
    train, validation, test = splits["train"], splits.get("val"), splits["test"]
    if validation is None:
        is_held_out = held_out(train.labels, validation_share, seed)
        train, validation = train.rows(~is_held_out), train.rows(is_held_out)
    classes = len(class_names)
    with scoring.exact_products():
        model = LogisticRegression(train.features, train.labels, classes)
        scores = search(model, validation, classes, metric, name)
        best = min(scores, key=lambda c: (-scores[c], c))
        both_splits = LabelledFeatures(*map(torch.cat, zip(train, validation, strict=True)))
        solution = LogisticRegression(both_splits.features, both_splits.labels, classes).solve(best)
        logits = solution.logits(test.features)
    return {
        "metrics": accuracies(logits, test.labels),
        "predictions": logits.argmax(dim=1).tolist(),
        "C": best,
        "search": scores,
        "converged": solution.converged,
        "iterations": solution.iterations,
    }


def held_out(labels: Tensor, share: float, seed: int) -> Tensor:
    """Draw a mask [n] of int(share n) samples, equally many of every class (largest remainders), from labels [n]."""
    sizes = torch.bincount(labels.cpu())
    shares = sizes.double() * share
    quotas = shares.long()
    remaining = int(len(labels) * share) - int(quotas.sum())
    # A class of one sample stays in train.
    remainders = torch.where(sizes > 1, shares - quotas, -1.0)
    quotas[remainders.argsort(descending=True, stable=True)[:remaining]] += 1
    return (ranks_in_classes(labels.cpu(), seed) < quotas[labels.cpu()]).to(labels.device)


def ranks_in_classes(labels: Tensor, seed: int) -> Tensor:
    """Labels [n] -> [n]: place of each sample among those of its class, in a random order."""
    order = torch.randperm(len(labels), generator=torch.Generator("cpu").manual_seed(seed))
    by_class = order[labels[order].argsort(stable=True)]
    sizes = torch.bincount(labels)
    ranks = torch.empty_like(labels)
    ranks[by_class] = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels[by_class]]
    return ranks


def search(
    model: LogisticRegression, validation: LabelledFeatures, classes: int, metric: Metric, name: str
) -> dict[float, float]:
    """Try seven values of C around the best so far in strides of 16, 8, 4, 2, 1 -> metric by C.

    Near an end of the grid the seven values are shifted inside, as in WPSE's released code.
    """
    scores: dict[int, float] = {}
    center, printed = len(GRID) // 2, time.perf_counter()
    for stride in STRIDES:
        middle = min(max(center, 3 * stride), len(GRID) - 1 - 3 * stride)
        for index in range(middle - 3 * stride, middle + 3 * stride + 1, stride):
            if index in scores:
                continue
            logits = model.solve(GRID[index]).logits(validation.features)
            # Top-1 is a mean of 0 and 1, rounded as in recorded searches; others are quotients of counts.
            if metric == "top1":
                right = scoring.positions(logits, validation.labels) == 0
                scores[index] = 100 * right.double().mean().item()
            else:
                scores[index] = accuracies(logits, validation.labels)[metric]
        center = min(scores, key=lambda index: (-scores[index], index))
        if time.perf_counter() - printed > SECONDS_BETWEEN_LINES:
            printed = time.perf_counter()
            best = f"C {GRID[center]:.3g} gives {scores[center]:.2f} on validation"
            say(f"evaluation: probe of {name}, stride {stride}: {best}")
    return {GRID[index]: scores[index] for index in sorted(scores)}


def accuracies(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracies in percent from logits [n, k] and labels [n], on this rank only."""
    return scoring.accuracy(scoring.positions(logits, labels), labels, logits.shape[1], World())
