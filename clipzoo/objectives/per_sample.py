"""Objectives with state for every sample of the dataset, and the moving average of SogCLR, iSogCLR and NUCLR."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipzoo.errors import ConfigError, number_of
from clipzoo.heads.base import Shape
from clipzoo.objectives.base import Objective, StateShare
from clipzoo.types import Batch, Loss, Share, World

UNSET = math.inf
"""Initial value of state that no batch has set yet."""


class PerSampleObjective(Objective):
    """Base class with state in buffers [2, n]: images first, then texts, addressed by sample id.

    Every rank holds the whole state and applies all updates of the global batch. Ranks therefore agree without
    synchronisation, a checkpoint is the copy of one rank, and a run may resume on another number of ranks.

    If `allocate` gets several ranks, each holds the state of consecutive samples, [2, n / ranks], and `SampleRows`
    exchange that of the batch. Results are the same bit for bit.

    initial: name and initial value of every buffer. samples: number of samples n of the state, over all ranks.
    """

    def __init__(self, **initial: float) -> None:
        super().__init__()
        self._initial = initial
        self.samples, self._world = 0, World()
        for name in initial:
            self.register_buffer(name, torch.empty(2, 0))
        self.register_load_state_dict_pre_hook(_check_sizes)

    def allocate(self, samples: int, world: World = World()) -> None:
        self.samples, self._world = samples, world
        first, end = self._world.share(self.samples)
        for name, value in self.initial_state(end - first).items():
            setattr(self, name, value)

    def initial_state(self, samples: int) -> dict[str, Tensor]:
        return {name: self.get_buffer(name).new_full((2, samples), value) for name, value in self._initial.items()}

    def grown(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        further = {name: max(0, self.get_buffer(name).shape[1] - state[name].shape[1]) for name in self._initial}
        initial = {name: self.initial_state(count)[name].to(state[name]) for name, count in further.items()}
        return {**state, **{name: torch.cat([state[name], values], dim=1) for name, values in initial.items()}}

    def shares(self) -> Mapping[str, StateShare]:
        if self._world.size == 1:
            return {}
        first, end = self._world.share(self.samples)
        return {name: ((2, self.samples), (0, first), (2, end - first)) for name in self._initial}

    def rows(self, batch: Batch, world: World) -> SampleRows:
        """Return the rows of all ranks' samples. Raises ConfigError if a sample id is repeated or out of range."""
        ids = world.gather(batch.sample_id)
        ordered = ids.sort().values
        repeated = ordered[1:] == ordered[:-1]
        # One synchronisation with the device tests for all faults.
        if repeated.any() | (ordered[0] < 0) | (ordered[-1] >= self.samples):
            if self.samples == 0:
                raise ConfigError("this objective has per-sample state: call allocate(samples) before training")
            if ordered[0] < 0 or ordered[-1] >= self.samples:
                wrong = int(ordered[0] if ordered[0] < 0 else ordered[-1])
                raise ConfigError(
                    f"sample id {wrong} is outside the {number_of(self.samples, 'sample')} of the dataset (data.shards)"
                )
            raise ConfigError(
                f"sample {int(ordered[1:][repeated][0])} is twice in one global batch of {len(ordered)}, and its state "
                "cannot be updated twice at once: the dataset (data._target_) must not repeat a sample id within a step"
            )
        own = slice(world.rank * len(batch), (world.rank + 1) * len(batch))
        # State is whole in a single process, and in `value_of_unseen` even if training divides it.
        if 1 in (self._world.size, world.size):
            return SampleRows(len(ids), own, World(), torch.arange(len(ids), device=ids.device), ids)
        first, end = self._world.share(self.samples)
        places = ((ids >= first) & (ids < end)).nonzero().flatten()
        return SampleRows(len(ids), own, world, places, ids[places] - first)

    def largest(self, values: Tensor, magnitude: bool = False) -> Tensor:
        """[2, n] -> [2], the maximum over the samples of all ranks. magnitude: of the absolute values."""
        if not values.shape[1]:
            return self._world.maximum(values.new_full((2,), -math.inf))
        low, high = values.aminmax(dim=1)
        return self._world.maximum(torch.maximum(-low, high) if magnitude else high)


def _check_sizes(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        stored = state.get(prefix + name)
        if stored is not None and stored.shape != buffer.shape:
            raise ConfigError(
                f"{name} in the checkpoint is for {stored.shape[-1]} samples, the dataset has {buffer.shape[-1]}: "
                "data.shards has changed since; pass another name=... to start a new run"
            )


# Rows of per-sample state: those of the samples of a global batch.


BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size in bytes."""


@dataclass(frozen=True)
class SampleRows:
    """The rows of a global batch of N samples in buffers [2, n], of which every rank holds the whole or a part.

    count: N. own: places of this rank's samples in the batch. world: ranks among which the buffers are divided.
    places: places in the batch of the samples whose state this rank holds. columns: their places in its buffers.
    """

    count: int
    own: slice
    world: World
    places: Tensor
    columns: Tensor

    def __len__(self) -> int:
        return self.count

    def read(self, buffer: Tensor) -> Tensor:
        """Return the state of both modalities, [2, N]."""
        # One rank has the bits of a value, the others zeros: the sum is exact for every value.
        bits = BITS[buffer.element_size()]
        values = torch.zeros(2, self.count, dtype=bits, device=buffer.device)
        values[:, self.places] = buffer[:, self.columns].view(bits)
        return self.world.sum(values).view(buffer.dtype)

    def write(self, buffer: Tensor, modality: int, values: Tensor) -> None:
        """Store the state of one modality. values: [N], the same on all ranks."""
        buffer[modality, self.columns] = values[self.places].to(buffer.dtype)


# Moving-average estimator of SogCLR, iSogCLR and NUCLR, in the log domain.
#
# A global contrastive loss contains the log of a sum over all n samples. Its gradient divides the terms of a batch by
# this sum, which is tracked for every anchor as a moving average u of batch estimates (SogCLR, Yuan et al. 2022). At
# tau = 0.01 exp(. / tau) overflows fp32, log u does not.


class MovingAverageObjective(PerSampleObjective):
    """Base class with log u of every anchor of both modalities.

    gamma: weight of a batch estimate in u; the first estimate has weight 1. initial: further state of the subclass.
    """

    own_temperature = True
    needs_negatives = True
    value_log = "objective"
    moves_state = False
    """True if ranks gather the gradient of a state of each sample, such as its temperature."""
    log_u: Tensor

    def __init__(self, gamma: Share, **initial: float) -> None:
        super().__init__(log_u=UNSET, **initial)
        self._gamma = gamma

    def cost(self, shape: Shape, embedding: float, views: float) -> float:
        """The sample's id, and for both modalities the new sum and the gradient of a state that moves along it."""
        return 24 if self.moves_state else 16

    def track(
        self, modality: int, samples: SampleRows, log_estimates: Tensor, world: World, gamma: float | None = None
    ) -> Tensor:
        """Log batch estimates of local anchors, [b] -> their log u, [b]. In training mode all ranks store all log u.

        An estimate of zero, of an anchor without negatives, leaves u as it is. gamma: None for the constructor's.
        """
        gamma = self._gamma if gamma is None else gamma
        log_new = world.gather(log_estimates)
        log_old = samples.read(self.log_u)[modality].to(log_new.dtype)
        blended = log_new
        if gamma < 1:
            blended = torch.logaddexp(log_old + math.log1p(-gamma), log_new + math.log(gamma))
        log_u = torch.where(log_old == UNSET, log_new, blended).where(log_new > -math.inf, log_old)
        if self.training:
            samples.write(self.log_u, modality, log_u)
        return log_u[samples.own]

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """Return log u: high for samples that resemble their negatives."""
        return self.only_seen("log_negatives", self.log_u)

    def only_seen(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """[2, n] -> {name_image, name_text}, [n] each, nan for unseen samples."""
        images, texts = values.masked_fill(self.log_u == UNSET, math.nan)
        return {f"{name}_image": images, f"{name}_text": texts}


def sum_over_anchors(images: tuple[Tensor, Tensor], texts: tuple[Tensor, Tensor]) -> Loss:
    """Surrogate loss and value of the objective of image anchors and of text anchors -> their sum, values as logs."""
    (image_loss, image_value), (text_loss, text_value) = images, texts
    values = {"objective_image_anchors": image_value, "objective_text_anchors": text_value}
    return Loss(image_loss + text_loss, {"objective": image_value + text_value, **values})
