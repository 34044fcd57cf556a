"""The linear probe's search for C compared with two L-BFGS: objective, accuracy and time, C by C.

    python scripts/benchmark.py probe --samples 50000 --width 512 --classes 100 --every 3 --budget 400

Our search runs whole. On every --every-th value that it tries, in its order, the peers take a turn, on the same
features and with as many threads. scikit-learn's L-BFGS gets float64, the tolerance with which it comes within a
millionth of the optimum (with its default it stops earlier), and at most --iterations. torch's L-BFGS (full batch,
strong Wolfe line search, from its previous solution) stops at an objective at most a millionth above ours: in float32,
and in float64 where float32 does not reach it in --iterations evaluations. After --budget seconds of its time a peer
solves no more. All seconds are CPU seconds. The ratios are those of the times on the values that both solved. Ours are
those of the search, warm starts and the preparation of the features included, the latter in full.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from contextlib import suppress
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
PEERS = ("scikit-learn", "torch L-BFGS")
NEAR = 1 + 1e-6
"""torch's L-BFGS stops at this multiple of our objective."""


def add_options(parser: Parser) -> None:
    parser.add_argument("--samples", type=number_in(Count), default=50_000)
    parser.add_argument("--width", type=number_in(Count), default=512)
    parser.add_argument("--classes", type=number_in(Count), default=100)
    parser.add_argument("--noise", type=number_in(Positive), default=2.5, help="for a spread of 1 between classes")
    parser.add_argument("--tolerance", type=number_in(Positive), default=1e-7, help="scikit-learn's tol")
    parser.add_argument("--iterations", type=number_in(Count), default=1000, help="of a peer")
    parser.add_argument("--every", type=number_in(Count), default=3, help="the peers solve every so many-th value")
    parser.add_argument("--budget", type=number_in(Positive), default=400.0, help="CPU seconds of a peer")
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
    begin = time.process_time()
    model = LogisticRegression(train.features, train.labels, options.classes)
    prepared = time.process_time() - begin
    solve = LogisticRegression.solve

    def by_scikit_learn(c: float, _: float) -> dict[str, Any]:
        begin = time.process_time()
        peer = Peer(C=c, tol=options.tolerance, max_iter=options.iterations)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer.fit(wide, train.labels.numpy())
        taken = time.process_time() - begin
        weight, bias = torch.from_numpy(peer.coef_.T), torch.from_numpy(peer.intercept_)
        answers = judged(weight, bias, train, validation, c)
        return {"seconds": taken, "iterations": int(np.max(peer.n_iter_)), **answers}

    start = torch.zeros(options.width + 1, options.classes)
    lbfgs(train.features[:100], train.labels[:100], 1.0, 0.0, start, 2)  # torch.optim imports modules in its first step

    def by_torch(c: float, objective: float) -> dict[str, Any]:
        nonlocal start
        for dtype in (torch.float32, torch.float64):
            points = train.features.to(dtype)
            begin = time.process_time()
            parameters, iterations = lbfgs(points, train.labels, c, NEAR * objective, start, options.iterations)
            taken = time.process_time() - begin
            answers = judged(parameters[:-1].double(), parameters[-1].double(), train, validation, c)
            if answers["objective"] < objective * (1 + 2e-6):
                start = parameters.float()
                break
        return {"seconds": taken, "iterations": iterations, "precision": str(dtype), **answers}

    def in_turn(self: LogisticRegression, c: float, tolerance: float) -> Solution:
        begin = time.process_time()
        solution = solve(self, c, tolerance=tolerance)
        taken = time.process_time() - begin
        answers = judged(solution.weight, solution.bias, train, validation, c)
        line: dict[str, Any] = {"C": c, "clipzoo": {"seconds": taken, "iterations": solution.iterations, **answers}}
        for name, fit in zip(PEERS, (by_scikit_learn, by_torch), strict=True):
            if len(values) % options.every == 0 and spent(name) < options.budget:
                line[name] = fit(c, answers["objective"])
                line[name]["ours_less_theirs"] = answers["objective"] / line[name]["objective"] - 1
        values.append(line)
        log(json.dumps(line))
        return solution

    def spent(name: str, by: str | None = None) -> float:
        """Seconds of `by`, by default of the peer, on the values that the peer solved."""
        return sum(line[by or name]["seconds"] for line in values if name in line)

    LogisticRegression.solve = in_turn  # type: ignore[method-assign,assignment]
    scores = search(model, validation, options.classes, "top1", "probe")
    result = {
        "what": f"{options.samples} x {options.width}, {options.classes} classes, {options.threads} threads",
        "values_of_C": len(scores),
        "chosen": min(scores, key=lambda c: (-scores[c], c)),
        "whole_search_seconds_clipzoo": sum(line["clipzoo"]["seconds"] for line in values) + prepared,
    }
    for name in PEERS:
        both = [line for line in values if name in line]
        ours, theirs = spent(name, "clipzoo") + prepared, spent(name)
        result[name] = {
            "solved_by_both": len(both),
            "seconds": {"clipzoo": ours, name: theirs},
            "times_as_fast": theirs / ours,
            "largest_objective_above_theirs": max(line[name]["ours_less_theirs"] for line in both),
            "largest_objective_below_theirs": -min(line[name]["ours_less_theirs"] for line in both),
            "accuracy_differs_at": [line["C"] for line in both if line["clipzoo"]["top1"] != line[name]["top1"]],
        }
    return result | {"values": values}


def lbfgs(
    points: Tensor, labels: Tensor, c: float, objective: float, start: Tensor, evaluations: int
) -> tuple[Tensor, int]:
    """Return weights and intercepts [d + 1, K] at which torch's L-BFGS has reached the objective; and evaluations."""
    parameters = start.to(points.dtype).clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=evaluations, max_eval=evaluations, tolerance_grad=0, tolerance_change=0,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    scale, count = 1 / (c * len(points)), 0

    def closure() -> Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        logits = points @ parameters[:-1] + parameters[-1]
        loss = torch.nn.functional.cross_entropy(logits, labels) + scale * parameters[:-1].square().sum() / 2
        if loss.item() <= scale * objective:
            raise StopIteration
        loss.backward()
        return loss

    with suppress(StopIteration):
        optimizer.step(closure)
    return parameters.detach(), count


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
