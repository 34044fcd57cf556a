"""Detect NaN and diverging steps asynchronously; the result is read one step later.

The device knows at once that a step has diverged and leaves the weights unchanged. The host reads the result while the
next step is under way, but always before a checkpoint is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from clipzoo.distributed.world import World
from clipzoo.errors import TrainingError
from clipzoo.io import write_whole
from clipzoo.training.inspection.spikes import Spikes
from clipzoo.training.sharded_checkpoints import local


@dataclass
class _PendingStep:
    """A step whose result the host has not read yet."""

    step: int
    sample_id: Tensor
    loss: Tensor
    gradient_norm: Tensor
    limits: Tensor | None
    result: _HostCopy


class DivergenceCheck:
    """Checks every step with `check`; `settle` reads the result of the last one.

    folder: run directory, where the samples of a diverged step are listed; None: no file is written.
    loss_limit: a larger absolute loss counts as divergence, as NaN does.
    stop_requested: returns True once this rank has been asked to stop. Its answer travels with the check.
    spikes: what follows a spike; None judges no step.
    """

    stop = False
    """True once any rank had been asked to stop in a settled step; equal on all ranks."""

    def __init__(
        self,
        folder: Path | None,
        loss_limit: float,
        world: World,
        stop_requested: Callable[[], bool] = lambda: False,
        spikes: Spikes | None = None,
    ) -> None:
        self._folder, self._limit, self._world, self._stop_requested = folder, loss_limit, world, stop_requested
        self.spikes = spikes
        self._pending: _PendingStep | None = None

    @property
    def leaves_out(self) -> bool:
        """True if training continues without the batch of a step that has diverged or is a spike."""
        return self.spikes is not None and self.spikes.leaves_out

    def history(self) -> dict[str, Spikes]:
        """Return what a checkpoint holds of earlier steps, by name."""
        return {} if self.spikes is None else {"spikes": self.spikes}

    def check(self, step: int, sample_id: Tensor, loss: Tensor, gradient_norm: Tensor, check_gradient: bool) -> Tensor:
        """Settle the previous step and check this one.

        sample_id: [b]. loss, gradient_norm: 0-d. check_gradient: an infinite gradient counts as divergence too.

        Returns:
            0-d bool on the device, True if the step has diverged on any rank, or is a spike, and must not change the
            weights.
        """
        self.settle()
        loss, gradient_norm = loss.detach(), gradient_norm.detach()
        diverged = ~torch.isfinite(loss) | (loss.abs() > self._limit)
        if check_gradient:
            diverged = diverged | ~torch.isfinite(gradient_norm)
        stop = torch.full_like(diverged, self._stop_requested())
        spike, limits = self.spikes.judge(loss, gradient_norm) if self.spikes else (torch.zeros_like(diverged), None)
        on_any_rank = self._world.maximum(torch.stack([diverged, stop, spike]).int())
        self._pending = _PendingStep(step, sample_id, loss, gradient_norm, limits, _HostCopy(on_any_rank))
        updates = self.spikes is None or self.spikes.policy == "report"
        return on_any_rank[0] > 0 if updates else (on_any_rank[0] + on_any_rank[2]) > 0

    def settle(self) -> None:
        """Wait for the result of the last step.

        Raises:
            TrainingError: the step has diverged, or is a spike that stops the training; on all ranks.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        diverged, stop, spike = pending.result.read()
        if diverged and not self.leaves_out:
            self._raise(pending)
        if self.spikes is not None and pending.limits is not None:
            values = pending.loss, pending.gradient_norm
            self.spikes.settle(pending.step + 1, bool(diverged or spike), pending.sample_id, values, pending.limits)
        self.stop = self.stop or bool(stop)

    def _raise(self, pending: _PendingStep) -> None:
        loss, norm = float(pending.loss), float(pending.gradient_norm)
        ranks = self._world.gather_object(
            {"sample_id": pending.sample_id.tolist(), "loss": loss, "gradient_norm": norm}
        )
        samples = ""
        if self._folder is not None:
            path = self._folder / f"broken_step_{pending.step}.json"
            samples = f" The sample ids are in {path}; the last checkpoint is untouched."
            if self._world.is_first:
                write_whole(path, json.dumps({"step": pending.step, "ranks": ranks}))
        losses = ", ".join(f"{rank['loss']:g}" for rank in ranks[:8])
        raise TrainingError(
            f"step {pending.step} diverged (losses of the ranks: {losses}; gradient norm {norm:g}; "
            f"trainer.loss_limit={self._limit:g}).{samples} Lower optim.schedule.peak or set trainer.clip_gradient=1.0"
        )


def require_finite_weights(modules: Mapping[str, nn.Module], step: int) -> None:
    """Check weights that are about to be saved, in one pass on their device.

    Of sharded weights this rank's part is checked.

    modules: by the names of the message. step: number of steps done. Parameters must be finite. Buffers may be
    infinite, as masks and the state of samples that were never seen are, but not NaN.

    Raises:
        TrainingError: a tensor is not finite; its name is in the message.
    """
    for name, module in modules.items():
        if _largest(module.parameters()).isfinite() and not _largest(module.buffers()).isnan():
            continue
        broken = [key for key, value in module.named_parameters() if not local(value).isfinite().all()]
        broken += [key for key, value in module.named_buffers() if local(value).isnan().any()]
        more = f" and {len(broken) - 1} more tensors" if len(broken) > 1 else ""
        raise TrainingError(
            f"{name} {broken[0]}{more} held NaN or infinite values after step {step} and was not saved; the last "
            "checkpoint is untouched. Lower optim.schedule.peak or set trainer.clip_gradient=1.0"
        )


def _largest(tensors: Iterable[Tensor]) -> Tensor:
    """Return the largest magnitude of all floating-point tensors, 0-d; NaN if one of them holds NaN."""
    parts = [local(tensor.detach()) for tensor in tensors if tensor.is_floating_point()]
    values = [part for part in parts if part.numel()]
    return nn.utils.get_total_norm(values, math.inf)


class _HostCopy:
    """A small tensor on its way to the host. Reading it waits only for work that was queued before it."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._values.copy_(tensor, non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()
