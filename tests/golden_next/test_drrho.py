"""DRRho-CLIP against six steps of the released loss, in a matrix and in tiles."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import clipzoo
from clipzoo.build import build_model
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.objectives.drrho import DRRhoCLIP
from clipzoo.objectives.fastclip import FastCLIP
from clipzoo.teachers import FrozenTeacher
from clipzoo.training.settings import Computation
from clipzoo.types import Batch, Progress, Similarity
from tests.golden_next.test_fastclip import agrees, cosines
from tests.support import tuned
from tests.support.objectives import FASTCLIP_OPTIONS, batch, progress, random_cosines, similarity

NUMBERS = {name: torch.from_numpy(array) for name, array in np.load(Path(__file__).with_name("drrho.npz")).items()}
STEPS, EPOCHS = 6, 8


@pytest.mark.parametrize("tile", [None, 3], ids=["matrix", "tiles"])
@pytest.mark.parametrize("case", ["script", "blend", "plain"])
def test_gradients_and_state_are_those_of_the_released_code(case, tile):
    """The released sums are divided by N in u and by N - 1 in the gradient, ours by N - 1 in both."""
    numbers = {name.removeprefix(f"{case}_"): value for name, value in NUMBERS.items() if name.startswith(case)}
    arguments = {name: numbers[f"arg_{name}"].item() for name in ("tau", "gamma", "rho", "eps", "mult", "decay", "n")}
    size, tau, rho = len(numbers["ids"][0]), arguments["tau"], arguments["rho"]
    ratio = size / (size - 1)
    objective = DRRhoCLIP(
        tau, True, 0.01, 1.0, 1e-3, rho, ratio * arguments["eps"], arguments["gamma"], arguments["decay"] / EPOCHS
    ).double()
    objective.allocate(arguments["n"])
    objective.log_scale.data.fill_(-math.log(tau))
    factor = tau if arguments["mult"] else 1.0
    for step in range(STEPS):
        image, text = (numbers[view][step].clone().requires_grad_() for view in ("image", "text"))
        reference = cosines(numbers["ref_image"][step], numbers["ref_text"][step], World(), tile)
        # A teacher with a temperature.
        scale = torch.tensor(math.log(7.0), dtype=torch.float64)
        reference = Similarity(*(scores.scaled(torch.exp(scale).mul) for scores in reference.directions))
        both = replace(cosines(image, text, World(), tile), teacher=replace(reference, log_cosine_scale=scale))
        ids = numbers["ids"][step]
        at = Progress(5 * int(numbers["epochs"][step]), 5 * EPOCHS, 5 * size, size)
        loss = objective(both, Batch(image, text, ids), at)
        objective.log_scale.grad = None
        loss.total.backward()
        assert loss.logs["gamma"].item() == pytest.approx(numbers["gamma"][step].item(), rel=1e-12)
        for view, gradient in (("image", image.grad), ("text", text.grad)):
            assert agrees(ratio * factor / tau * gradient, numbers[f"grad_{view}"][step])
        log_epsilon = objective.log_u.new_tensor(math.log(ratio * arguments["eps"]))
        log_u = objective.log_u.logaddexp(log_epsilon) - math.log(ratio)
        for modality, name in enumerate("IT"):
            released = numbers[f"log_u_{name}"][step]
            seen = released != 0
            assert torch.equal(seen, objective.log_u[modality].isfinite())
            torch.testing.assert_close(log_u[modality, seen], released[seen], rtol=0, atol=1e-10)
        levels = log_u[:, ids].mean().item()
        slope = ratio * loss.total.item() / tau
        value = factor * slope + (tau * (rho + levels) if arguments["mult"] else 0.0)
        assert value == pytest.approx(numbers["loss"][step].item(), rel=1e-10)
        slopes = numbers["grad_theta"][step].item() / factor + (rho + levels if arguments["mult"] else 0.0)
        exact = tau * (slopes / ratio - 2 * (rho + levels + math.log(ratio)))
        assert objective.log_scale.grad.item() == pytest.approx(exact, rel=1e-10)


def test_a_constant_reference_gives_twice_fastclip_v3_and_the_student_as_its_own_the_radius():
    options = {**FASTCLIP_OPTIONS, "epsilon": 1e-20}
    fastclip, drrho = FastCLIP(**options).double(), DRRhoCLIP(0.2, True, 0.01, 1.0, 1e-3, 1.5, 1e-20, 0.6, 0.5).double()
    log_scale = torch.zeros((), dtype=torch.float64)
    for objective in (fastclip, drrho):
        objective.allocate(6)
    for step in range(4):
        matrix = random_cosines(step, 6).requires_grad_()
        constant = replace(similarity(torch.ones_like(matrix)), log_cosine_scale=log_scale)
        plain = fastclip(similarity(matrix), batch(range(6)), progress(step))
        ours = drrho(replace(similarity(matrix), teacher=constant), batch(range(6)), progress(step))
        torch.testing.assert_close(ours.logs["objective"], 2 * plain.logs["objective"], rtol=1e-12, atol=0)
        wanted, gradients = (
            torch.autograd.grad(loss.total, [matrix, objective.log_scale])
            for loss, objective in ((plain, fastclip), (ours, drrho))
        )
        for expected, gradient in zip(wanted, gradients, strict=True):
            torch.testing.assert_close(gradient, 2 * expected, rtol=1e-12, atol=1e-14)
    itself = replace(similarity(matrix.detach()), log_cosine_scale=log_scale)
    drrho.allocate(6)
    logs = drrho(replace(similarity(matrix), teacher=itself), batch(range(6)), progress()).logs
    # g is 1: its logarithm is zero.
    assert logs["objective"].item() == pytest.approx(2 * logs["tau"].item() * 1.5, rel=1e-12)


def test_the_final_gamma_follows_the_papers_law_and_a_missing_teacher_is_refused():
    objective = DRRhoCLIP(0.01, False, 0.01, 1.0, 1e-3, 11.0, 1e-4, None, 1.0)
    objective.allocate(8)
    assert objective.gamma_at(Progress(320, 320, 80, 8)) == pytest.approx(4.177 * 32**-0.7265)
    assert objective.gamma_at(Progress(20, 20, 80, 8)) == 1.0
    with pytest.raises(ConfigError, match=r"objective drrho .* reference model: give a teacher"):
        objective(similarity(torch.eye(4)), batch(range(4)), progress())
    with pytest.raises(ConfigError, match=r"eval\.validation=null"):
        objective.require_value_of_unseen()


def test_a_training_with_a_teacher_is_the_same_in_tiles_and_micro_batches_and_its_temperature_has_its_own_rate():
    logs = []
    for changes in ({}, {"tile": 3}, {"micro_batch": 3}):
        student, teacher = (build_model({**tuned.configuration(), "seed": seed}).double() for seed in (0, 1))
        student.head.log_scale.requires_grad_(False).zero_()
        student.head.learnable_temperature, student.head.score_range = False, (-1.0, 1.0)
        result = clipzoo.train(
            student, DRRhoCLIP(0.1, True, 0.01, 1.0, 0.05, 1.0, 1e-4, 0.5, 1.0), tuned.pairs(), batch=8, steps=3,
            log_every=1, device="cpu", quiet=True, computation=Computation(precision="float64", **changes),
            teacher=FrozenTeacher(teacher),
        )  # fmt: skip
        logs.append([[row[name] for name in ("objective", "tau")] for row in result.history])
    (_, first), (_, second), _ = logs[0]
    # Adam's first step is as large as its rate.
    assert abs(math.log(second / first)) == pytest.approx(0.05, rel=1e-4)
    for other in logs[1:]:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(logs[0]), rtol=1e-6, atol=0)
