"""Diverged steps: the device keeps them from the weights, the host reads the result before the next step ends."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from clipzoo.distributed.world import World
from clipzoo.errors import TrainingError
from clipzoo.training.divergence import DivergenceCheck, require_finite_weights

IDS = torch.tensor([3, 1, 4])


def divergence_check(folder: Path | None, stop_requested: bool = False) -> DivergenceCheck:
    return DivergenceCheck(folder, 10.0, World(), lambda: stop_requested)


def check(divergence: DivergenceCheck, step: int, loss: float, norm: float = 1.0) -> torch.Tensor:
    return divergence.check(step, IDS, torch.tensor(loss), torch.tensor(norm), check_gradient=True)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (11.0, 1.0), (-11.0, 1.0), (1.0, math.inf)])
def test_settle_raises_for_a_diverged_step_and_lists_its_samples(tmp_path, loss, norm):
    divergence = divergence_check(tmp_path)
    assert not check(divergence, 4, 1.0)
    assert check(divergence, 5, loss, norm)
    with pytest.raises(TrainingError, match="step 5 diverged"):
        divergence.settle()
    assert json.loads((tmp_path / "broken_step_5.json").read_text())["ranks"][0]["sample_id"] == IDS.tolist()


def test_without_a_run_directory_no_file_is_written():
    divergence = divergence_check(None)
    check(divergence, 5, math.nan)
    with pytest.raises(TrainingError, match=r"step 5 diverged .* Lower optim.schedule.peak"):
        divergence.settle()


def test_the_next_step_settles_the_previous_one(tmp_path):
    divergence = divergence_check(tmp_path)
    check(divergence, 5, math.nan)
    with pytest.raises(TrainingError, match="step 5 diverged"):
        check(divergence, 6, 1.0)


def test_a_request_to_stop_is_known_once_its_step_is_settled_and_stays():
    requested = True
    divergence = DivergenceCheck(None, 10.0, World(), lambda: requested)
    check(divergence, 0, 1.0)
    assert not divergence.stop
    requested = False
    check(divergence, 1, 1.0)
    assert divergence.stop
    divergence.settle()
    assert divergence.stop


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_check_before_saving_names_a_parameter_that_is_not_finite(value):
    layers = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    require_finite_weights({"model": layers}, 7)
    layers[1].weight.data[1] = value
    with pytest.raises(
        TrainingError, match=r"^model 1\.weight held NaN or infinite values after step 7 and was not saved"
    ):
        require_finite_weights({"model": layers}, 7)


def test_the_check_before_saving_allows_infinite_buffers_but_no_nan_in_them():
    layers = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    layers.register_buffer("mask", torch.tensor([0.0, -math.inf, math.inf]))
    require_finite_weights({"objective": layers, "empty": torch.nn.Identity()}, 1)
    layers[0].running_var[0] = math.nan
    with pytest.raises(TrainingError, match=r"^objective 0\.running_var held NaN"):
        require_finite_weights({"objective": layers}, 1)


def test_the_fused_optimizer_skips_a_diverged_step():
    divergence = divergence_check(None)
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    parameter.grad = torch.ones(5)
    optimizer.found_inf = check(divergence, 0, 1.0).float()
    optimizer.step()
    assert (parameter < 1).all()
    before = [parameter.detach().clone(), *(value.clone() for value in optimizer.state[parameter].values())]
    parameter.grad = torch.full((5,), math.nan)
    optimizer.found_inf = check(divergence, 1, math.nan).float()
    optimizer.step()
    for old, new in zip(before, [parameter, *optimizer.state[parameter].values()], strict=True):
        assert torch.equal(old, new)
