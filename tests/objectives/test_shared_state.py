"""Per-sample state that is divided among ranks gives what whole state gives, bit for bit, in a part of the memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from clipzoo.build import build_objective, build_part
from clipzoo.distributed.world import World
from clipzoo.heads.pairs import Scope
from clipzoo.objectives.nuclr import NUCLR
from clipzoo.training import checkpoint_files
from clipzoo.training.checkpoints import Sharding
from clipzoo.training.diagnostics import summarise_samples
from clipzoo.types import Batch, Features, Progress
from scripts.compatibility import composed
from tests.support.heads import IMAGE_WIDTH, TEXT_WIDTH, head_config
from tests.support.ranks import run_ranks

SAMPLES, BATCH, STEPS = 13, 4, 5
OBJECTIVES = [
    "nuclr objective.frozen_epochs=0 objective.eta=0.05 objective.temperature=0.2",
    "nuclr objective.frozen_epochs=0 objective.eta=0.05 objective.xi_update=step",
    "sogclr",
    "isogclr",
    "fastclip objective.version=v2 objective.temperature=0.2 objective.temperature_rate=0.05",
    "fastclip",
    "glofnd objective.start=0 objective.alpha=0.3 objective.threshold_rate=0.3 objective.temperature=0.2",
]
BYTES = {"nuclr": 24, "isogclr": 24, "sogclr": 8, "fastclip": 8, "fastclip objective.version=v2": 32, "glofnd": 32}
"""Bytes of state for each sample in float32, as docs/how_to/scaling.md states."""


@cache
def config_of(name: str) -> dict[str, Any]:
    option, *changes = name.split()
    return composed(f"+objective={option}", *changes)


def objective_of(name: str) -> Any:
    return build_objective(config_of(name))


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 64])
def test_a_rank_holds_its_share_of_the_stated_bytes(name, ranks):
    samples, held = 1001, []
    for rank in range(ranks):
        objective = objective_of(name)
        objective.allocate(samples, World(rank, ranks))
        assert objective.samples == samples
        held.append(sum(buffer.nbytes for buffer in objective.buffers() if buffer.dim() == 2))
    assert sum(held) == BYTES[name] * samples
    assert BYTES[name] * 12_000_000 < 400e6
    assert max(held) == BYTES[name] * -(-samples // ranks)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("ranks", "names"), [(2, OBJECTIVES[:1]), pytest.param(4, OBJECTIVES, marks=pytest.mark.slow)], ids=["2", "4"]
)
def test_divided_state_gives_losses_gradients_state_and_summaries_bit_for_bit(ranks, names):
    results = run_ranks(ranks, train_both_ways, names)
    for name in names:
        whole = results[0][name, "whole"]
        for rank in results:
            assert rank[name, "divided"]["summary"].keys() == whole["summary"].keys()
            for statistic, expected in whole["summary"].items():
                actual = rank[name, "divided"]["summary"][statistic]
                for key in ("seen", "counts", "edges", "highest", "lowest"):
                    assert actual[key] == expected[key], (name, statistic, key)
                assert (actual["mean"], actual["std"]) == pytest.approx((expected["mean"], expected["std"]), rel=1e-6)
        for key, value in whole["values"].items():
            parts = [rank[name, "divided"]["values"][key] for rank in results]
            actual = torch.cat(parts, dim=1) if key in results[0][name, "divided"]["shared"] else parts[0]
            assert torch.equal(actual, value), f"{name}: {key}"
        assert whole["values"]["state log_u"].isfinite().any()


def train_both_ways(names: list[str]) -> dict[tuple[str, str], Any]:
    return {(name, way): _train(objective_of(name), way == "divided") for name in names for way in ("whole", "divided")}


def _train(objective: Any, divided: bool) -> dict[str, Any]:
    world, head = World.from_process_group(), build_part(head_config("cosine"))
    torch.manual_seed(0)
    objective.allocate(SAMPLES, world if divided else World())
    values: dict[str, Tensor] = {}
    count = BATCH // world.size
    mine = slice(world.rank * count, (world.rank + 1) * count)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randperm(SAMPLES, generator=generator)[:BATCH][mine]
        image, text = (
            torch.randn(BATCH, width, generator=generator)[mine].requires_grad_() for width in (IMAGE_WIDTH, TEXT_WIDTH)
        )
        similarity = head(Features(image, image[:, None]), Features(text, text[:, None]), Scope(world))
        loss = objective(similarity, Batch(image, text, ids), Progress(step, 2 * STEPS, SAMPLES, BATCH))
        gradients = torch.autograd.grad(world.gather(loss.total[None]).mean(), (image, text))
        values |= {f"loss {step}": world.mean(loss.total), f"gradient {step}": world.gather(gradients[0])}
        values[f"logs {step}"] = world.mean(torch.stack([value.detach() for value in loss.logs.values()]))
    values |= {f"state {name}": buffer.clone() for name, buffer in objective.named_buffers()}
    shared = {f"state {name}" for name in objective.shares()}
    return {"values": values, "shared": shared, "summary": summarise_samples(objective, 3, world)}


def test_the_largest_value_is_that_of_all_ranks_and_of_no_sample_it_is_minus_infinity():
    objective = objective_of("nuclr")
    assert isinstance(objective, NUCLR)
    values = torch.tensor([[1.0, -3.0], [2.0, 0.0]])
    assert objective.largest(values).tolist() == [1.0, 2.0]
    assert objective.largest(values, magnitude=True).tolist() == [3.0, 2.0]
    assert objective.largest(values[:, :0]).tolist() == [-torch.inf, -torch.inf]


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("samples", [SAMPLES, 3 * SAMPLES])
def test_the_state_of_a_dataset_that_has_grown_is_kept_and_has_initial_values_for_new_samples(tmp_path, samples, name):
    whole = objective_of(name)
    whole.allocate(SAMPLES)
    for number, buffer in enumerate(whole.buffers()):
        buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape) + 1000 * number)
    path = checkpoint_files.save(tmp_path, 4, {"step": 4, "objective": whole.state_dict()}, {}, keep=1)
    parts = []
    for rank in range(3):
        objective = objective_of(name)
        objective.allocate(samples, World(rank, 3))
        stored = Sharding({"objective": objective}, {"objective": objective}, World(rank, 3)).read(path, "step")
        objective.load_state_dict(objective.grown(stored["objective"]))
        parts.append(dict(objective.named_buffers()))
    fresh = objective_of(name)
    fresh.allocate(samples)
    for buffer, value in fresh.named_buffers():
        # A value that is not one for each sample, such as NUCLR's xi, is whole on all ranks.
        divided = value.dim() == 2
        actual = torch.cat([part[buffer] for part in parts], dim=1) if divided else parts[0][buffer]
        count = SAMPLES if divided else value.shape[-1]
        assert torch.equal(actual[..., :count], whole.get_buffer(buffer)), buffer
        assert torch.equal(actual[..., count:], value[..., count:]), buffer
