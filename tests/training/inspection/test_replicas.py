"""Weights that every rank holds are compared bit for bit: a flipped bit names its rank and its tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clipzoo.distributed.world import World
from clipzoo.errors import TrainingError
from clipzoo.training.divergence import Replicas, _sum_of_bits
from clipzoo.training.parts import Step
from clipzoo.types import Loss, Progress
from tests.support.faults import flip_bit
from tests.support.ranks import run_ranks
from tests.support.runs import log_of_end, start

HEAD = "head._target_=tests.support.faults.FlippingHead"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("count", [1, 7, 8, 33])
def test_every_single_bit_changes_the_sum(dtype, count):
    values = (10 * torch.randn(count)).abs().to(dtype)
    numbers = values.view(torch.uint8)
    before = _sum_of_bits(values)
    for place in range(len(numbers)):
        for bit in range(8):
            numbers[place] ^= 1 << bit
            assert _sum_of_bits(values) != before
            numbers[place] ^= 1 << bit
    assert _sum_of_bits(values) == before


def compared(flipped: dict[int, str]) -> str:
    """Train equal layers on all ranks, flip a bit of a weight or of its moments at the end; return the message."""
    world = World.from_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters())
    replicas = Replicas(2, {"model": model}, optimizer, world)
    replicas.begin(Progress(0, 4, 8, 2))
    for number in (1, 2, 3, 4):
        optimizer.zero_grad()
        model(torch.ones(2, 3).double()).square().sum().backward()
        optimizer.step()
        if number == 4 and (kind := flipped.get(world.rank)) is not None:
            weight = model[1].weight
            flip_bit(weight if kind == "weight" else optimizer.state[weight][kind])
        step = Step(Progress(number, 4, 8, 2), Loss(torch.zeros(()), {}), torch.zeros(()), 0.1)
        try:
            replicas.after(step)
        except TrainingError as error:
            return f"{number}: {error}"
    return "equal"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("ranks", "flipped", "expected"),
    [
        (3, {}, None),
        (3, {1: "weight"}, ("rank 1 (", "differ from those of the other ranks: first in model 1.weight")),
        (3, {2: "exp_avg_sq"}, ("rank 2 (", "first in exp_avg_sq of model 1.weight")),
        (2, {1: "weight"}, ("rank 0 (", "rank 1 (", "differ from each other: first in model 1.weight")),
    ],
)
def test_the_rank_that_the_majority_does_not_equal_is_named_with_the_tensor(ranks, flipped, expected):
    first, *others = run_ranks(ranks, compared, flipped)
    assert all(other == first for other in others)
    if expected is None:
        assert first == "equal"
        return
    assert first.startswith("4: after step 4 the weights of ") and "All ranks were equal after step 2" in first
    for part in expected:
        assert part in first


@pytest.mark.medium
def test_a_bit_that_flips_on_one_of_two_ranks_ends_a_run_before_the_checkpoint_of_the_step(tiny_shards, tmp_path):
    changes = ("trainer.check_replicas=2", HEAD)
    ranks = start(tiny_shards, tmp_path, *changes, ranks=2, fault="flips:5:1")
    log = "".join(log_of_end(rank, 1) for rank in ranks)
    assert "after step 6 the weights of rank 0 (" in log and "differ from each other: first in model head." in log
    assert "All ranks were equal after step 4" in log and "Traceback" not in log
    assert sorted(path.stem for path in (tmp_path / "run" / "checkpoints").glob("*.json"))[-1] == "step_00000004"


@pytest.mark.slow
def test_with_divided_weights_the_head_which_every_rank_holds_is_compared(tiny_shards, tmp_path):
    changes = ("trainer.check_replicas=2", HEAD, "trainer.parallel=fsdp", "trainer.global_batch=18")
    ranks = start(tiny_shards, tmp_path, *changes, ranks=3, fault="flips:5:1")
    log = "".join(log_of_end(rank, 1) for rank in ranks)
    assert "after step 6 the weights of rank 1 (" in log and "first in model head." in log
