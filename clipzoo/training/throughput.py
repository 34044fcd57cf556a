"""Throughput: samples a second, where a step's time goes, memory, use of the device, time left."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from clipzoo.distributed.world import World

T = TypeVar("T")
SHARES = {"data": "data_wait", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}
"""Parts of a step that are shown as shares of the time, by the names of metrics.jsonl."""


class Meter:
    """Measures the loop that it is put around with `timed`; `mark(part)` ends a part of a step.

    step_flops: of this rank, set when known; peak_flops: of its device.
    """

    def __init__(self, total_steps: int, global_batch: int, world: World) -> None:
        self._total, self._batch, self._device = total_steps, global_batch, world.device
        self._ranks = world.size
        self._clock = _Clock(world.device)
        self._begin = self._read_at = time.perf_counter()
        self._first = self._read_step = 0
        self._read_parts: dict[str, float] = {}
        self._settled: tuple[float, int] | None = None
        self._before: dict[str, float] = {"seconds": 0.0, "steps": 0}
        self.step_flops: float | None = None
        self.peak_flops = float("nan")

    def go_on(self, step: int, state: Mapping[str, float]) -> None:
        """Begin at `step`, with the `state` that an interrupted run left."""
        self._first = self._read_step = step
        self._before.update(state)

    def state(self, step: int) -> dict[str, float]:
        """Seconds and steps so far, over all interruptions."""
        before, now = self._before, time.perf_counter()
        parts = {name: before.get(name, 0.0) + seconds for name, seconds in self._clock.total().items()}
        spent = {"seconds": before["seconds"] + now - self._begin, "steps": before["steps"] + step - self._first}
        return {**before, **parts, **spent}

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; the time until each is there is counted as waiting for data."""
        iterator = iter(batches)
        while True:
            self._clock.mark("other")
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._clock.mark("data")
            yield batch

    def mark(self, part: str) -> None:
        """What has run since the last mark belongs to `part`."""
        self._clock.mark(part)

    def read(self, step: int) -> dict[str, float]:
        """Since the last reading: samples_per_second over all ranks, shares of the time; peak memory so far."""
        before, after = self._read_parts, dict(self._clock.total())
        now = time.perf_counter()
        seconds, steps = max(now - self._read_at, 1e-9), step - self._read_step
        values = {
            "samples_per_second": steps * self._batch / seconds,
            **{shown: (after.get(part, 0.0) - before.get(part, 0.0)) / seconds for part, shown in SHARES.items()},
            **self._utilisation(steps, seconds),
            "peak_memory_mib": self._peak_memory(),
            "seconds": now - self._begin,
        }
        self._read_at, self._read_step, self._read_parts = now, step, after
        # The first reading holds the start-up: estimates begin behind it.
        self._settled = self._settled or (now, step)
        return values

    def line(self, step: int, values: Mapping[str, Any]) -> str:
        """What the terminal shows of a reading."""
        return "  ".join(
            [
                f"step {step}/{self._total}",
                f"epoch {values['epoch']:.2f}",
                f"loss {values['loss']:.4f}",
                f"lr {values['lr']:.2e}",
                f"{values['samples_per_second']:.0f} samples/s",
                f"data wait {values['data_wait']:.0%}",
                f"left {self._left(step)}",
            ]
        )

    def summary(self, step: int) -> dict[str, Any]:
        """Of the whole training, interruptions left out: what results.json shows."""
        state = self.state(step)
        seconds, steps = state["seconds"], state["steps"]
        return {
            "steps": step,
            "seconds": seconds,
            "samples_per_second": steps * self._batch / seconds,
            **{shown: state.get(part, 0.0) / seconds for part, shown in SHARES.items()},
            **self._utilisation(steps, seconds),
            "peak_memory_mib": self._peak_memory(),
            "ranks": self._ranks,
            "device": torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU",
        }

    def _utilisation(self, steps: float, seconds: float) -> dict[str, float]:
        """Share of the device's peak that useful arithmetic took; recomputed activations are not useful."""
        if self.step_flops is None:
            return {}
        return {"flops_utilisation": self.step_flops * steps / seconds / self.peak_flops}

    def _peak_memory(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

    def _left(self, step: int) -> str:
        since, first = self._settled or (self._begin, self._first)
        if step == first:
            since, first = self._begin, self._first
        seconds = (time.perf_counter() - since) / max(step - first, 1) * (self._total - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


class _Clock:
    """Seconds by part. On a GPU by its own events: the time in which it reaches each mark, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._last = self._now()
        self._marks: list[tuple[str, Any]] = []
        self._total: dict[str, float] = {}

    def mark(self, part: str) -> None:
        self._marks.append((part, self._now()))

    def total(self) -> dict[str, float]:
        """Seconds of each part since the start."""
        if self._on_gpu and self._marks:
            self._marks[-1][1].synchronize()
        for part, end in self._marks:
            seconds = self._last.elapsed_time(end) / 1000 if self._on_gpu else end - self._last
            self._total[part] = self._total.get(part, 0.0) + seconds
            self._last = end
        self._marks.clear()
        return self._total

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
