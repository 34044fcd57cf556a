"""Sharded checkpoints of a small state, written by one process or by several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipzoo.distributed.world import World
from clipzoo.training.checkpoint_files import (
    Keys,
    Place,
    encoded,
    map_tensors,
    name_of,
    save_sharded,
    tensors_with_paths,
)  # fmt: skip

DIVIDED = {("model", "weight"), ("optimizer", "state", 0, "exp_avg"), ("objective", "log_u"), ("few",)}
"""Tensors of which every rank has a part; along their last dimension."""


def state(step: int) -> dict[str, Any]:
    """Return a state with every kind of value that a training saves."""
    generator = torch.Generator().manual_seed(step)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "step": step,
        "data": {"samples": 12, "fingerprint": "abc"},
        "model": {"weight": random(5, 11), "bias": random(11).double(), "steps": torch.tensor(step)},
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(step)), "exp_avg": random(5, 11).bfloat16()}},
            "param_groups": [{"betas": (0.9, 0.999), "lr": 1e-3, "fused": None, "amsgrad": False, "params": [0]}],
        },
        "objective": {"log_u": random(2, 12), "seen": torch.tensor([True, False])},
        "few": torch.arange(2),
        "none": torch.zeros(2, 0),
        "scaler": {},
    }


def place(keys: Keys, shape: tuple[int, ...], world: World) -> Place:
    """Return this rank's part of a tensor."""
    if keys not in DIVIDED:
        return Place.everything(shape)
    first, end = world.share(shape[-1])
    return Place(shape, (*(0,) * (len(shape) - 1), first), (*shape[:-1], end - first))


def save(folder: Path, step: int, keep: int = 2, content: dict[str, Any] | None = None) -> Path:
    """Write the checkpoint of `step` in this process, or with all ranks of its process group."""
    content, world, path = content or state(step), World.from_process_group(), folder / f"step_{step:08d}"
    pieces = {}
    for keys, tensor in tensors_with_paths(content):
        part = place(keys, tuple(tensor.shape), world)
        pieces[name_of(keys)] = tensor[part.slices], part
    save_sharded(path, pieces, encoded(content), {"step": step}, keep, world.rank, world.background_group())
    return path


def assert_same(actual: Any, expected: Any) -> None:
    """Require equal values and types, tensors bit for bit."""
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            assert_same(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected) and len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected and type(actual) is type(expected)


def part_of(content: dict[str, Any], world: World) -> dict[str, Any]:
    """Return the state with this rank's parts of the tensors."""
    found: dict[str, Any] = map_tensors(
        content, lambda keys, tensor: tensor[place(keys, tuple(tensor.shape), world).slices]
    )
    return found
