"""FastCLIP against six steps of the released losses, in a matrix, in tiles and on two ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clipzoo.distributed.world import World
from clipzoo.heads.scores import DenseScores, tiled_scores
from clipzoo.objectives.fastclip import FastCLIP
from clipzoo.training.optimizers import AdamW, scale_rates, split_groups
from clipzoo.training.schedules import Cosine
from clipzoo.types import Batch, Progress, Similarity
from tests.support.ranks import run_ranks

NUMBERS = {name: torch.from_numpy(array) for name, array in np.load(Path(__file__).with_name("fastclip.npz")).items()}
CASES = ["v0", "v1", "v2", "v3", "v3eps"]
STEPS, EPOCHS = 6, 12


def cosines(image: Tensor, text: Tensor, world: World, tile: int | None) -> Similarity:
    texts = world.gather(text)
    if tile is not None:
        return Similarity(*tiled_scores(image, texts, tile, world), world=world)
    first = world.rank * len(image)
    both = image @ texts.mT, text @ world.gather(image).mT
    return Similarity(*(DenseScores(matrix, first) for matrix in both), world=world)


def built(case: str) -> FastCLIP:
    of = {name: NUMBERS[f"{case}_{name}"].item() for name in ("tau_init", "rho", "eps", "beta1", "beta2", "eps_tau")}
    share = NUMBERS[f"{case}_gamma_decay_epochs"].item() / EPOCHS
    objective = FastCLIP(
        case[:2], of["tau_init"], 0.01, 1.0, NUMBERS[f"{case}_lr_tau"].item() or 1e-3, (of["beta1"], of["beta2"]),
        of["eps_tau"], 5.0, of["rho"], of["eps"], NUMBERS[f"{case}_gamma_min"].item(), share,
    ).double()  # fmt: skip
    objective.allocate(NUMBERS[f"{case}_n"].item())
    return objective


def set_theta(objective: FastCLIP, case: str, step: int) -> None:
    """Set log(1 / tau) before a step to that of the released code, which has its own gradient."""
    if case != "v2":
        before = NUMBERS[f"{case}_theta"][step - 1] if step else -NUMBERS[f"{case}_tau_init"].log()
        objective.log_scale.data.copy_(before)


def followed(case: str, tile: int | None = None) -> list[dict[str, Any]]:
    """This rank's results of every step."""
    world, objective, results = World.from_process_group(), built(case), []
    ids, images, texts = (NUMBERS[f"{case}_{name}"] for name in ("ids", "image", "text"))
    count = len(ids[0]) // world.size
    local = slice(world.rank * count, (world.rank + 1) * count)
    for step in range(STEPS):
        image, text = (vectors[step, local].clone().requires_grad_() for vectors in (images, texts))
        set_theta(objective, case, step)
        per_epoch = objective.samples // len(ids[0])
        epoch = NUMBERS[f"{case}_epochs"][step].item()
        progress = Progress(per_epoch * epoch, per_epoch * EPOCHS, objective.samples, len(ids[0]))
        rates = objective.learning_rates(progress)
        batch = Batch(image, text, ids[step, local])
        loss = objective(cosines(image, text, world, tile), batch, progress)
        loss.total.backward()
        results.append(
            {
                "image": image.grad, "text": text.grad, "logs": dict(loss.logs), "rates": list(rates.values()),
                "state": {name: buffer.clone() for name, buffer in objective.named_buffers()},
            }
        )  # fmt: skip
        if rates:
            results[-1]["theta"] = objective.log_scale.grad.clone()
            objective.log_scale.grad = None
    return results


def agrees(ours: Tensor, expected: Tensor) -> bool:
    return (ours - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("tile", [None, 3], ids=["matrix", "tiles"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_state_and_logs_are_those_of_the_released_code(case, tile):
    tau_factor = "_tau" if case == "v2" else ""
    for step, ours in enumerate(followed(case, tile)):
        for view in ("image", "text"):
            assert agrees(ours[view], NUMBERS[f"{case}_grad_{view}{tau_factor}"][step])
        state = ours["state"]
        for modality, name in enumerate("IT"):
            seen = state["log_u"][modality].isfinite()
            bound = NUMBERS[f"v2_bound_{name}"][step] if case == "v2" else torch.zeros(())
            u = NUMBERS[f"{case}_u_{name}"][step] * bound.exp()
            assert torch.equal(seen, u > 0)
            torch.testing.assert_close(state["log_u"][modality].exp()[seen], u[seen], rtol=1e-10, atol=0)
            for buffer, array in (("tau", "tau"), ("tau_mean", "m"), ("tau_square", "v")) if case == "v2" else ():
                assert agrees(state[buffer][modality], NUMBERS[f"v2_{array}_{name}"][step])
        if "theta" in ours:
            assert agrees(ours["theta"], NUMBERS[f"{case}_grad_theta_exact"][step])
            assert ours["rates"] == [pytest.approx(NUMBERS[f"{case}_lr_theta"][step].item(), rel=1e-12)]
        logs, ids = ours["logs"], NUMBERS[f"{case}_ids"][step]
        assert logs["gamma"].item() == pytest.approx(NUMBERS[f"{case}_gamma"][step].item(), rel=1e-12)
        released = logs["ratio"].item()
        if case.startswith("v3"):
            level = state["log_u"][:, ids].mean().item() + NUMBERS[f"{case}_rho"].item()
            released = logs["tau"].item() * (released + level)
        assert released == pytest.approx(NUMBERS[f"{case}_loss"][step].item(), rel=1e-10)


@pytest.mark.medium
@pytest.mark.parametrize("tile", [None, 3], ids=["matrix", "tiles"])
def test_two_ranks_have_their_rows_of_the_gradient_and_the_same_state(tile):
    ranks = run_ranks(2, two_ranks, tile)
    for case in CASES:
        for step, (first, second) in enumerate(zip(ranks[0][case], ranks[1][case], strict=True)):
            assert all(torch.equal(value, second["state"][name]) for name, value in first["state"].items())
            expected = followed_on_one(case)[step]
            for name, value in expected["state"].items():
                torch.testing.assert_close(first["state"][name], value, rtol=1e-10, atol=1e-12)
            for view in ("image", "text"):
                released = NUMBERS.get(f"{case}_dist2_grad_{view}") if case != "v2" else None
                for rank, ours in enumerate((first, second)):
                    whole = expected[view].unflatten(0, (2, -1))[rank]
                    assert agrees(ours[view], 2 * whole)
                    assert released is None or agrees(ours[view], released[step, rank])
            if "theta" in first:
                assert agrees((first["theta"] + second["theta"]) / 2, NUMBERS[f"{case}_grad_theta_exact"][step])


def two_ranks(tile: int | None) -> dict[str, list[dict[str, Any]]]:
    return {case: followed(case, tile) for case in CASES}


def followed_on_one(case: str) -> list[dict[str, Any]]:
    return followed(case)


@pytest.mark.parametrize("case", ["v0", "v3", "v3eps"])
def test_adamw_moves_theta_with_its_own_rate_and_no_decay_as_the_released_code_does(case):
    """The released steps of theta, from the released gradients."""
    objective, weights = built(case), torch.nn.Linear(3, 3)
    set_theta(objective, case, 0)
    schedule = Cosine(
        peak=0.1, start=0.0, end=0.0, warmup_epochs=None, warmup_steps=2, restart_epochs=None, per_epoch=False
    )
    recipe = AdamW(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.5, schedule=schedule)
    optimizer = recipe.build(weights, objective)
    split_groups(optimizer, {}, objective.learning_rates(Progress(0, STEPS, 24, 8)))
    for step in range(STEPS):
        progress = Progress(step, STEPS, 24, 8)
        rate = recipe.set_rate(optimizer, progress)
        scale_rates(optimizer, objective.learning_rates(progress))
        for group in optimizer.param_groups:
            of_theta = group["params"][0] is objective.log_scale
            assert group["lr"] == pytest.approx(NUMBERS[f"{case}_lr_theta"][step].item() if of_theta else rate)
        objective.log_scale.grad = NUMBERS[f"{case}_grad_theta"][step].clone()
        optimizer.step()
        objective.log_scale.data.clamp_(0, math.log(100))
        assert objective.log_scale.item() == pytest.approx(NUMBERS[f"{case}_theta"][step].item(), rel=1e-12)


@pytest.mark.parametrize(("decay", "minimum"), [(8, 0.2), (3, 0.8)])
def test_gamma_falls_from_one_at_epoch_boundaries(decay, minimum):
    expected = NUMBERS[f"schedule_gamma_E{decay}_min{minimum}"].tolist()
    objective = FastCLIP("v1", 0.07, 0.01, 1.0, 1e-3, (0.9, 0.999), 1e-8, 5.0, 6.5, 1e-14, minimum, 0.5)
    for epoch, gamma in enumerate(expected):
        for step in (4 * epoch, 4 * epoch + 3):
            assert objective.gamma_at(Progress(step, 8 * decay, 40, 10)) == pytest.approx(gamma, rel=1e-12)


@pytest.mark.parametrize("version", ["v0", "v1", "v2", "v3"])
def test_with_gamma_one_the_gradient_and_value_are_those_of_the_stateless_loss(version):
    objective = FastCLIP(version, 0.2, 0.01, 1.0, 1e-3, (0.9, 0.999), 1e-8, 5.0, 1.5, 1e-20, 1.0, 0.5).double()
    objective.allocate(8)
    count, rho = 8, 1.5 if version > "v1" else 0.0
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        matrix = (2 * torch.rand(count, count, generator=generator, dtype=torch.float64) - 1).requires_grad_()
        theta = torch.tensor(-math.log(0.2), dtype=torch.float64, requires_grad=True)
        tau = (-theta).exp().expand(2, count)
        if version == "v2":
            tau = objective.tau.clone()
        else:
            objective.log_scale.data.copy_(theta.detach())
        value = matrix.new_zeros(())
        for scores, temperature in zip((matrix, matrix.mT), tau, strict=True):
            terms = ((scores - scores.diagonal()[:, None]) / temperature[:, None]).exp()
            g = (terms.sum(dim=1) - 1) / (count - 1)
            value = value + ((temperature if version > "v1" else 1) * ((1e-20 + g).log() + rho)).mean() / 2
        wanted = torch.autograd.grad(value, [matrix, theta], materialize_grads=True)
        similarity = Similarity(DenseScores(matrix), DenseScores(matrix.mT))
        batch = Batch(matrix, matrix, torch.arange(count))
        loss = objective(similarity, batch, Progress(step, 10, count, count))
        torch.testing.assert_close(loss.logs["objective"], value.detach(), rtol=1e-12, atol=0)
        learned = [parameter for parameter in objective.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss.total, [matrix, *learned])
        for ours, expected in zip(gradients, wanted, strict=False):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
