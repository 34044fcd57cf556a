"""Weights and optimizer state that FSDP divides come back on any number of ranks, divided or whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from clipzoo.distributed.world import World
from clipzoo.training import checkpoint_files
from clipzoo.training.checkpoint_files import encoded, local, map_tensors
from clipzoo.training.checkpoints import Sharding
from tests.support.ranks import run_ranks
from tests.support.sharded import assert_same

FACTS: dict[str, Any] = {"step": 3}


@pytest.mark.medium
def test_a_state_is_the_same_after_it_was_saved_by_two_ranks_as_shards_and_read_in_any_division(tmp_path):
    """Saved by fsdp, read by one rank, saved as one file, read by fsdp on three ranks with shards of uneven sizes."""
    saved, _ = run_ranks(2, train_and_save, tmp_path)
    content = checkpoint_files.read(tmp_path / "step_00000003")
    assert_same(content["model"], saved["model"])
    assert_same(content["optimizer"], saved["optimizer"])
    model, optimizer = parts()
    optimizer.load_state_dict(content["optimizer"])
    model.load_state_dict(content["model"])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint_files.save(tmp_path, 4, state, FACTS, keep=2)
    for name in ("step_00000003", "step_00000004.pt"):
        restored = run_ranks(3, restore, tmp_path / name)
        assert_same(restored[0]["model"], saved["model"])
        assert_same(restored[0]["optimizer"], saved["optimizer"])
        # Half a dozen numbers besides: the state's steps, and the batch norm, which is whole on every rank.
        assert max(rank["held"] for rank in restored) < 0.4 * saved["whole"]


def parts(divided: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.BatchNorm1d(12), nn.Linear(12, 30))
    if divided:
        mesh = init_device_mesh("cpu", (World.from_process_group().size,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def sharding(model: nn.Module, optimizer: torch.optim.Optimizer) -> Sharding:
    return Sharding({"model": model}, {"model": model, "optimizer": optimizer}, World.from_process_group())


def train_and_save(folder: Path) -> dict[str, Any]:
    model, optimizer = parts(divided=True)
    world = World.from_process_group()
    torch.manual_seed(world.rank)
    model(torch.randn(6, 7)).square().mean().backward()
    with torch.no_grad():
        # Layers that are whole are synchronised by hand, as DDP does; statistics differ.
        for parameter in model[1].parameters():
            parameter.grad = world.mean(parameter.grad)
    for group in optimizer.param_groups:
        group["foreach"] = False
    optimizer.step()
    state = {"step": 3, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    pieces, group = sharding(model, optimizer).pieces(state, copy=True), world.background_group()
    path = folder / "step_00000003"
    checkpoint_files.save_sharded(path, pieces, encoded(state), FACTS, 2, world.rank, group)
    whole = gathered(state)
    return {**whole, "whole": sum(tensor.numel() for tensor in whole["model"].values())}


def restore(path: Path) -> dict[str, Any]:
    model, optimizer = parts(divided=True)
    state = sharding(model, optimizer).read(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    held = sum(local(tensor).numel() for tensor in state["model"].values())
    return {**gathered({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), "held": held}


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    def whole(keys: Any, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()

    found: dict[str, Any] = map_tensors(state, whole)
    return found
