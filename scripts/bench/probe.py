"""The linear probe's search for C at the size of ImageNet, on features made on the device."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

import torch
from benchmark_probe import features
from torch import Tensor

from bench.measurement import wait_for
from bench.recording import Recorder
from clipzoo.evaluation.logistic import LogisticRegression, Solution
from clipzoo.evaluation.probe import LabelledFeatures, accuracies, search
from clipzoo.evaluation.scoring import exact_products


class _TimeIsUp(Exception):  # noqa: N818
    pass


class _Timed(LogisticRegression):
    """Adds a row for each value of C that is solved. Raises _TimeIsUp when the part's time is used up."""

    recorder: Recorder
    seconds = 0.0
    values = 0

    def solve(self, c: float, tolerance: float = 1e-9, limit: int = 1000) -> Solution:
        if self.recorder.seconds_left <= 0:
            raise _TimeIsUp
        solution, taken = _timed(self.recorder, lambda: super(_Timed, self).solve(c, tolerance, limit))
        self.seconds, self.values = self.seconds + taken, self.values + 1
        values = {"C": c, "seconds": taken, "iterations": solution.iterations, "converged": solution.converged}
        self.recorder.add("probe_values", f"C = {c:.3g}", values)
        return solution


def measure(recorder: Recorder) -> None:
    samples, width, classes = (600, 16, 5) if recorder.small else (1_281_167, 512, 1000)
    options = Namespace(samples=samples, width=width, classes=classes, noise=2.5, device=recorder.device)
    with exact_products():
        recorder.measure("probe", f"{samples} x {width}, {classes} classes", lambda: _search(recorder, options))


def _search(recorder: Recorder, options: Namespace) -> dict[str, Any]:
    train, made = _timed(recorder, lambda: features(options, seed=1))
    validation = features(options, seed=2, samples=options.samples // 25)
    if recorder.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model, prepared = _timed(recorder, lambda: _Timed(train.features, train.labels, options.classes))
    model.recorder = recorder
    try:
        scores = search(model, validation, options.classes, "top1", "probe")
    except _TimeIsUp:
        return {"left_out": f"the time was used up after {model.values} values of C ({model.seconds:.0f} s)"}
    best = min(scores, key=lambda c: (-scores[c], c))
    peak = torch.cuda.max_memory_allocated() / 2**20 if recorder.device.type == "cuda" else None
    solution = LogisticRegression.solve(model, best)
    top1 = accuracies(solution.logits(validation.features), validation.labels)["top1"]
    return {
        "values_of_C": model.values, "chosen": best, "making_features_seconds": made, "preparation_seconds": prepared,
        "search_seconds": model.seconds, "top1": top1,
        "converged": solution.converged, "remaining_gradient": _remaining_gradient(solution, train, best),
        "peak_mib": peak,
    }  # fmt: skip


def _remaining_gradient(solution: Solution, train: LabelledFeatures, c: float) -> float:
    """Norm of the gradient of scikit-learn's objective in float64, relative to its norm at zero weights."""
    solved, at_zero = (
        _gradient(weight, bias, train, c)
        for weight, bias in (
            (solution.weight, solution.bias),
            (torch.zeros_like(solution.weight), torch.zeros_like(solution.bias)),
        )
    )
    return float(solved.norm() / at_zero.norm())


def _gradient(weight: Tensor, bias: Tensor, train: LabelledFeatures, c: float) -> Tensor:
    """[d + 1, k], the bias last."""
    total = torch.cat([weight, torch.zeros_like(bias)[None]])
    for rows, labels in zip(train.features.split(1 << 16), train.labels.split(1 << 16), strict=True):
        rows = rows.double()
        residual = torch.addmm(bias, rows, weight).softmax(dim=1)
        residual[torch.arange(len(labels), device=labels.device), labels] -= 1
        total += c * torch.cat([rows.mT @ residual, residual.sum(dim=0)[None]])
    return total


def _timed(recorder: Recorder, function: Any) -> tuple[Any, float]:
    wait_for(recorder.device)
    begin = time.perf_counter()
    result = function()
    wait_for(recorder.device)
    return result, time.perf_counter() - begin
