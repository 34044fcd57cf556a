"""Spikes: steps whose loss or gradient norm stands far above those of the steps before."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipzoo import io
from clipzoo.distributed.world import World
from clipzoo.errors import TrainingError
from clipzoo.types import SpikePolicy

log = logging.getLogger(__name__)

FOLDER = "spikes"
SMALLEST_DEVIATIONS = 0.01, 0.1
"""Lower bounds of the deviations of loss and gradient norm, as shares of their medians: plateaus hardly vary."""
MOST_IN_A_ROW = 10
"""Steps in a row that may be skipped. More than these are a diverging training, not a few bad batches."""
NAMES = "loss", "gradient norm"


class SpikeDetector:
    """Judges the losses and gradient norms of steps by those of the last `window` steps.

    A value is a spike if it exceeds median + threshold * deviation, where the deviation is the median absolute
    deviation from the median, and at least 1 % of the median loss or 10 % of the median gradient norm. No step is
    judged before the window is full. Spikes enter the window too: median and deviation hardly change with less than
    half of the values.

    window: number of steps. threshold: number of deviations.
    """

    def __init__(self, window: int, threshold: float, world: World) -> None:
        self._threshold, self._world = threshold, world
        self._values = torch.full((window, 2), torch.nan, dtype=torch.float64, device=world.device)
        self.limits = torch.full((2,), torch.nan, dtype=torch.float64, device=world.device)
        """Largest loss and gradient norm that still count as ordinary in the last step."""

    def judge(self, loss: Tensor, gradient_norm: Tensor) -> Tensor:
        """Return whether a step is a spike, and add it to the window. Collective; the answer is equal on all ranks.

        loss, gradient_norm: 0-d; their means over ranks are judged. A step with a value that is not finite is not
        added, and is no spike by itself: such a step has diverged.

        Returns:
            0-d bool on the device.
        """
        values = self._world.mean(torch.stack([loss.detach(), gradient_norm.detach()]).double())
        median = self._values.median(dim=0).values
        deviation = (self._values - median).abs().median(dim=0).values
        deviation = deviation.maximum(median.abs() * median.new_tensor(SMALLEST_DEVIATIONS))
        self.limits = median + self._threshold * deviation
        longer = torch.cat([self._values[1:], values[None]])
        self._values = torch.where(values.isfinite().all(), longer, self._values)
        return (values > self.limits).any()

    def state_dict(self) -> dict[str, Tensor]:
        return {"values": self._values.cpu()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the window; one of another length keeps the newest steps."""
        newest = state["values"][-len(self._values) :]
        self._values.fill_(torch.nan)
        self._values[len(self._values) - len(newest) :] = newest.to(self._values.device)


class Spikes:
    """Detects spikes of a training and acts on them; see `Inspection.on_spike`.

    folder: run directory, where each spike is described in spikes/step_N.json; None: no file is written.
    names: sample ids -> the shard and key of each sample; None if the dataset has no names.
    log: called on the first rank with the step and the values of a spike.
    """

    rewind_due = False
    """True from the spike on until the training has gone back to the last regular checkpoint."""

    def __init__(
        self,
        policy: SpikePolicy,
        detector: SpikeDetector,
        folder: Path | None,
        world: World,
        names: Callable[[Sequence[int]], list[str]] | None,
        log: Callable[[int, Mapping[str, Any]], None],
    ) -> None:
        self.policy, self._detector = policy, detector
        self._folder, self._world, self._names, self._log = folder and folder / FOLDER, world, names, log
        self._in_a_row = 0

    @property
    def leaves_out(self) -> bool:
        """True if training continues without the batch of a spike, or of a step that diverged."""
        return self.policy in ("skip", "rewind")

    def judge(self, loss: Tensor, gradient_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether a step is a spike (0-d bool), and the limits of its loss and gradient norm [2]."""
        return self._detector.judge(loss, gradient_norm), self._detector.limits

    def settle(self, step: int, is_spike: bool, sample_id: Tensor, values: Sequence[Tensor], limits: Tensor) -> None:
        """Act on the judgement of a step.

        step: counted from 1. is_spike: equal on all ranks, True also for a diverged step that is left out.
        sample_id: [b]. values: loss and gradient norm. limits: of both, [2].

        Raises:
            TrainingError: the policy is "stop", or too many steps in a row are left out; on all ranks.
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
            "step": step, "loss": loss, "gradient_norm": norm, "largest_loss": largest_loss,
            "largest_gradient_norm": largest_norm,
        }  # fmt: skip
        path = self._write(spike, ranks)
        sentence = f"step {step} is a spike ({_described(loss, norm, limits.tolist())})"
        where = f"; its samples are in {path}" if path else ""
        if self.policy == "stop":
            raise TrainingError(
                f"{sentence}{where}. The last checkpoint is untouched: continue without the batch with "
                "trainer.on_spike=skip, or with it with trainer.on_spike=report"
            )
        if self.leaves_out and self._in_a_row > MOST_IN_A_ROW:
            raise TrainingError(
                f"{sentence}{where}. It is number {self._in_a_row} in a row: the training diverges. The last "
                "checkpoint is untouched: lower optim.schedule.peak or set trainer.clip_gradient=1.0"
            )
        self.rewind_due = self.policy == "rewind"
        log.warning("%s%s%s", sentence, ": the batch is skipped" if self.policy == "skip" else "", where)

    def forget_after(self, step: int) -> None:
        """Remove the descriptions of spikes after `step`, left by a killed run. On the first rank."""
        for path in self._folder.glob("step_*.json") if self._folder else ():
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()

    def state_dict(self) -> dict[str, Any]:
        return {**self._detector.state_dict(), "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._detector.load_state_dict(state)
        self._in_a_row = state["in_a_row"]

    def _write(self, spike: Mapping[str, float], ranks: Sequence[tuple[float, list[int]]]) -> Path | None:
        """Write and log a spike on the first rank; return the path of its description."""
        path = self._folder / f"step_{int(spike['step']):08d}.json" if self._folder else None
        if not self._world.is_first:
            return path
        if path is not None:
            ids = [sample for _, samples in ranks for sample in samples]
            samples: dict[str, Any] = {"sample_ids": ids}
            if self._names is not None:
                samples["names"] = self._names(ids)
            content = {**spike, "policy": self.policy, "losses_of_ranks": [loss for loss, _ in ranks], **samples}
            io.write_whole(path, json.dumps(content))
        values = {f"spike/{name}": value for name, value in spike.items() if name != "step"}
        self._log(int(spike["step"]), {"event": "spike", **values})
        return path


def _described(loss: float, norm: float, limits: Sequence[float]) -> str:
    """Return "loss 9.1, limit 2.4", for the values above their limits or, in a diverged step, for both."""
    values = list(zip(NAMES, (loss, norm), limits, strict=True))
    above = [(name, value, limit) for name, value, limit in values if value > limit] or values
    return ", ".join(f"{name} {value:.4g}, limit {limit:.4g}" for name, value, limit in above)
