"""Objectives that remember numbers of every sample of the data set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.objectives.base import Objective
from clipzoo.types import Batch

IMAGE, TEXT = 0, 1
NEVER = math.inf
"""Stands for a number that no batch has set yet."""


class PerSampleObjective(Objective):
    """Keeps the state in buffers [2, n]: images first, then texts, addressed by the stable sample id.

    Every rank holds all of it and applies every update of the global batch, so ranks agree without being synchronised,
    a checkpoint is one rank's copy, and a resume may change the number of ranks.

    initial: the name of each buffer and the value that it starts from.
    """

    def __init__(self, **initial: float) -> None:
        super().__init__()
        self._initial = initial
        for name in initial:
            self.register_buffer(name, torch.empty(2, 0))
        self.register_load_state_dict_pre_hook(_refuse_other_size)

    def allocate(self, samples: int) -> None:
        for name, value in self._initial.items():
            setattr(self, name, self.get_buffer(name).new_full((2, samples), value))

    @property
    def samples(self) -> int:
        """n, the number of samples that there is state for."""
        return self.get_buffer(next(iter(self._initial))).shape[1]

    def global_ids(self, batch: Batch, world: World) -> Tensor:
        """[N], every rank's sample ids in rank order; all different and within the state."""
        ids = world.gather(batch.sample_id)
        ordered = ids.sort().values
        repeated = (ordered[1:] == ordered[:-1]).any()
        # One look at the device for all faults.
        if repeated | (ordered[0] < 0) | (ordered[-1] >= self.samples):
            self._refuse(ordered)
        return ids

    def _refuse(self, ordered: Tensor) -> None:
        if self.samples == 0:
            raise ConfigError("this objective has state for each sample: call allocate(samples) before training")
        if ordered[0] < 0 or ordered[-1] >= self.samples:
            wrong = int(ordered[0] if ordered[0] < 0 else ordered[-1])
            raise ConfigError(f"sample id {wrong} is outside the {self.samples} samples of the data set (data.shards)")
        twice = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
        raise ConfigError(
            f"sample {twice} is twice in one global batch of {len(ordered)}, and its state cannot be updated twice at "
            "once: the data (data._target_) must not repeat a sample id within a step"
        )


def _refuse_other_size(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        stored = state.get(prefix + name)
        if stored is not None and stored.shape != buffer.shape:
            raise ConfigError(
                f"the checkpoint's {name} is for {stored.shape[-1]} samples, the data set has {buffer.shape[-1]}: "
                "data.shards has changed since; give another name=... to start anew"
            )
