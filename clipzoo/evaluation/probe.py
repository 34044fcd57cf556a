"""Classification of frozen features: linear probes, few-shot probes, and nearest neighbours."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn import functional

from clipzoo import io
from clipzoo.distributed.launch import say
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, number_of
from clipzoo.evaluation import scoring
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, EvaluationDataset, Metric
from clipzoo.evaluation.encoder import SECONDS_BETWEEN_LINES
from clipzoo.evaluation.logistic import SEARCH_TOLERANCE, LogisticRegression, Solution
from clipzoo.evaluation.task import PROJECTIONS, Column, Evaluation, Metrics, Rows, Solve, Task, View, require_kind
from clipzoo.evaluation.zero_shot import build_classifiers
from clipzoo.runs.record import DEVIATION
from clipzoo.types import Embedding

GRID = torch.logspace(-6, 6, 97, dtype=torch.float64).tolist()
"""Values of C."""
STRIDES = (16, 8, 4, 2, 1)
QUERIES, TRAIN_ROWS = 1024, 16384
"""Test and train images whose cosines are in memory at a time: 128 MiB."""
VALIDATION_SHOTS = 4
"""Largest number of validation images of a class, on which C is chosen; at most as many as shots (as in CoOp)."""
PENALTIES = GRID[::8]
"""Values of C of few-shot probes: the powers of 10 from 1e-6 to 1e6."""
ITERATIONS, MOMENTUM, BLEND_EVERY, BLEND = 300, 0.9, 10, 250.0
"""LP++'s released code: iterations, momentum of w, iterations between steps of alpha, factor of the initial alpha."""


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
                place = f"probe of {dataset.name}, {projection} projection: the final fit at C={result['C']:.3g}"
                iterations = number_of(result["iterations"], "iteration")
                say(f"evaluation: {place} did not converge in {iterations}; its accuracy is approximate")
        keys, path = ("metrics", "C", "converged", "search"), f"{self.name}/{dataset.name}.search.json"
        content = {projection: {key: result[key] for key in keys} for projection, result in solved.items()}
        evaluation.encoder.world.run_on_first(lambda: io.write_json(io.below(evaluation.output, path), content))
        answers = {"labels": dataset.splits["test"].labels}
        answers |= {projection: result["predictions"] for projection, result in solved.items()}
        self.write(evaluation, dataset, lambda: {f"all_{name}": np.array(answers[name], np.int64) for name in answers})
        return {projection: result["metrics"] for projection, result in solved.items()}


class Neighbours(FeatureTask):
    """Top-1 and mean per class of a majority vote of the `count` nearest train images, or of all if there are fewer."""

    name: ClassVar[str] = "knn"

    def __init__(self, resize: int, count: int) -> None:
        super().__init__(resize)
        self._count = count

    def solves(self, evaluation: Evaluation, dataset: ClassificationDataset, columns: Rows) -> Mapping[str, Solve]:
        def solve(projection: str) -> dict[str, float]:
            train, test = self.features(evaluation, dataset, columns, projection).values()
            position = positions_by_vote(train, test, self._count, classes)
            metrics = scoring.accuracy(position, test.labels, classes, World())
            return {name: metrics[name] for name in ("top1", "mean_per_class")}  # classes without a vote have no order

        classes, cost = len(dataset.class_names), 1e-3 * len(dataset.splits["train"]) * len(dataset.splits["test"])
        return {projection: Solve(cost, partial(solve, projection)) for projection in PROJECTIONS}

    def measure(self, evaluation: Evaluation, dataset: ClassificationDataset, columns: Rows) -> Metrics:
        return evaluation.solved


class FewShot(FeatureTask):
    """Top-1 of probes on k images of each class: mean, deviation and 95 % interval over draws.

    Protocols: "before" and "after" (projection) are logistic regression. "lp_plus_plus" is LP++; heads with points have
    no vector f in f . w and are not measured with it. shots: numbers k. seeds: number of draws; each draw holds the
    images of smaller k.
    """

    name: ClassVar[str] = "few_shot"

    def __init__(self, resize: int, shots: Sequence[int], seeds: int) -> None:
        super().__init__(resize)
        self._shots, self._seeds = tuple(shots), seeds

    def check(self, dataset: EvaluationDataset) -> None:
        super().check(dataset)
        labels, shots = require_kind(ClassificationDataset, self.name, dataset).splits["train"].labels, max(self._shots)
        if (largest := int(torch.bincount(torch.tensor(labels)).max())) <= shots:
            fault = f"at most {largest} train images of a class, none to choose C for {shots} shots"
            raise ConfigError(f"{dataset.name} has {fault}: lower eval.shots")

    def columns(self, evaluation: Evaluation, dataset: ClassificationDataset) -> Mapping[str, Column]:
        embedding = {} if _has_points(evaluation) else {"image.0": evaluation.image_columns()["image.0"]}
        return evaluation.feature_columns() | embedding

    def solves(self, evaluation: Evaluation, dataset: ClassificationDataset, columns: Rows) -> Mapping[str, Solve]:
        model, classes = evaluation.model, len(dataset.class_names)
        classifier: Embedding | None = None
        if not _has_points(evaluation):
            classifier = build_classifiers(model, dataset.class_names, dataset.templates, evaluation.encoder, 1)[0]

        def scores(images: LabelledFeatures) -> Tensor:
            assert classifier is not None
            return torch.cat([block for _, block in scoring.score_blocks(model, images.features, classifier)])

        def solve(shots: int, seed: int) -> dict[str, float]:
            ranks, top1 = ranks_in_classes(torch.tensor(dataset.splits["train"].labels), seed), {}
            is_drawn, is_validation = ranks < shots, (ranks >= shots) & (ranks < shots + min(shots, VALIDATION_SHOTS))
            for projection in PROJECTIONS:
                images, test = self.features(evaluation, dataset, columns, projection).values()
                logits = fit(images.rows(is_drawn), images.rows(is_validation), classes).logits(test.features)
                top1[projection] = accuracies(logits, test.labels)["top1"]
            if classifier is not None:
                train, log_scale = images.rows(is_drawn), model.head.log_cosine_scale()
                embedded, test_embedded = self.features(evaluation, dataset, columns, "image.0").values()
                weight, blend = lp_plus_plus(train.features, scores(embedded.rows(is_drawn)), train.labels, log_scale)
                logits = functional.normalize(test.features.double(), dim=1) @ weight.mT + blend * scores(test_embedded)
                top1["lp_plus_plus"] = accuracies(logits, test.labels)["top1"]
            return top1

        return {
            f"{shots}_{seed}": Solve(float(shots * classes**2), partial(solve, shots, seed))
            for shots, seed in product(self._shots, range(self._seeds))
        }

    def measure(self, evaluation: Evaluation, dataset: ClassificationDataset, columns: Rows) -> Metrics:
        solved = evaluation.solved
        metrics: dict[str, dict[str, float]] = {protocol: {} for protocol in solved[f"{self._shots[0]}_0"]}
        for protocol, shots in product(metrics, self._shots):
            draws = [solved[f"{shots}_{seed}"][protocol] for seed in range(self._seeds)]
            metrics[protocol] |= over_seeds(f"top1_{shots}_shot", draws)
        return metrics


def _has_points(evaluation: Evaluation) -> bool:
    return not isinstance(evaluation.encoder.embed_captions(evaluation.model, [""], 1)[0], Tensor)


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
            images = number_of(len(part.features), "image")
            raise ConfigError(f"{name}, {split}: {invalid} of {images} have features that are NaN or infinite")
    fitted, test, classes = splits["train"], splits["test"], len(class_names)
    if "val" in splits:
        fitted = LabelledFeatures(*map(torch.cat, zip(fitted, splits["val"], strict=True)))
        is_validation = torch.arange(len(fitted.labels), device=fitted.labels.device) >= len(splits["train"].labels)
    else:
        is_validation = held_out(fitted.labels, validation_share, seed)
    with scoring.exact_products():
        regression = LogisticRegression(*fitted, classes)
        scores = search(regression.rows(~is_validation), fitted.rows(is_validation), classes, metric, name)
        best = min(scores, key=lambda c: (-scores[c], c))
        solution = regression.solve(best)
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
            logits = model.solve(GRID[index], tolerance=SEARCH_TOLERANCE).logits(validation.features)
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


def positions_by_vote(train: LabelledFeatures, test: LabelledFeatures, count: int, classes: int) -> Tensor:
    """Positions [n] of the test labels among the classes by votes; ties as in scikit-learn: the first class wins."""
    parts = []
    for queries, labels in zip(test.features.split(QUERIES), test.labels.split(QUERIES), strict=True):
        nearest = nearest_labels(train, queries, count)
        votes = nearest.new_zeros(len(nearest), classes).scatter_add(1, nearest, torch.ones_like(nearest))
        parts.append(scoring.positions(votes, labels))
    return torch.cat(parts)


def nearest_labels(train: LabelledFeatures, queries: Tensor, count: int) -> Tensor:
    """Queries [m, d] -> [m, k]: labels of the `count` train images with the highest cosines, in float64.

    Equal cosines: the earlier train image is nearer. Train features are read in blocks.
    """
    queries = functional.normalize(queries.double(), dim=1)
    best, nearest = queries.new_empty(len(queries), 0), train.labels.new_empty(len(queries), 0)
    for rows, labels in zip(train.features.split(TRAIN_ROWS), train.labels.split(TRAIN_ROWS), strict=True):
        cosines = torch.cat([best, queries @ functional.normalize(rows.double(), dim=1).mT], dim=1)
        candidates = torch.cat([nearest, labels.expand(len(queries), -1)], dim=1)
        kept = min(count, cosines.shape[1])
        # Not the indices of topk, which are undefined for equal values.
        lowest = cosines.topk(kept, dim=1).values[:, -1:]
        above, level = cosines > lowest, cosines == lowest
        chosen = above | (level & (level.cumsum(dim=1) <= kept - above.sum(dim=1, keepdim=True)))
        best, nearest = cosines[chosen].view(-1, kept), candidates[chosen].view(-1, kept)
    return nearest


def over_seeds(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean of a metric, its sample deviation, and NAME_interval, half the length of Student's 95 % interval."""
    summary = scoring.mean_over_draws([{name: value} for value in values])
    if len(values) > 1:
        quantile = float(scipy.stats.t.ppf(0.975, len(values) - 1))
        summary[f"{name}_interval"] = quantile * summary[f"{name}{DEVIATION}"] / math.sqrt(len(values))
    return summary


def fit(train: LabelledFeatures, validation: LabelledFeatures, classes: int) -> Solution:
    """Return the logistic regression whose C has the highest top-1 on validation; the smallest C wins a tie."""
    with scoring.exact_products():
        regression = LogisticRegression(train.features, train.labels, classes)
        solutions = [regression.solve(c) for c in PENALTIES]
    return max(solutions, key=lambda one: accuracies(one.logits(validation.features), validation.labels)["top1"])


def lp_plus_plus(features: Tensor, scores: Tensor, labels: Tensor, log_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Fit LP++ (Huang et al., CVPR 2024) to features [n, d], zero-shot scores s [n, k] and labels [n].

    Returns w [k, d] and alpha [k]; logits are f . w_k + alpha_k s_k for unit features f. The paper's s_k is f . t_k.
    Step sizes are inverse bounds of the curvature, 4 n / lambda_max(F^T F) and n / (4 max_k sum_i s_ik^2) (eq. 11). w_k
    starts as the sum of the features of class k, alpha as 250 times the mean cosine of an image and its class.
    Departures from the released code: no bias, as in the paper; alpha follows its current gradient, not the sum of
    earlier ones; the last iterate is returned, not the best on validation. log_scale: log t for scores t * cosine. If
    it is None or the mean cosine is negative, alpha starts at 1, that of the zero-shot classifier.
    """
    features, scores = functional.normalize(features.double(), dim=1), scores.double()
    count, is_class = len(labels), functional.one_hot(labels, scores.shape[1]).double()
    weight, velocity = is_class.mT @ features, features.new_zeros(scores.shape[1], features.shape[1])
    score = ((is_class * scores).sum(0) / is_class.sum(0)).mean().item()
    start = 1.0 if log_scale is None or score <= 0 else BLEND * score * math.exp(-2 * log_scale.item())
    blend = scores.new_full((scores.shape[1],), start)
    weight_step = 4 * count / torch.linalg.matrix_norm(features, 2).square()
    blend_step = count / (4 * scores.square().sum(0).max())
    for iteration in range(1, ITERATIONS + 1):
        residual = ((features @ weight.mT + blend * scores).softmax(dim=1) - is_class) / count
        velocity = MOMENTUM * velocity + residual.mT @ features
        weight = weight - weight_step * velocity
        if iteration % BLEND_EVERY == 0:
            blend = blend - blend_step * (residual * scores).sum(0)
    return weight, blend
