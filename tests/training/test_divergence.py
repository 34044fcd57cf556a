"""Broken steps: the device keeps them from the weights, the host hears of them before the next step ends."""

from __future__ import annotations

import json
import math

import pytest
import torch

from clipzoo.distributed.world import World
from clipzoo.errors import TrainingError
from clipzoo.training.divergence import Soundness

IDS = torch.tensor([3, 1, 4])


def judge(soundness: Soundness, step: int, loss: float, norm: float = 1.0, asked: bool = False) -> torch.Tensor:
    return soundness.judge(step, IDS, torch.tensor(loss), torch.tensor(norm), norm_counts=True, asked=asked)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (11.0, 1.0), (-11.0, 1.0), (1.0, math.inf)])
def test_a_broken_step_is_refused_with_its_samples_when_it_is_settled(tmp_path, loss, norm):
    soundness = Soundness(tmp_path, 10.0, World())
    assert not judge(soundness, 4, 1.0)
    assert judge(soundness, 5, loss, norm)
    with pytest.raises(TrainingError, match="step 5 is broken"):
        soundness.settle()
    assert json.loads((tmp_path / "broken_step_5.json").read_text())["ranks"][0]["sample_id"] == IDS.tolist()


def test_the_next_step_settles_the_one_before(tmp_path):
    soundness = Soundness(tmp_path, 10.0, World())
    judge(soundness, 5, math.nan)
    with pytest.raises(TrainingError, match="step 5 is broken"):
        judge(soundness, 6, 1.0)


def test_a_wish_to_stop_is_heard_when_its_step_is_settled_and_not_forgotten(tmp_path):
    soundness = Soundness(tmp_path, 10.0, World())
    judge(soundness, 0, 1.0, asked=True)
    assert not soundness.stop
    judge(soundness, 1, 1.0)
    assert soundness.stop
    soundness.settle()
    assert soundness.stop


def test_the_fused_optimizer_leaves_all_as_it_is_in_a_broken_step(tmp_path):
    soundness = Soundness(tmp_path, 10.0, World())
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    parameter.grad = torch.ones(5)
    optimizer.found_inf = judge(soundness, 0, 1.0).float()
    optimizer.step()
    assert (parameter < 1).all()
    before = [parameter.detach().clone(), *(each.clone() for each in optimizer.state[parameter].values())]
    parameter.grad = torch.full((5,), math.nan)
    optimizer.found_inf = judge(soundness, 1, math.nan).float()
    optimizer.step()
    for old, new in zip(before, [parameter, *optimizer.state[parameter].values()], strict=True):
        assert torch.equal(old, new)
