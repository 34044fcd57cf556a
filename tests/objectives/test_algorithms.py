"""NUCLR, SogCLR and iSogCLR against transcriptions of their algorithms: plain numbers, no logarithms, no tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from clipzoo.objectives.isogclr import ISogCLR
from clipzoo.objectives.nuclr import NUCLR, zeta_rate
from clipzoo.objectives.sogclr import SogCLR
from clipzoo.types import Progress
from tests.support.objectives import (
    BATCH,
    ISOGCLR_OPTIONS,
    NUCLR_OPTIONS,
    ORDER,
    SAMPLES,
    SOGCLR_OPTIONS,
    batch,
    random_cosines,
    similarity,
)

TOTAL_STEPS = 12
Matrix = list[list[float]]


@dataclass
class Transcript:
    """State of the algorithm for every (modality, id), as plain numbers."""

    xi: list[float]
    numbers: dict[str, Any] = field(default_factory=lambda: defaultdict(dict))


def nuclr_step(
    state: Transcript, step: int, ids: list[int], scores: list[Matrix], options: dict[str, Any]
) -> list[Matrix]:
    """One step of Algorithm 1 with the released code's schedule; the gradients of both score matrices."""
    tau, gamma, n, size = options["temperature"], options["gamma"], SAMPLES, len(ids)
    u, zeta, z = (state.numbers[name] for name in ("u", "zeta", "z"))
    for modality in (0, 1):
        for sample in range(n):
            zeta.setdefault((modality, sample), options["zeta"])
    epoch, epochs, start = step // 2, TOTAL_STEPS // 2, options["frozen_epochs"]
    if options["xi_update"] == "epoch" and step % 2 == 0 and step > 0:
        for modality in (0, 1):
            state.xi[modality] = max(options["xi"], max(zeta[modality, sample] for sample in range(n)))
    gradients, moves = [], []
    for anchor, s in enumerate(scores):
        other = 1 - anchor

        def term(i: int, j: int, s: Matrix = s, other: int = other) -> float:
            return math.exp((s[i][j] - s[i][i] - zeta[other, ids[j]]) / tau)

        for i, sample in enumerate(ids):
            phi = (n - 1) / (size - 1) * sum(term(i, j) for j in range(size) if j != i)
            seen = (anchor, sample) in u
            u[anchor, sample] = (1 - gamma) * u[anchor, sample] + gamma * phi if seen else phi
        gradient = [[0.0] * size for _ in ids]
        for i, sample in enumerate(ids):
            push = state.xi[other] if options["positive"] == "xi" else zeta[other, sample]
            for j in range(size):
                if j != i:
                    weight = (n - 1) / (size - 1) * term(i, j) / (math.exp(-push / tau) + u[anchor, sample])
                    gradient[i][j] += weight / size
                    gradient[i][i] -= weight / size
        gradients.append(gradient)
        if epoch >= start and options["learn_zeta"]:
            eta = 0.5 * options["eta"] * (1 + math.cos(math.pi * (epoch - start) / (epochs - 1 - start)))
            eta *= options["eta_image_factor"] if other == 0 else 1.0
            for j, contrast in enumerate(ids):
                pull = sum(
                    term(i, j) / (math.exp(-zeta[other, sample] / tau) + u[anchor, sample])
                    for i, sample in enumerate(ids)
                )
                g = 1 - n / size * pull
                m = options["momentum"]
                momentum = (1 - m) * z[other, contrast] + m * g if (other, contrast) in z else g
                moves.append((other, contrast, momentum, zeta[other, contrast] - eta * momentum))
    for modality, sample, momentum, moved in moves:
        z[modality, sample], zeta[modality, sample] = momentum, moved
    if options["xi_update"] == "step":
        for modality in (0, 1):
            state.xi[modality] = max(state.xi[modality], *(abs(zeta[modality, sample]) for sample in range(n)))
    return gradients


def sogclr_step(
    state: Transcript, step: int, ids: list[int], scores: list[Matrix], options: dict[str, Any]
) -> list[Matrix]:
    tau, size = options["temperature"], len(ids)
    u, gradients = state.numbers["u"], []
    for anchor, s in enumerate(scores):
        gradient = [[0.0] * size for _ in ids]
        for i, sample in enumerate(ids):
            terms = [math.exp((s[i][j] - s[i][i]) / tau) if j != i else 0.0 for j in range(size)]
            whole = (SAMPLES - 1) / (size - 1)
            old = u.get((anchor, sample), whole * sum(terms))
            u[anchor, sample] = (1 - options["gamma"]) * old + options["gamma"] * whole * sum(terms)
            denominator = u[anchor, sample] + (1 if options["positive_in_denominator"] else 0)
            for j in range(size):
                gradient[i][j] += whole * terms[j] / denominator / size
                gradient[i][i] -= whole * terms[j] / denominator / size
        gradients.append(gradient)
    return gradients


def isogclr_step(
    state: Transcript, step: int, ids: list[int], scores: list[Matrix], options: dict[str, Any]
) -> list[Matrix]:
    size, gamma, clip = len(ids), options["gamma"], options["gradient_clip"]
    u, tau, momentum = (state.numbers[name] for name in ("u", "tau", "momentum"))
    gradients = []
    for anchor, s in enumerate(scores):
        gradient = [[0.0] * size for _ in ids]
        for i, sample in enumerate(ids):
            temperature = tau.get((anchor, sample), options["temperature"])
            exponents = [(s[i][j] - s[i][i]) / temperature for j in range(size)]
            terms = [math.exp(exponent) if j != i else 0.0 for j, exponent in enumerate(exponents)]
            mean = sum(terms) / (size - 1)
            u[anchor, sample] = (1 - gamma) * u.get((anchor, sample), mean) + gamma * mean
            weights = [term / (size - 1) / u[anchor, sample] for term in terms]
            for j in range(size):
                gradient[i][j] += weights[j] / size
                gradient[i][i] -= weights[j] / size
            slope = math.log(u[anchor, sample]) + options["rho"]
            slope -= sum(weight * exponent for weight, exponent in zip(weights, exponents, strict=True))
            old = momentum.get((anchor, sample), 0.0)
            momentum[anchor, sample] = (1 - options["momentum"]) * old + options["momentum"] * max(
                -clip, min(clip, slope)
            )
            moved = temperature - options["eta"] * momentum[anchor, sample]
            low, high = options["minimum_temperature"], options["maximum_temperature"]
            tau[anchor, sample] = min(high, max(low, moved))
        gradients.append(gradient)
    return gradients


NUCLR_CASES: dict[str, dict[str, Any]] = {
    "published": {},
    "dagger": {"learn_zeta": False},
    "diamond": {"positive": "zeta"},
    "spade": {"frozen_epochs": 0},
    "xi_of_algorithm_1": {"xi_update": "step", "frozen_epochs": 0},
    "xi_of_negative_zeta": {"xi_update": "step", "frozen_epochs": 0, "zeta": -0.1},
    "no_memory": {"gamma": 1.0},
    "negative_zeta": {"zeta": -0.05, "xi": 0.125, "temperature": 0.07},
}


@pytest.mark.parametrize("changes", NUCLR_CASES.values(), ids=NUCLR_CASES)
def test_six_steps_of_nuclr_agree_with_algorithm_1(changes):
    options = {**NUCLR_OPTIONS, **changes}
    objective, state = _follow(NUCLR(**options), nuclr_step, options)
    _agree(objective.log_u.exp(), state.numbers["u"])
    _agree(objective.zeta, state.numbers["zeta"])
    _agree(objective.zeta_momentum, state.numbers["z"])
    assert objective.xi.tolist() == pytest.approx(state.xi, abs=1e-10)
    moved = (objective.zeta - options["zeta"]).abs().amax(dim=1)
    assert torch.equal(moved > 1e-4, torch.tensor([options["learn_zeta"]] * 2))


@pytest.mark.parametrize("positive_in_denominator", [True, False])
def test_six_steps_of_sogclr_agree_with_its_algorithm(positive_in_denominator):
    options = {**SOGCLR_OPTIONS, "positive_in_denominator": positive_in_denominator}
    objective, state = _follow(SogCLR(**options), sogclr_step, options)
    _agree(objective.log_u.exp(), state.numbers["u"])


def test_six_steps_of_isogclr_agree_with_its_algorithm():
    objective, state = _follow(ISogCLR(**ISOGCLR_OPTIONS), isogclr_step, ISOGCLR_OPTIONS)
    _agree(objective.log_u.exp(), state.numbers["u"])
    _agree(objective.tau, state.numbers["tau"])
    _agree(objective.tau_momentum, state.numbers["momentum"])
    # The test would not see a missing clip or bound if none were reached.
    assert {0.1, 0.45} & {round(value, 12) for value in objective.tau.flatten().tolist()}


@pytest.mark.parametrize(
    ("epoch", "degrees", "drop"),
    [(5, 0.0, 1), (14, 67.5, 1), (15, 75.0, 10), (21, 120.0, 10), (22, 127.5, 100), (29, 180.0, 100)],
)
def test_zeta_rate_of_thirty_epochs_is_a_cosine_that_drops_twice(epoch, degrees, drop):
    expected = 5e-6 * (1 + math.cos(math.radians(degrees))) / 2 / drop
    for step_of_epoch in (0, 9):
        progress = Progress(10 * epoch + step_of_epoch, 300, samples=5120, global_batch=512)
        assert zeta_rate(progress, 5e-6, 5) == pytest.approx(expected, rel=1e-12, abs=1e-20)


def test_zeta_rate_is_zero_in_the_frozen_epochs_and_counts_a_training_cut_to_whole_steps_as_its_epochs():
    rates = [zeta_rate(Progress(step, 300, samples=5120, global_batch=512), 5e-6, 5) for step in range(51)]
    assert rates[:50] == [0.0] * 50 and rates[50] == 5e-6
    # A dataset that no batch size divides: 30 epochs of 1000 samples make 468 steps of 64, not 468.75.
    before, after = (zeta_rate(Progress(step, 468, samples=1000, global_batch=64), 1.0, 5) for step in (234, 235))
    assert before > 5 * after  # the first drop comes with epoch 15, at step 234.4


def _follow(objective: Any, transcribed: Callable, options: dict[str, Any]) -> tuple[Any, Transcript]:
    """Six steps of both, with two unrelated score matrices a step; gradients are compared at each."""
    objective = objective.double()
    objective.allocate(SAMPLES)
    state = Transcript([options.get("xi", 0.0)] * 2)
    for step, ids in enumerate(ORDER):
        matrices = [random_cosines(10 * step + direction, BATCH).requires_grad_() for direction in (0, 1)]
        progress = Progress(step, TOTAL_STEPS, SAMPLES, BATCH)
        objective(similarity(*matrices), batch(ids), progress).total.backward()
        expected = transcribed(state, step, ids, [matrix.tolist() for matrix in matrices], options)
        for matrix, gradient in zip(matrices, expected, strict=True):
            assert torch.allclose(matrix.grad, torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=1e-10)
    return objective, state


def _agree(buffer: torch.Tensor, numbers: dict[tuple[int, int], float]) -> None:
    assert len(numbers) in (0, 2 * SAMPLES)
    for (modality, sample), value in numbers.items():
        assert buffer[modality, sample].item() == pytest.approx(value, rel=1e-10, abs=1e-10)
