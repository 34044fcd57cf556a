"""Whether every step was sound, without waiting for the device: the answer is read when the next step is under way.

A broken step is known to the device at once and leaves the weights as they are. The host hears of it a step later, but
always before a checkpoint is written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from clipzoo.distributed.world import World
from clipzoo.errors import TrainingError
from clipzoo.io import write_whole


@dataclass
class _Judged:
    """A step whose answer is on its way to the host."""

    step: int
    sample_id: Tensor
    loss: Tensor
    norm: Tensor
    answer: _Answer


class Soundness:
    """Judges steps: `judge` each of them, `settle` before what must not happen after a broken one.

    folder: of the run, where the samples of a broken step are named. loss_limit: a loss beyond it, up or down, is
    broken as NaN is. stop: whether any rank was asked to stop in a step that is settled; the same on all ranks.
    """

    def __init__(self, folder: Path, loss_limit: float, world: World) -> None:
        self._folder, self._limit, self._world = folder, loss_limit, world
        self._pending: _Judged | None = None
        self.stop = False

    def judge(self, step: int, sample_id: Tensor, loss: Tensor, norm: Tensor, norm_counts: bool, asked: bool) -> Tensor:
        """0-d bool on the device: whether the step is broken on any rank. The step before is settled.

        sample_id [b], loss and norm (of the gradient) 0-d. norm_counts: an infinite gradient is broken too.
        asked: whether this rank was asked to stop.
        """
        self.settle()
        loss, norm = loss.detach(), norm.detach()
        broken = ~torch.isfinite(loss) | (loss.abs() > self._limit)
        if norm_counts:
            broken = broken | ~torch.isfinite(norm)
        anywhere = self._world.maximum(torch.stack([broken, torch.full_like(broken, asked)]).int())
        self._pending = _Judged(step, sample_id, loss, norm, _Answer(anywhere))
        return anywhere[0] > 0

    def settle(self) -> None:
        """Wait for the last answer. Raises when its step is broken; all ranks do."""
        judged, self._pending = self._pending, None
        if judged is None:
            return
        broken, stop = judged.answer.read()
        if broken:
            self._refuse(judged)
        self.stop = self.stop or bool(stop)

    def _refuse(self, judged: _Judged) -> None:
        loss, norm = float(judged.loss), float(judged.norm)
        found = self._world.gather_object({"sample_id": judged.sample_id.tolist(), "loss": loss, "gradient_norm": norm})
        path = self._folder / f"broken_step_{judged.step}.json"
        if self._world.is_first:
            write_whole(path, json.dumps({"step": judged.step, "ranks": found}))
        losses = ", ".join(f"{each['loss']:g}" for each in found[:8])
        raise TrainingError(
            f"step {judged.step} is broken (the ranks' losses: {losses}; gradient norm {norm:g}; "
            f"trainer.loss_limit={self._limit:g}): its sample ids are in {path}, and the last checkpoint is "
            "untouched. A smaller optim.schedule.peak or trainer.clip_gradient=1.0 may help"
        )


class _Answer:
    """A small tensor on its way to the host. Reading it waits for what was queued before it, not after."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._values.copy_(tensor, non_blocking=True)
        self._there: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._there = torch.cuda.Event()
            self._there.record()

    def read(self) -> list[int]:
        if self._there is not None:
            self._there.synchronize()
        return self._values.tolist()
