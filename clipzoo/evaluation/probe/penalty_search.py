"""The linear probe's search for C, and its final fit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from clipzoo.evaluation.checks import check_classes, check_finite, check_labels
from clipzoo.evaluation.classification import accuracies
from clipzoo.evaluation.encoding import SECONDS_BETWEEN_LINES
from clipzoo.evaluation.probe.logistic import LogisticRegression
from clipzoo.evaluation.ranking import exact_products, places
from clipzoo.runs.directory import say

GRID = torch.logspace(-6, 6, 97, dtype=torch.float64).tolist()
"""The values of C."""
STRIDES = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Split:
    """features [n, d] and labels [n]."""

    features: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Split:
        return Split(self.features.to(device), self.labels.to(device))

    def rows(self, chosen: Tensor) -> Split:
        return Split(self.features[chosen], self.labels[chosen])

    def join(self, other: Split) -> Split:
        return Split(torch.cat([self.features, other.features]), torch.cat([self.labels, other.labels]))


@dataclass(frozen=True)
class ProbeResult:
    """metrics on test in percent; c: chosen; search: validation metric of every C tried; predictions [test]."""

    metrics: dict[str, float]
    c: float
    search: dict[float, float]
    predictions: Tensor
    converged: bool


def probe(
    splits: Mapping[str, Split], class_names: list[str], metric: str, share: float, seed: int, name: str
) -> ProbeResult:
    """Choose C on validation, fit on train and validation, judge on test.

    splits: train, test and perhaps val; without it this share of train is held out, the same of each class.
    metric: "top1" or "mean_per_class", what the choice maximises; the smallest C wins a tie.
    """
    for split, part in splits.items():
        check_labels(part.labels, class_names, name, split)
        check_finite(part.features, f"{name}, {split}")
        if split != "val":
            check_classes(part.labels, class_names, f"{name}, {split}")
    train, validation = splits["train"], splits.get("val")
    if validation is None:
        held = held_out(train.labels, share, seed)
        train, validation = train.rows(~held), train.rows(held)
    with exact_products():
        model = LogisticRegression(train.features, train.labels, len(class_names))
        found = search(model, validation, len(class_names), metric, name)
        best = min(found, key=lambda c: (-found[c], c))
        whole = train.join(validation)
        model = LogisticRegression(whole.features, whole.labels, len(class_names))
        solution = model.solve(best)
        logits = solution.logits(splits["test"].features)
    labels = splits["test"].labels
    metrics = accuracies(labels, places(logits, labels), class_names, f"{name}, test")
    return ProbeResult(metrics, best, found, logits.argmax(dim=1), solution.converged)


def held_out(labels: Tensor, share: float, seed: int) -> Tensor:
    """[n] -> [n] bool: int(share n) samples, as many of every class (largest remainders), drawn from `seed`."""
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


def search(model: LogisticRegression, validation: Split, classes: int, metric: str, name: str) -> dict[float, float]:
    """Strides of 16, 8, 4, 2, 1 over the grid, seven points each, centred on the best so far -> score by C."""
    scores: dict[int, float] = {}
    center, said = len(GRID) // 2, time.perf_counter()
    for stride in STRIDES:
        for index in sorted({min(max(center + stride * turn, 0), len(GRID) - 1) for turn in range(-3, 4)}):
            if index in scores:
                continue
            logits = model.solve(GRID[index]).logits(validation.features)
            scores[index] = _metric(logits, validation.labels, metric)
        center = min(scores, key=lambda index: (-scores[index], index))
        if time.perf_counter() - said > SECONDS_BETWEEN_LINES:
            said = time.perf_counter()
            best = f"C {GRID[center]:.3g} gives {scores[center]:.2f} on validation"
            say(f"evaluation: probe of {name}, stride {stride}: {best}")
    return {GRID[index]: scores[index] for index in sorted(scores)}


def _metric(logits: Tensor, labels: Tensor, metric: str) -> float:
    """Of validation, where a class may have no sample: it does not count."""
    right = (places(logits, labels) == 0).double()
    if metric == "top1":
        return 100 * right.mean().item()
    sizes = torch.bincount(labels, minlength=logits.shape[1])
    per_class = torch.zeros(logits.shape[1], dtype=torch.float64, device=logits.device).index_add(0, labels, right)
    return 100 * (per_class[sizes > 0] / sizes[sizes > 0]).mean().item()
