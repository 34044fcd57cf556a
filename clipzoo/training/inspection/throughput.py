"""Throughput of a training: samples per second, shares of a step's time, memory, model FLOPs utilization, time left."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch

from clipzoo.distributed.parallel import OWN_PASSES
from clipzoo.distributed.world import World, step_part

T = TypeVar("T")
SHARES = {"data": "data_wait", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}
"""Part of a step -> its name in metrics.jsonl, where it is a share of the time."""
EVALUATION = "evaluation"
PARTS = (*SHARES, "other", EVALUATION)
"""Parts of a step, and evaluations, which together are all of the time."""
OWN_WORK = {"data": "data", "transfer": "transfer", OWN_PASSES: "computation"}
"""Mark -> cause of the time before it, which this rank spends without waiting for other ranks."""
CAUSES = ("data", "transfer", "computation", "checkpoint")
"""Causes of a rank's own time."""


@dataclass(frozen=True)
class OwnTime:
    """Time since the reading before: in all, and that which this rank spent without waiting for others, by cause."""

    seconds: float = 0.0
    steps: int = 0
    causes: tuple[float, ...] = (0.0,) * len(CAUSES)


class Throughput:
    """Measures a loop over `timed(batches)`; `mark(part)` ends a part of a step, or a phase inside a part.

    Seconds, rates and shares are those of the training without evaluations (`evaluating`).

    own: time of this rank alone, between the last two readings.
    flops_per_step: floating-point operations of this rank; None until they are counted.
    peak_flops: floating-point operations per second that its device is capable of; None if unknown.
    """

    flops_per_step: float | None = None
    peak_flops: float | None = None

    def __init__(self, total_steps: int, global_batch: int, world: World) -> None:
        self._total_steps, self._global_batch = total_steps, global_batch
        self._device, self._ranks = world.device, world.size
        self._clock = _Clock(world.device)
        self._started = time.perf_counter()
        self._read_seconds = 0.0
        self._first_step = self._read_step = 0
        self._read_parts: dict[str, float] = {}
        self._read_own: dict[str, float] = {}
        self.own = OwnTime()
        self._estimate_from = self._started, 0
        self._spent_before: dict[str, float] = {"seconds": 0.0, "steps": 0}

    def resume(self, step: int, spent: Mapping[str, float]) -> None:
        """Continue at `step`. spent: `state` of the interrupted run."""
        self._first_step = self._read_step = step
        self._estimate_from = self._started, step
        self._spent_before.update(spent)

    def state(self, step: int) -> dict[str, float]:
        """Return seconds of training and of each part, and steps since the run first started, without interruptions."""
        before = self._spent_before
        parts = {name: before.get(name, 0.0) + seconds for name, seconds in self._clock.totals().items()}
        sums = {
            "seconds": before["seconds"] + self._seconds(),
            "steps": before["steps"] + step - self._first_step,
        }
        return {**before, **parts, **sums}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count the time of the block as evaluation, which is not a part of the training."""
        self._clock.mark("other")
        yield
        self._clock.mark(EVALUATION)

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches; the time that each one takes to arrive counts as waiting for data.

        Readings leave out the start-up: the wait for the first batch and, if other steps follow before the first
        reading, the first step.
        """
        iterator = iter(batches)
        for number in count():
            self._clock.mark("other")
            if number == 1:
                self._leave_out_start(self._first_step + 1)
            try:
                with step_part("data"):
                    batch = next(iterator)
            except StopIteration:
                return
            self._clock.mark("data")
            if number == 0:
                self._leave_out_start(self._first_step)
            yield batch

    def mark(self, part: str) -> None:
        """Assign the time since the last part to `part`; the mark of a phase inside a part begins no new part."""
        self._clock.mark(part)

    def add_own(self, cause: str, seconds: float) -> None:
        """Count seconds that this rank spent without waiting for others, outside of the marks."""
        self._clock.own[cause] += seconds

    def read(self, step: int) -> dict[str, float]:
        """Return samples per second over all ranks and shares of the time since the last reading, and peak memory."""
        before, parts = self._read_parts, dict(self._clock.totals())
        now = self._seconds()
        seconds, steps = max(now - self._read_seconds, 1e-9), step - self._read_step
        values = {
            "samples_per_second": steps * self._global_batch / seconds,
            **{name: (parts.get(part, 0.0) - before.get(part, 0.0)) / seconds for part, name in SHARES.items()},
            **self._utilization(steps, seconds),
            "peak_memory_mib": self._peak_memory(),
            "seconds": self._spent_before["seconds"] + now,
        }
        own = dict(self._clock.own)
        self.own = OwnTime(seconds, steps, tuple(own[cause] - self._read_own.get(cause, 0.0) for cause in CAUSES))
        self._read_seconds, self._read_step, self._read_parts, self._read_own = now, step, parts, own
        return values

    def progress_line(self, step: int, values: Mapping[str, Any]) -> str:
        """Return the line that the terminal shows for a reading."""
        return "  ".join(
            [
                f"step {step}/{self._total_steps}",
                f"epoch {values['epoch']:.2f}",
                f"loss {values['loss']:.4f}",
                f"lr {values['lr']:.2e}",
                f"{values['samples_per_second']:.0f} samples/s",
                f"data wait {values['data_wait']:.0%}",
                f"left {self._time_left(step)}",
            ]
        )

    def summary(self, step: int) -> dict[str, Any]:
        """Return the cost of the whole training, without interruptions, as results.json shows it."""
        state = self.state(step)
        seconds, steps = state["seconds"], state["steps"]
        return {
            "steps": step,
            "seconds": seconds,
            "evaluation_seconds": state.get(EVALUATION, 0.0),
            "samples_per_second": steps * self._global_batch / seconds,
            **{name: state.get(part, 0.0) / seconds for part, name in SHARES.items()},
            **self._utilization(steps, seconds),
            **({} if self.flops_per_step is None else {"flops": self.flops_per_step * steps * self._ranks}),
            "peak_memory_mib": self._peak_memory(),
            "ranks": self._ranks,
            "device": torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU",
        }

    def _leave_out_start(self, step: int) -> None:
        """Begin the first reading, and the estimate of the time left, after `step` steps."""
        parts, seconds = dict(self._clock.totals()), self._seconds()
        self._estimate_from = time.perf_counter(), step
        if self._read_step == self._first_step:
            self._read_seconds, self._read_step, self._read_parts = seconds, step, parts
            self._read_own = dict(self._clock.own)

    def _seconds(self) -> float:
        """Return the seconds of training since this process began."""
        evaluation = self._clock.totals().get(EVALUATION, 0.0)
        return time.perf_counter() - self._started - evaluation

    def _utilization(self, steps: float, seconds: float) -> dict[str, float]:
        """Model FLOPs utilization: recomputed activations do not count. Empty where the peak is unknown."""
        if self.flops_per_step is None or self.peak_flops is None:
            return {}
        return {"flops_utilisation": self.flops_per_step * steps / seconds / self.peak_flops}

    def _peak_memory(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

    def _time_left(self, step: int) -> str:
        since, first = self._estimate_from
        seconds = (time.perf_counter() - since) / max(step - first, 1) * (self._total_steps - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


class _Clock:
    """Seconds by part. A GPU records events at the marks, so that the host does not wait for it.

    own: seconds by cause; see OWN_WORK. Complete after `totals`.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._last = self._last_part = self._now()
        self.own = dict.fromkeys(CAUSES, 0.0)
        self._marks: list[tuple[str, Any]] = []
        self._totals: dict[str, float] = {}

    def mark(self, part: str) -> None:
        self._marks.append((part, self._now()))

    def totals(self) -> dict[str, float]:
        """Return the seconds of each part since the start."""
        if self._on_gpu and self._marks:
            self._marks[-1][1].synchronize()
        for part, end in self._marks:
            if part in OWN_WORK:
                self.own[OWN_WORK[part]] += self._seconds(self._last, end)
            if part in PARTS:
                self._totals[part] = self._totals.get(part, 0.0) + self._seconds(self._last_part, end)
                self._last_part = end
            self._last = end
        self._marks.clear()
        return self._totals

    def _seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self._on_gpu else end - begin

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
