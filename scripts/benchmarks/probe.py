"""The linear probe's search for C compared with scikit-learn's solver: objective, accuracy and time, C by C.

    python scripts/benchmark.py probe --samples 50000 --width 512 --classes 100 --every 3 --budget 400

Our search runs whole. On every --every-th value that it tries, in its order, scikit-learn's L-BFGS takes a turn, on the
same features and with as many threads. It gets float64, the tolerance with which it comes within a millionth of the
optimum (with its default it stops earlier), and at most --iterations; after --budget seconds of its time it solves no
more. The ratio is that of the times on the values that both solved. Ours are those of the search, warm starts and the
preparation of the features included, the latter in full.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression as Peer
from torch import Tensor

from benchmarks import log, publish
from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.vocabulary import Count, Positive
from clipzoo.evaluation.logistic import LogisticRegression, Solution
from clipzoo.evaluation.probe import LabelledFeatures, search

SHARED = {"threads": 2}


def add_options(parser: Parser) -> None:
    parser.add_argument("--samples", type=number_in(Count), default=50_000)
    parser.add_argument("--width", type=number_in(Count), default=512)
    parser.add_argument("--classes", type=number_in(Count), default=100)
    parser.add_argument("--noise", type=number_in(Positive), default=2.5, help="for a spread of 1 between classes")
    parser.add_argument("--tolerance", type=number_in(Positive), default=1e-7, help="scikit-learn's tol")
    parser.add_argument("--iterations", type=number_in(Count), default=1000, help="scikit-learn's max_iter")
    parser.add_argument("--every", type=number_in(Count), default=3, help="scikit-learn solves every so many-th value")
    parser.add_argument("--budget", type=number_in(Positive), default=400.0, help="seconds for scikit-learn")
    parser.set_defaults(device=torch.device("cpu"))


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    train, validation = features(options, seed=1), features(options, seed=2, samples=options.samples // 10)
    result = race(options, train, validation)
    publish(options, result, json.dumps({key: value for key, value in result.items() if key != "values"}, indent=1))


def features(options: argparse.Namespace, seed: int, samples: int | None = None) -> LabelledFeatures:
    """Overlapping classes in a space whose variances fall off as those of encoders do, unit length, float32."""
    count, device = samples or options.samples, options.device
    shared_random, split_random = (torch.Generator(device).manual_seed(number) for number in (0, seed))
    scales = torch.arange(1, options.width + 1, device=device).pow(-0.75)
    centers = torch.randn(options.classes, options.width, generator=shared_random, device=device)
    turn = torch.linalg.qr(torch.randn(options.width, options.width, generator=shared_random, device=device)).Q
    labels = torch.randint(0, options.classes, (count,), generator=split_random, device=device)
    spread = options.noise * torch.randn(count, options.width, generator=split_random, device=device)
    points = ((centers[labels] + spread) * scales) @ turn + 0.1
    return LabelledFeatures(torch.nn.functional.normalize(points, dim=1), labels)


def race(options: argparse.Namespace, train: LabelledFeatures, validation: LabelledFeatures) -> dict[str, Any]:
    values: list[dict[str, Any]] = []
    wide = train.features.double().numpy()
    begin = time.perf_counter()
    model = LogisticRegression(train.features, train.labels, options.classes)
    prepared = time.perf_counter() - begin
    solve = LogisticRegression.solve

    def by_peer(c: float) -> dict[str, float]:
        begin = time.perf_counter()
        peer = Peer(C=c, tol=options.tolerance, max_iter=options.iterations)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer.fit(wide, train.labels.numpy())
        taken = time.perf_counter() - begin
        weight, bias = torch.from_numpy(peer.coef_.T), torch.from_numpy(peer.intercept_)
        answers = judged(weight, bias, train, validation, c)
        return {"seconds": taken, "iterations": int(np.max(peer.n_iter_)), **answers}

    def in_turn(self: LogisticRegression, c: float) -> Solution:
        begin = time.perf_counter()
        solution = solve(self, c)
        taken = time.perf_counter() - begin
        answers = judged(solution.weight, solution.bias, train, validation, c)
        line: dict[str, Any] = {"C": c, "clipzoo": {"seconds": taken, "iterations": solution.iterations, **answers}}
        if len(values) % options.every == 0 and spent("scikit-learn") < options.budget:
            line["scikit-learn"] = by_peer(c)
            line["objective_less_theirs"] = answers["objective"] / line["scikit-learn"]["objective"] - 1
        values.append(line)
        log(json.dumps(line))
        return solution

    def spent(name: str) -> float:
        """Seconds on the values that both solved."""
        return sum(line[name]["seconds"] for line in values if "scikit-learn" in line)

    LogisticRegression.solve = in_turn  # type: ignore[method-assign,assignment]
    scores = search(model, validation, options.classes, "top1", "probe")
    both = [line for line in values if "scikit-learn" in line]
    ours, theirs = spent("clipzoo") + prepared, spent("scikit-learn")
    return {
        "what": f"{options.samples} x {options.width}, {options.classes} classes, {options.threads} threads",
        "values_of_C": len(scores),
        "solved_by_both": len(both),
        "chosen": min(scores, key=lambda c: (-scores[c], c)),
        "seconds": {"clipzoo": ours, "scikit-learn": theirs},
        "times_as_fast": theirs / ours,
        "whole_search_seconds_clipzoo": sum(line["clipzoo"]["seconds"] for line in values) + prepared,
        "largest_objective_above_theirs": max(line["objective_less_theirs"] for line in both),
        "largest_objective_below_theirs": -min(line["objective_less_theirs"] for line in both),
        "accuracy_differs_at": [line["C"] for line in both if line["clipzoo"]["top1"] != line["scikit-learn"]["top1"]],
        "values": values,
    }


def judged(
    weight: Tensor, bias: Tensor, train: LabelledFeatures, validation: LabelledFeatures, c: float
) -> dict[str, float]:
    """scikit-learn's objective on train in float64, and the accuracy on validation."""
    losses = sum(
        torch.nn.functional.cross_entropy(rows.double() @ weight + bias, labels, reduction="sum").item()
        for rows, labels in zip(train.features.split(10_000), train.labels.split(10_000), strict=True)
    )
    right = (validation.features.double() @ weight + bias).argmax(1) == validation.labels
    objective = c * losses + weight.square().sum().item() / 2
    return {"objective": objective, "top1": 100 * int(right.sum()) / len(right)}
