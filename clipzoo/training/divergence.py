"""Detect NaN and diverging steps asynchronously; the result is read one step later.

The device knows at once that a step has diverged and leaves the weights unchanged. The host reads the result while the
next step is under way, but always before a checkpoint is written.
"""

from __future__ import annotations

import json
import logging
import math
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipzoo import io
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, TrainingError, first_names
from clipzoo.training.checkpoint_files import is_dtensor, local
from clipzoo.training.parts import Hook, Step
from clipzoo.training.settings import SpikeSettings
from clipzoo.types import Progress

log = logging.getLogger(__name__)

SMALLEST_DEVIATIONS = 0.01, 0.1
"""Lower bounds of the deviations of loss and gradient norm, as shares of their medians: on a plateau they are small."""
MOST_IN_A_ROW = 10
"""Largest number of consecutive skipped steps. More mean a diverging training, not a few bad batches."""


class DivergenceCheck:
    """Checks every step with `check`; `settle` reads the result of the last one.

    folder: run directory, where the samples of a diverged step are listed; None: no file is written.
    loss_limit: a larger absolute loss counts as divergence, as NaN does.
    stop_requested: returns True once this rank has been asked to stop. The check sends it to all ranks.
    spikes: the response to spikes; None: spikes are not detected.
    leaves_out: True if training continues without the batch of a step that has diverged or is a spike.
    stop: True once any rank had been asked to stop in a settled step; equal on all ranks.
    """

    def __init__(
        self,
        folder: Path | None,
        loss_limit: float,
        world: World,
        stop_requested: Callable[[], bool] = lambda: False,
        spikes: Spikes | None = None,
    ) -> None:
        self._folder, self._limit, self._world, self._stop_requested = folder, loss_limit, world, stop_requested
        self.spikes, self.leaves_out = spikes, spikes is not None and spikes.leaves_out
        self.stop = False
        # Step, sample ids, (loss, gradient norm), limits of a spike, result [3], and the event of its copy to the host.
        self._pending: tuple[Any, ...] | None = None

    def check(self, step: int, sample_id: Tensor, loss: Tensor, gradient_norm: Tensor, check_gradient: bool) -> Tensor:
        """Settle the previous step and check this one.

        sample_id: [b]. loss, gradient_norm: 0-d. check_gradient: an infinite gradient counts as divergence too. Returns
        a 0-d bool on the device: the step has diverged on any rank, or is a spike, and must not change the weights.
        """
        self.settle()
        loss, gradient_norm = loss.detach(), gradient_norm.detach()
        diverged = ~torch.isfinite(loss) | (loss.abs() > self._limit)
        if check_gradient:
            diverged = diverged | ~torch.isfinite(gradient_norm)
        stop = torch.full_like(diverged, self._stop_requested())
        spike, limits = self.spikes.judge(loss, gradient_norm) if self.spikes else (torch.zeros_like(diverged), None)
        on_any_rank = self._world.maximum(torch.stack([diverged, stop, spike]).int())
        result = torch.empty(on_any_rank.shape, dtype=on_any_rank.dtype, pin_memory=on_any_rank.is_cuda)
        result.copy_(on_any_rank, non_blocking=True)
        copied = torch.cuda.Event() if on_any_rank.is_cuda else None
        if copied is not None:
            # Reading the result waits only for work that was queued before it.
            copied.record()
        self._pending = step, sample_id, (loss, gradient_norm), limits, result, copied
        updates = self.spikes is None or self.spikes.policy == "report"
        return on_any_rank[0] > 0 if updates else (on_any_rank[0] + on_any_rank[2]) > 0

    def settle(self) -> None:
        """Read the last step's result. Raises TrainingError on all ranks if it diverged or is a spike that stops."""
        if self._pending is None:
            return
        step, sample_id, values, limits, result, copied = self._pending
        self._pending = None
        if copied is not None:
            copied.synchronize()
        diverged, stop, spike = result.tolist()
        if diverged and not self.leaves_out:
            loss, norm = map(float, values)
            ranks = self._world.gather_object({"sample_id": sample_id.tolist(), "loss": loss, "gradient_norm": norm})
            samples = ""
            if self._folder is not None:
                path = self._folder / f"broken_step_{step}.json"
                samples = f" The sample ids are in {path}; the last checkpoint is untouched."
                if self._world.is_first:
                    io.write_whole(path, json.dumps({"step": step, "ranks": ranks}))
            losses = ", ".join(f"{rank['loss']:g}" for rank in ranks[:8])
            raise TrainingError(
                f"step {step} diverged (losses of the ranks: {losses}; gradient norm {norm:g}; "
                f"trainer.loss_limit={self._limit:g}).{samples} Lower optim.schedule.peak or set "
                "trainer.clip_gradient=1.0"
            )
        if self.spikes is not None:
            self.spikes.settle(step + 1, bool(diverged or spike), sample_id, values, limits)
        self.stop = self.stop or bool(stop)


class Spikes(Hook):
    """Detects spikes of a training and acts on them; see conf/trainer/default.yaml.

    The loss and the gradient norm of a step are compared with the last `window` steps. A value is a spike if it
    exceeds median + threshold * deviation, where the deviation is the median absolute deviation from the median, and at
    least 1 % of the median loss or 10 % of the median gradient norm. No step is judged before the window is full.
    Spikes enter the window too: they hardly change the median and the deviation.

    Each spike is described in spikes/step_N.json of the run directory, and sent to the logger.

    names: returns the names of samples. log: called with the step and the values of a spike. rewind_due: True from the
    spike until the training has gone back to the last regular checkpoint. Others as for `DivergenceCheck`.
    """

    key = "spikes"
    rewind_due = False

    def __init__(
        self,
        settings: SpikeSettings,
        world: World,
        folder: Path | None,
        names: Callable[[Sequence[int]], Sequence[str]],
        log: Callable[[int, Mapping[str, Any]], None],
    ) -> None:
        if settings.policy == "rewind" and folder is None:
            raise ConfigError("trainer.spikes.policy=rewind goes back to a checkpoint: give folder=...")
        self.policy, self._threshold, self._world, self._names = settings.policy, settings.threshold, world, names
        self.leaves_out = self.policy in ("skip", "rewind")
        self._log, self._folder = log, folder and folder / "spikes"
        self._values = torch.full((settings.window, 2), torch.nan, dtype=torch.float64, device=world.device)
        self._in_a_row = 0

    def begin(self, progress: Progress) -> None:
        """Remove the descriptions of later spikes, left by a killed run."""
        for path in self._folder.glob("step_*.json") if self._folder and self._world.is_first else ():
            if int(path.stem.removeprefix("step_")) > progress.step:
                path.unlink()

    def judge(self, loss: Tensor, gradient_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether a step is a spike, and add it to the window. Collective; the answer is equal on all ranks.

        loss, gradient_norm: 0-d; their means over ranks are judged. A step with a value that is not finite has
        diverged: it is not added. Returns a 0-d bool on the device, and [2], the limits of loss and gradient norm.
        """
        values = self._world.mean(torch.stack([loss.detach(), gradient_norm.detach()]).double())
        # On a GPU torch's median is not deterministic.
        median = self._values.quantile(0.5, dim=0, interpolation="lower")
        deviation = (self._values - median).abs().quantile(0.5, dim=0, interpolation="lower")
        deviation = deviation.maximum(median.abs() * median.new_tensor(SMALLEST_DEVIATIONS))
        limits = median + self._threshold * deviation
        self._values = torch.where(values.isfinite().all(), torch.cat([self._values[1:], values[None]]), self._values)
        return (values > limits).any(), limits

    def settle(self, step: int, is_spike: bool, sample_id: Tensor, values: Sequence[Tensor], limits: Tensor) -> None:
        """Respond to a step if it is a spike.

        step: counted from 1. is_spike: equal on all ranks, True also for a diverged step that is left out. values: loss
        and gradient norm. Raises TrainingError on all ranks if the policy is "stop", or too many spikes are in a row.
        """
        if not is_spike:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        loss, norm = (float(value) for value in values)
        ranks = self._world.gather_object((loss, sample_id.tolist()))
        loss = sum(loss for loss, _ in ranks) / len(ranks)
        largest_loss, largest_norm = limits.tolist()
        spike = {
            "loss": loss, "gradient_norm": norm, "largest_loss": largest_loss, "largest_gradient_norm": largest_norm,
        }  # fmt: skip
        location = ""
        if self._folder is not None:
            path = self._folder / f"step_{step:08d}.json"
            location = f"; its samples are in {path}"
            if self._world.is_first:
                ids = [sample for _, samples in ranks for sample in samples]
                losses = [loss for loss, _ in ranks]
                facts: dict[str, Any] = {"policy": self.policy, "losses_of_ranks": losses, "sample_ids": ids}
                if names := self._names(ids):
                    facts["names"] = names
                io.write_whole(path, json.dumps({"step": step, **spike, **facts}))
        if self._world.is_first:
            self._log(step, {"event": "spike", **{f"spike/{name}": value for name, value in spike.items()}})
        # The values above their limits; both in a diverged step.
        compared = [("loss", loss, largest_loss), ("gradient norm", norm, largest_norm)]
        above = [(name, value, limit) for name, value, limit in compared if value > limit] or compared
        comparison = ", ".join(f"{name} {value:.4g}, limit {limit:.4g}" for name, value, limit in above)
        sentence = f"step {step} is a spike ({comparison})"
        if self.policy == "stop":
            raise TrainingError(
                f"{sentence}{location}. The last checkpoint is untouched: continue without the batch with "
                "trainer.spikes.policy=skip, or with it with trainer.spikes.policy=report"
            )
        if self.leaves_out and self._in_a_row > MOST_IN_A_ROW:
            raise TrainingError(
                f"{sentence}{location}. It is number {self._in_a_row} in a row: the training diverges. The last "
                "checkpoint is untouched: lower optim.schedule.peak or set trainer.clip_gradient=1.0"
            )
        self.rewind_due = self.policy == "rewind"
        log.warning("%s%s%s", sentence, ": the batch is skipped" if self.policy == "skip" else "", location)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self._values.cpu(), "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the window; if its length has changed, its newest steps."""
        newest = state["values"][-len(self._values) :]
        self._values.fill_(torch.nan)
        self._values[len(self._values) - len(newest) :] = newest.to(self._values.device)
        self._in_a_row = state["in_a_row"]


@dataclass(eq=False)
class Replicas(Hook):
    """Compares the bits of weights and optimizer state that every rank holds; shards of weights are left out.

    A bit that flips on one rank stays: ranks average gradients, not weights. every: steps between two comparisons.
    modules: by name, for the message. equal_after: step of the last comparison.
    """

    every: int
    modules: Mapping[str, nn.Module]
    optimizer: torch.optim.Optimizer
    world: World
    equal_after: int = 0

    def begin(self, progress: Progress) -> None:
        self._compare(progress.step)

    def after(self, step: Step) -> None:
        if step.number % self.every == 0 or step.is_last:
            self._compare(step.number)

    def _compare(self, step: int) -> None:
        """Raise TrainingError on all ranks if they differ. Collective. step: number of finished steps."""
        tensors: dict[str, Tensor] = {}
        for key, module in self.modules.items():
            for name, parameter in module.named_parameters():
                tensors[f"{key} {name}"] = parameter
                for part, value in self.optimizer.state.get(parameter, {}).items():
                    tensors |= {f"{part} of {key} {name}": value} if isinstance(value, Tensor) else {}
        names, values = zip(*((name, value) for name, value in tensors.items() if not is_dtensor(value)), strict=True)
        sums = self.world.gather(torch.stack([_sum_of_bits(value).to(self.world.device) for value in values]))
        columns = sums.view(self.world.size, len(names)).T  # [tensors, ranks]
        different = (columns != columns[:, :1]).any(dim=1).nonzero().flatten().tolist()
        if not different:
            self.equal_after = step
            return
        hosts, column = self.world.gather_object(socket.gethostname()), columns[different[0]].tolist()
        common, count = Counter(column).most_common(1)[0]
        others = "those of the other ranks" if 2 * count > len(column) else "each other"
        wrong = [rank for rank, value in enumerate(column) if others == "each other" or value != common]
        ranks = first_names([f"rank {rank} ({hosts[rank]})" for rank in wrong])
        raise TrainingError(
            f"after step {step} the weights of {ranks} differ from {others}: first in {names[different[0]]}, in "
            f"{len(different)} of {len(names)} tensors. All ranks were equal after step {self.equal_after}. Suspect "
            "memory or GPU of the machine: leave it out, and resume from a checkpoint up to that step"
        )


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as whole numbers, 0-d int64: a single flipped bit always changes it."""
    # Numbers of 8 bytes need no conversion, which takes ten times as long as the sum on a CPU.
    size = 8 if tensor.nbytes % 8 == 0 else tensor.element_size()
    return tensor.detach().contiguous().flatten().view(getattr(torch, f"int{8 * size}")).sum(dtype=torch.int64)


def require_finite_weights(modules: Mapping[str, nn.Module], step: int) -> None:
    """Check this rank's part of weights before they are saved, in one pass on their device.

    Raises TrainingError, with the name of the tensor, if a parameter is not finite or a buffer holds NaN. Masks and the
    state of unseen samples may be infinite. modules: by name, for the message. step: number of finished steps.
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
    return nn.utils.get_total_norm([part for part in parts if part.numel()], math.inf)
