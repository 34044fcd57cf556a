"""Objectives with state for every sample of the dataset."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clipzoo.errors import ConfigError
from clipzoo.objectives.base import Objective
from clipzoo.types import Batch, World

IMAGE, TEXT = 0, 1
NEVER = math.inf
"""Initial value of state that no batch has set yet."""


class PerSampleObjective(Objective):
    """Base class with state in buffers [2, n]: images first, then texts, addressed by sample id.

    Every rank holds the whole state and applies all updates of the global batch. Ranks therefore agree without
    synchronisation, a checkpoint is the copy of one rank, and a run may resume on another number of ranks.

    initial: name and initial value of every buffer.
    """

    def __init__(self, **initial: float) -> None:
        super().__init__()
        self._initial = initial
        for name in initial:
            self.register_buffer(name, torch.empty(2, 0))
        self.register_load_state_dict_pre_hook(_check_sizes)

    def allocate(self, samples: int) -> None:
        for name, value in self._initial.items():
            setattr(self, name, self.get_buffer(name).new_full((2, samples), value))

    @property
    def samples(self) -> int:
        """Number of samples n of the state."""
        return self.get_buffer(next(iter(self._initial))).shape[1]

    def global_ids(self, batch: Batch, world: World) -> Tensor:
        """Return all ranks' sample ids in rank order, [N]. Raises ConfigError if one is repeated or out of range."""
        ids = world.gather(batch.sample_id)
        ordered = ids.sort().values
        repeated = (ordered[1:] == ordered[:-1]).any()
        # All faults are tested in one synchronisation with the device.
        if repeated | (ordered[0] < 0) | (ordered[-1] >= self.samples):
            self._raise_invalid(ordered)
        return ids

    def _raise_invalid(self, ordered: Tensor) -> None:
        if self.samples == 0:
            raise ConfigError("this objective has per-sample state: call allocate(samples) before training")
        if ordered[0] < 0 or ordered[-1] >= self.samples:
            wrong = int(ordered[0] if ordered[0] < 0 else ordered[-1])
            raise ConfigError(f"sample id {wrong} is outside the {self.samples} samples of the dataset (data.shards)")
        repeated = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
        raise ConfigError(
            f"sample {repeated} is twice in one global batch of {len(ordered)}, and its state cannot be updated twice "
            "at once: the dataset (data._target_) must not repeat a sample id within a step"
        )


def _check_sizes(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        stored = state.get(prefix + name)
        if stored is not None and stored.shape != buffer.shape:
            raise ConfigError(
                f"{name} in the checkpoint is for {stored.shape[-1]} samples, the dataset has {buffer.shape[-1]}: "
                "data.shards has changed since; pass another name=... to start a new run"
            )
