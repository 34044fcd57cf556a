"""Search for the penalty C of a linear probe, and its final fit."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipzoo.distributed.environment import say
from clipzoo.distributed.world import World
from clipzoo.evaluation.checks import check_classes, check_finite, check_labels
from clipzoo.evaluation.datasets.dataset import Metric
from clipzoo.evaluation.encoder import SECONDS_BETWEEN_LINES
from clipzoo.evaluation.probe.features import LabelledFeatures
from clipzoo.evaluation.probe.logistic import LogisticRegression
from clipzoo.evaluation.ranking import exact_products, positions

GRID = torch.logspace(-6, 6, 97, dtype=torch.float64).tolist()
"""Values of C."""
STRIDES = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Probe:
    """Result of a linear probe.

    metrics: on test, in percent. labels, predictions: [n], of the test samples. c: chosen C. search: validation metric
    by C. converged, iterations: of the final fit.
    """

    metrics: dict[str, float]
    labels: Tensor
    predictions: Tensor
    c: float
    search: dict[float, float]
    converged: bool
    iterations: int


def probe(
    splits: Mapping[str, LabelledFeatures],
    class_names: Sequence[str],
    metric: Metric,
    validation_share: float,
    seed: int,
    name: str,
) -> Probe:
    """Choose C on validation, fit on train and validation, measure on test.

    splits: train, test, optionally val. metric: maximised by the choice of C; the smallest C wins a tie.
    validation_share: share of train held out where there is no val, the same of each class. seed: of the samples held
    out. name: of the dataset and features, for messages.
    """
    for split, part in splits.items():
        check_labels(part.labels, class_names, f"{name}, {split}")
        check_finite(part.features, f"{name}, {split}")
        if split != "val":
            check_classes(part.labels, class_names, f"{name}, {split}")
    train, validation, test = splits["train"], splits.get("val"), splits["test"]
    if validation is None:
        held = held_out(train.labels, validation_share, seed)
        train, validation = train.rows(~held), train.rows(held)
    classes = len(class_names)
    with exact_products():
        model = LogisticRegression(train.features, train.labels, classes)
        scores = search(model, validation, classes, metric, name)
        best = min(scores, key=lambda c: (-scores[c], c))
        whole = train.join(validation)
        solution = LogisticRegression(whole.features, whole.labels, classes).solve(best)
        logits = solution.logits(test.features)
    labels, predictions = test.labels.cpu(), logits.argmax(dim=1).cpu()
    metrics = accuracies(logits, test.labels)
    return Probe(metrics, labels, predictions, best, scores, solution.converged, solution.iterations)


def held_out(labels: Tensor, share: float, seed: int) -> Tensor:
    """Draw a mask [n] of int(share n) samples, equally many of every class (largest remainders), from labels [n]."""
    generator = torch.Generator("cpu").manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    sizes = torch.bincount(labels.cpu())
    shares = sizes.double() * share
    quotas = shares.long()
    rest = int(len(labels) * share) - int(quotas.sum())
    # A class of one sample stays in train.
    remainders = torch.where(sizes > 1, shares - quotas, -1.0)
    quotas[remainders.argsort(descending=True, stable=True)[:rest]] += 1
    shuffled = labels.cpu()[order]
    by_class = shuffled.argsort(stable=True)
    starts = sizes.cumsum(0) - sizes
    turn = torch.arange(len(labels)) - starts[shuffled[by_class]]
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[order[by_class[turn < quotas[shuffled[by_class]]]]] = True
    return held.to(labels.device)


def search(
    model: LogisticRegression, validation: LabelledFeatures, classes: int, metric: Metric, name: str
) -> dict[float, float]:
    """Try seven values of C around the best so far in strides of 16, 8, 4, 2, 1 -> metric by C.

    Near an end of the grid the seven values are moved into it, as in WPSE's released code.
    """
    scores: dict[int, float] = {}
    center, printed = len(GRID) // 2, time.perf_counter()
    for stride in STRIDES:
        middle = min(max(center, 3 * stride), len(GRID) - 1 - 3 * stride)
        for index in range(middle - 3 * stride, middle + 3 * stride + 1, stride):
            if index in scores:
                continue
            logits = model.solve(GRID[index]).logits(validation.features)
            scores[index] = _validation_score(logits, validation.labels, metric)
        center = min(scores, key=lambda index: (-scores[index], index))
        if time.perf_counter() - printed > SECONDS_BETWEEN_LINES:
            printed = time.perf_counter()
            best = f"C {GRID[center]:.3g} gives {scores[center]:.2f} on validation"
            say(f"evaluation: probe of {name}, stride {stride}: {best}")
    return {GRID[index]: scores[index] for index in sorted(scores)}


def accuracies(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracies in percent from logits [n, k] and labels [n], on this rank alone."""
    from clipzoo.evaluation.metrics import Accuracy

    accuracy = Accuracy(logits.shape[1], World()).to(labels.device)
    accuracy.update(positions(logits, labels), labels)
    return accuracy.compute()


def _validation_score(logits: Tensor, labels: Tensor, metric: str) -> float:
    """Accuracy in percent. Top-1 is rounded as in the searches that earlier versions recorded."""
    if metric == "top1":
        return 100 * (positions(logits, labels) == 0).double().mean().item()
    return accuracies(logits, labels)[metric]
