"""A profile of some steps: the profiler's trace, the memory, and the time of each part of a step."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from clipzoo import io
from clipzoo.distributed.world import World
from clipzoo.io import explained
from clipzoo.training.inspection.part_times import STEP, memory_curve, part_times
from clipzoo.types import Batch

log = logging.getLogger(__name__)

FOLDER = "profile"
TRACE, SNAPSHOT, SUMMARY = "trace.json.gz", "memory_snapshot.pickle", "summary.json"
MOST_OPERATIONS = 15
MOST_ALLOCATIONS = 200_000
"""Allocations and releases that the snapshot of a GPU's memory holds."""

NumberedBatch = tuple[int, Batch]


class StepProfiler:
    """Profiles the steps `first` to `last` of a training on the first rank and writes <folder>/profile.

    first, last: counted from 1. report: called with one line for the terminal.
    """

    def __init__(self, first: int, last: int, folder: Path, world: World, report: Callable[[str], None]) -> None:
        self._first, self._last, self._world, self._report = first, last, world, report
        self._folder = folder / FOLDER
        self._profile: profile | None = None
        self._range: AbstractContextManager[Any] | None = None

    def watch(self, batches: Iterator[NumberedBatch], start: int) -> Iterator[NumberedBatch]:
        """Yield the batches with the numbers of their steps; profile from the request for a batch on.

        start: number of steps that were done before.
        """
        if start >= self._last:
            log.warning(
                "trainer.profile=[%d,%d]: the run resumes after step %d, nothing is profiled",
                *(self._first, self._last, start),
            )
        first = max(self._first, start + 1)
        done = start
        try:
            while True:
                done += 1
                if done == first and done <= self._last:
                    self._start()
                self._begin_step()
                try:
                    numbered = next(batches)
                except StopIteration:
                    return
                yield numbered
                self._end_step()
                if done == self._last and self._profile is not None:
                    self._stop(first)
        finally:
            self._end_step()
            if self._profile is not None:
                self._profile.stop()

    def _start(self) -> None:
        # Else its library writes that it sees no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        self._profile = profile(activities=activities, profile_memory=True)
        self._profile.start()

    def _begin_step(self) -> None:
        if self._profile is not None:
            self._range = record_function(STEP)
            self._range.__enter__()

    def _end_step(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _stop(self, first: int) -> None:
        """Write the trace, the memory and the summary, and report the largest parts."""
        finished, self._profile = self._profile, None
        assert finished is not None
        is_cuda = self._world.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize(self._world.device)
        finished.stop()
        io.make_folder(self._folder)
        with explained(self._folder):
            finished.export_chrome_trace(str(self._folder / TRACE))
            if is_cuda:
                torch.cuda.memory._dump_snapshot(str(self._folder / SNAPSHOT))
                torch.cuda.memory._record_memory_history(enabled=None)
        with gzip.open(self._folder / TRACE) as file:
            events = json.load(file)["traceEvents"]
        times = part_times(events)
        summary = {
            "steps": [first, self._last],
            "device": torch.cuda.get_device_name(self._world.device) if is_cuda else "CPU",
            "ranks": self._world.size,
            "host_ms": dict(times.host),
            "device_ms": dict(times.device),
            "operations": _operations(finished, times.steps, is_cuda),
            "memory": memory_curve(events, device_type=int(is_cuda)),
        }
        io.write_whole(self._folder / SUMMARY, json.dumps(summary))
        self._report(self._line(first, times.host))

    def _line(self, first: int, host: Mapping[str, float]) -> str:
        total = sum(host.values())
        largest = sorted(host, key=host.__getitem__, reverse=True)[:4]
        shares = ", ".join(f"{part} {host[part] / total:.0%}" for part in largest)
        return (
            f"profile of steps {first} to {self._last}: {total:.1f} ms a step: {shares} ({self._folder}; "
            f"clipzoo report {self._folder.parent} writes its page)"
        )


def _operations(finished: profile, steps: int, is_cuda: bool) -> list[dict[str, Any]]:
    """Return the operations with the most time of their own: calls and milliseconds per step."""
    found = [event for event in finished.key_averages() if not event.is_user_annotation]

    def own(event: Any) -> float:
        return float(event.self_device_time_total if is_cuda else event.self_cpu_time_total)

    return [
        {"name": event.key, "calls": event.count / steps, "ms": own(event) / 1e3 / steps}
        for event in sorted(found, key=own, reverse=True)[:MOST_OPERATIONS]
        if own(event)
    ]
