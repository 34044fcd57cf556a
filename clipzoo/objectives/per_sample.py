"""Objectives with state for every sample of the dataset."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clipzoo.errors import ConfigError, number_of
from clipzoo.objectives.base import Objective, Share
from clipzoo.objectives.sample_rows import SampleRows, SharedRows
from clipzoo.types import Batch, World

IMAGE, TEXT = 0, 1
NEVER = math.inf
"""Initial value of state that no batch has set yet."""


class PerSampleObjective(Objective):
    """Base class with state in buffers [2, n]: images first, then texts, addressed by sample id.

    Every rank holds the whole state and applies all updates of the global batch. Ranks therefore agree without
    synchronisation, a checkpoint is the copy of one rank, and a run may resume on another number of ranks.

    After `share`, every rank holds the state of consecutive samples, [2, n / ranks], and `rows` exchanges that of the
    batch. Results are the same bit for bit.

    initial: name and initial value of every buffer.
    """

    def __init__(self, **initial: float) -> None:
        super().__init__()
        self._initial = initial
        self._samples, self._world = 0, World()
        for name in initial:
            self.register_buffer(name, torch.empty(2, 0))
        self.register_load_state_dict_pre_hook(_check_sizes)

    def share(self, world: World) -> None:
        self._world = world

    def allocate(self, samples: int) -> None:
        self._samples = samples
        first, end = self._own
        for name, value in self.initial_state(end - first).items():
            setattr(self, name, value)

    def initial_state(self, samples: int) -> dict[str, Tensor]:
        return {name: self.get_buffer(name).new_full((2, samples), value) for name, value in self._initial.items()}

    def shares(self) -> Mapping[str, Share]:
        if self._world.size == 1:
            return {}
        first, end = self._own
        return {name: ((2, self._samples), (0, first), (2, end - first)) for name in self._initial}

    @property
    def samples(self) -> int:
        """Number of samples n of the state, over all ranks."""
        return self._samples

    @property
    def _own(self) -> tuple[int, int]:
        """First sample whose state this rank holds, and the end of these samples."""
        return self._world.share(self._samples)

    def rows(self, batch: Batch, world: World) -> SampleRows:
        """Return the rows of all ranks' samples. Raises ConfigError if a sample id is repeated or out of range."""
        ids = self._checked_ids(batch, world)
        # State is whole on one rank, also in `value_of_unseen` of a training that divides it.
        return SampleRows(ids) if 1 in (self._world.size, world.size) else SharedRows.of(ids, world, *self._own)

    def largest(self, values: Tensor, magnitude: bool = False) -> Tensor:
        """[2, n] -> [2], the maximum over the samples of all ranks. magnitude: of the absolute values."""
        if not values.shape[1]:
            return self._world.maximum(values.new_full((2,), -math.inf))
        low, high = values.aminmax(dim=1)
        return self._world.maximum(torch.maximum(-low, high) if magnitude else high)

    def global_ids(self, batch: Batch, world: World) -> Tensor:
        """Return all ranks' sample ids in rank order, [N], with which a buffer that is whole may be addressed.

        Raises:
            ConfigError: an id is repeated or out of range, or buffers are shared among the ranks.
        """
        if self._world.size > 1:
            raise ConfigError(
                f"{type(self).__name__} addresses its state by sample id, and not through `rows`: give "
                "trainer.sample_state=whole"
            )
        return self._checked_ids(batch, world)

    def _checked_ids(self, batch: Batch, world: World) -> Tensor:
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
            raise ConfigError(
                f"sample id {wrong} is outside the {number_of(self.samples, 'sample')} of the dataset (data.shards)"
            )
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
