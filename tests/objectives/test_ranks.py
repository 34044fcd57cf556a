"""Two real ranks give what one gives: loss, averaged gradients and per-sample state, for every compatible pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clipzoo.build import build_objective, build_part
from clipzoo.distributed.world import World
from clipzoo.heads.pairs import Scope
from clipzoo.objectives.base import Objective, check_pair
from clipzoo.types import Batch, Features, Progress
from scripts.compatibility import composed, config_names
from tests.support.heads import IMAGE_WIDTH, TEXT_WIDTH, head_config, image_features, rows, text_features
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.medium

SAMPLES, BATCH, STEPS = 16, 8, 3
HEADS = [*config_names("head"), "cloob head.inverse_temperature=1.0", "clip head.matryoshka=[2,4]"]
OBJECTIVES = [
    *config_names("objective"),
    "siglip objective.initial_scale=10.0",
    "cyclip objective.learnable_temperature=true",
    "hardness objective.learnable_temperature=true",
    "mmd_conditional objective.exclude_diagonal=true",
    "sogclr objective.positive_in_denominator=true",
    "fastclip objective.version=v0",
    "fastclip objective.version=v1",
    "fastclip objective.version=v2 objective.temperature=0.2 objective.temperature_rate=0.05",
    "drrho objective.temperature=0.2 objective.learnable_temperature=true objective.gamma=0.5",
    "glofnd objective.start=0 objective.alpha=0.3 objective.threshold_rate=0.3 objective.temperature=0.2",
    "nuclr objective.frozen_epochs=0 objective.eta=0.05 objective.temperature=0.2",
    "nuclr objective.frozen_epochs=0 objective.eta=0.05 objective.positive=zeta",
    "nuclr objective.frozen_epochs=0 objective.eta=0.05 objective.xi_update=step",
]
OTHERS, SUMS = ("cloob", "wpse", "inner_product", "distance"), ("infonce", "infoloob", "joint")
Plain = dict[str, Any]
Found = dict[str, Tensor]


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Plain, Plain]]:
    """The configurations of every compatible pair of HEADS and OBJECTIVES, by name."""
    heads = {name: head_config(name) for name in HEADS}
    objectives = {name: composed(*_overrides(name)) for name in OBJECTIVES}
    built = {name: build_objective(objective) for name, objective in objectives.items()}
    return {
        f"{head_name} + {objective_name}": (head, objectives[objective_name])
        for head_name, head in heads.items()
        for objective_name, objective in built.items()
        if check_pair(build_part(head), objective).compatible
    }


@pytest.fixture(scope="module")
def some(pairs) -> dict[str, tuple[Plain, Plain]]:
    """Every objective with CLIP or cosines, and every head with the objectives that ask for different sums."""
    ours = {"flair + flair"} | {f"{head} + {sums}" for head in HEADS for sums in SUMS}
    return {name: pair for name, pair in pairs.items() if name in ours or name.startswith(("clip ", "cosine "))}


@pytest.fixture(scope="module")
def alone(some) -> dict[str, Found]:
    return train_pairs(some)


def test_two_ranks_equal_one_for_every_head_and_objective(some, alone):
    assert {name.split(" + ")[0] for name in some} == set(HEADS)
    assert {name.split(" + ")[1] for name in some} == set(OBJECTIVES)
    _require_equal(run_ranks(2, train_pairs, some), alone)


@pytest.mark.slow
def test_two_ranks_equal_one_for_every_compatible_pair(pairs):
    assert len(pairs) >= 200
    _require_equal(run_ranks(2, train_pairs, pairs), train_pairs(pairs))


def _require_equal(ranks: list[dict[str, Found]], alone: dict[str, Found]) -> None:
    first, second = ranks
    for pair, expected in alone.items():
        for name, value in expected.items():
            torch.testing.assert_close(first[pair][name], value, rtol=1e-10, atol=1e-10, msg=f"{pair}: {name}")
            # Not only close: every rank must hold the same state and take the same step.
            assert torch.equal(first[pair][name], second[pair][name]), f"{pair}: {name}"


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_tiles_give_the_losses_gradients_and_state_of_the_matrix(some, alone, ranks):
    """For CLIP and cosines with every objective; for other heads with those that ask for different sums."""
    chosen = {
        name: pair
        for name, pair in some.items()
        if name.startswith(("clip ", "cosine ")) or name in [f"{head} + {sums}" for head in OTHERS for sums in SUMS]
    }
    assert len(chosen) >= len(OBJECTIVES)
    tiled, *others = run_ranks(ranks, train_pairs, chosen, 3) if ranks > 1 else [train_pairs(chosen, 3)]
    for pair in chosen:
        tolerance = 1e-12 if pair.startswith(("clip ", "cosine ")) else 1e-10
        for name, value in alone[pair].items():
            torch.testing.assert_close(tiled[pair][name], value, rtol=tolerance, atol=tolerance, msg=f"{pair}: {name}")
            assert all(torch.equal(other[pair][name], tiled[pair][name]) for other in others), f"{pair}: {name}"


def test_the_compared_pairs_have_nonzero_gradients_and_state_updates(alone):
    """Numbers that are equal because nothing happened would pass the comparison above."""
    for pair in [name for name in alone if name.startswith("cosine")]:
        assert all(value.abs().sum() > 0 for name, value in alone[pair].items() if "gradient" in name), pair
    learned = alone["cosine + nuclr objective.frozen_epochs=0 objective.eta=0.05 objective.temperature=0.2"]
    assert (learned["state zeta"] + 0.05).abs().min() > 1e-6
    assert learned["state log_u"].isfinite().all()


def train_pairs(pairs: dict[str, tuple[Plain, Plain]], tile: int | None = None) -> dict[str, Found]:
    """On this rank: a few steps of each pair; losses, gradients and state by name."""
    return {name: _train(head, build_objective(objective).double(), tile) for name, (head, objective) in pairs.items()}


def _train(head_config: Plain, objective: Objective, tile: int | None) -> Found:
    torch.manual_seed(0)
    head = build_part(head_config).double()
    objective.allocate(SAMPLES)
    image_map, text_map = (
        torch.eye(width, dtype=torch.float64).requires_grad_() for width in (IMAGE_WIDTH, TEXT_WIDTH)
    )
    named = {"image_map": image_map, "text_map": text_map, **dict(head.named_parameters())}
    named |= {f"objective {name}": parameter for name, parameter in objective.named_parameters()}
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    results, world = {}, World.from_process_group()
    # One step tells all of an objective without state.
    for step in range(STEPS if any(True for _ in objective.buffers()) else 1):
        head.resample(step)
        image, text, of = _local(step, world)
        similarity = head(
            image.map(lambda view: view @ image_map), text.map(lambda view: view @ text_map), Scope(world, tile)
        )
        if objective.needs_teacher:
            with torch.no_grad():
                teacher = head(
                    image.map(lambda view: view.flip(-1)), text.map(lambda view: view.flip(-1)), Scope(world, tile)
                )
            similarity = replace(similarity, teacher=replace(teacher, log_cosine_scale=text_map.new_zeros(())))
        loss = objective(similarity, of, Progress(step, 2 * STEPS, SAMPLES, BATCH))
        gradients = torch.autograd.grad(loss.total, list(trained.values()), materialize_grads=True)
        results[f"loss {step}"] = world.mean(loss.total)
        for name, gradient in zip(trained, gradients, strict=True):
            results[f"gradient {step} {name}"] = world.mean(gradient)
    results |= {f"state {name}": buffer.clone() for name, buffer in objective.named_buffers() if buffer.numel()}
    return results


def _overrides(name: str) -> list[str]:
    option, *changes = name.split()
    return [f"+objective={option}", *changes]


def _local(step: int, world: World) -> tuple[Features, Features, Batch]:
    """This rank's rows of step's global batch; captions cut to the rank's own longest, as a loader may cut them."""
    count = BATCH // world.size
    mine = slice(world.rank * count, (world.rank + 1) * count)
    ids = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step // 2))
    ids = ids[(step % 2) * BATCH :][:BATCH][mine]
    view = torch.rand(BATCH, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)[mine]
    captions = torch.zeros(BATCH, 6, dtype=torch.int64)
    for row in range(BATCH):
        captions[row, : 2 + row // 2] = torch.arange(1, 3 + row // 2) * (1 + (row + step) % 3)
    captions = captions[mine]
    captions = captions[:, : int((captions != 0).sum(dim=1).max())]
    image, text = image_features(BATCH, seed=10 + step), text_features(BATCH, seed=20 + step)
    return rows(image, mine), rows(text, mine), Batch(view, captions, ids)
