"""Throughput: samples a second, time spent waiting for data, time left."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from clipzoo import distributed

T = TypeVar("T")


class Meter:
    """Measures the loop it is put around with `timed`."""

    def __init__(self, total_steps: int, global_batch: int, start_step: int) -> None:
        self._total = total_steps
        self._batch = global_batch
        self._begin = self._mark = time.perf_counter()
        self._first = self._marked = start_step
        self._waited = self._waited_before = 0.0
        self._settled: tuple[float, int] | None = None

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; the time until each is there is counted as waiting."""
        iterator = iter(batches)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._waited += time.perf_counter() - asked
            yield batch

    def read(self, step: int) -> dict[str, float]:
        """Since the last reading: samples_per_second over all ranks, the share of time spent waiting for data."""
        now = time.perf_counter()
        seconds, steps = max(now - self._mark, 1e-9), step - self._marked
        values = {
            "samples_per_second": steps * self._batch / seconds,
            "data_wait": (self._waited - self._waited_before) / seconds,
            "seconds": now - self._begin,
        }
        self._mark, self._marked, self._waited_before = now, step, self._waited
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

    def summary(self, device: torch.device) -> dict[str, float]:
        """Of the whole training: seconds, samples_per_second, data_wait, peak_memory in MiB, ranks."""
        seconds = time.perf_counter() - self._begin
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device) / 2**20
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        steps = self._total - self._first
        return {
            "steps": self._total,
            "seconds": seconds,
            "samples_per_second": steps * self._batch / seconds,
            "data_wait": self._waited / seconds,
            "peak_memory_mib": peak,
            "ranks": distributed.world_size(),
        }

    def _left(self, step: int) -> str:
        since, first = self._settled or (self._begin, self._first)
        if step == first:
            since, first = self._begin, self._first
        seconds = (time.perf_counter() - since) / max(step - first, 1) * (self._total - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
