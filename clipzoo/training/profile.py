"""Profile of selected steps: the profiler's trace, the memory, and the time of each part of a step."""

from __future__ import annotations

import gzip
import json
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from clipzoo import io
from clipzoo.distributed.world import World
from clipzoo.training.parts import Hook, Step
from clipzoo.types import Progress

log = logging.getLogger(__name__)

FOLDER = "profile"
TRACE, SNAPSHOT, SUMMARY = "trace.json.gz", "memory_snapshot.pickle", "summary.json"
MOST_OPERATIONS = 15
MOST_ALLOCATIONS = 200_000
"""Largest number of allocations and releases in the snapshot of a GPU's memory."""
STEP = "step"
"""Range of a whole step."""
PARTS = ("data", "transfer", "image tower", "text tower", "head", "objective", "backward", "optimizer", "communication")
"""Ranges inside a step, by their names in the trace. The rest of a step is "other"."""
OTHER = "other"
LAUNCHES = ("cuda_runtime", "cuda_driver")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
BINS = 400
"""Largest number of points of the memory curve."""
Event = Mapping[str, Any]


class Profile(Hook):
    """Profiles the steps `first` to `last` of a training on the first rank and writes <folder>/profile.

    A step, counted from 1, begins with the request for its batch, after all other hooks of the previous step.
    """

    def __init__(self, first: int, last: int, folder: Path, world: World, report: Callable[[str], None]) -> None:
        self._first, self._last, self._world, self._report = first, last, world, report
        self._folder = folder / FOLDER
        self._profile: profile | None = None
        self._step = ExitStack()

    def begin(self, progress: Progress) -> None:
        if progress.step >= self._last:
            text = "trainer.profile=[%d,%d]: the run resumes after step %d, nothing is profiled"
            log.warning(text, self._first, self._last, progress.step)
        self._first = max(self._first, progress.step + 1)
        self._begin_step(progress.step + 1)

    def after(self, step: Step) -> None:
        self._step.close()
        if step.number != self._last or self._profile is None:
            self._begin_step(step.number + 1)
            return
        # Write the trace, the memory and the summary, and report the largest parts.
        finished, self._profile = self._profile, None
        is_cuda = self._world.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize(self._world.device)
        finished.stop()
        io.make_folder(self._folder)
        with io.explained(self._folder):
            finished.export_chrome_trace(str(self._folder / TRACE))
            if is_cuda:
                torch.cuda.memory._dump_snapshot(str(self._folder / SNAPSHOT))
                torch.cuda.memory._record_memory_history(enabled=None)
        with gzip.open(self._folder / TRACE) as file:
            events = json.load(file)["traceEvents"]
        steps, host_ms, device_ms = part_times(events)

        def own(event: Any) -> float:
            return float(event.self_device_time_total if is_cuda else event.self_cpu_time_total)

        operations = [event for event in finished.key_averages() if not event.is_user_annotation and own(event)]
        operations = sorted(operations, key=own, reverse=True)[:MOST_OPERATIONS]
        summary = {
            "steps": [self._first, self._last],
            "device": torch.cuda.get_device_name(self._world.device) if is_cuda else "CPU",
            "ranks": self._world.size,
            "host_ms": host_ms,
            "device_ms": device_ms,
            # Operations with the longest self time: calls and milliseconds per step.
            "operations": [
                {"name": event.key, "calls": event.count / steps, "ms": own(event) / 1e3 / steps}
                for event in operations
            ],
            "memory": memory_curve(events, device_type=int(is_cuda)),
        }
        io.write_whole(self._folder / SUMMARY, json.dumps(summary))
        total = sum(host_ms.values())
        largest = sorted(host_ms, key=host_ms.__getitem__, reverse=True)[:4]
        shares = ", ".join(f"{part} {host_ms[part] / total:.0%}" for part in largest)
        self._report(
            f"profile of steps {self._first} to {self._last}: {total:.1f} ms a step: {shares} ({self._folder}; "
            f"clipzoo report {self._folder.parent} writes its page)"
        )

    def end(self) -> None:
        self._step.close()
        if self._profile is not None:
            self._profile.stop()

    def _begin_step(self, number: int) -> None:
        if number == self._first <= self._last:
            # Without it, the profiler warns that there is no GPU.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            activities = [ProfilerActivity.CPU]
            if self._world.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
                torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
            self._profile = profile(activities=activities, profile_memory=True)
            self._profile.start()
        if self._profile is not None:
            self._step.enter_context(record_function(STEP))


def part_times(events: Sequence[Event]) -> tuple[int, dict[str, float], dict[str, float]]:
    """Return the number of steps in a trace, and milliseconds per step by part: of the process, and of its kernels.

    The times of the process sum to that of a step.
    Time counts for the range that began last: a part does not include the parts inside, such as the communication of
    the backward pass. A kernel counts for the part that launched it, a kernel of NCCL for communication.
    """
    ranges = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))
        for event in events
        if event.get("cat") == "user_annotation" and event.get("name") in (STEP, *PARTS)
    )
    steps = sum(name == STEP for _, _, name in ranges)
    # The moments at which the current part changes, and the current part after each of them.
    moments = sorted({moment for start, end, _ in ranges for moment in (start, end)})
    owners: list[str | None] = []
    active: list[tuple[float, float, str]] = []
    following = 0
    for moment in moments:
        while following < len(ranges) and ranges[following][0] <= moment:
            active.append(ranges[following])
            following += 1
        active = [part for part in active if part[1] > moment]
        # If two ranges began together, the one that ends first is inside the other.
        owner = max(active, key=lambda part: (part[0], -part[1]))[2] if active else None
        owners.append(OTHER if owner == STEP else owner)
    host = dict.fromkeys((*PARTS, OTHER), 0.0)
    for start, end, owner in zip(moments, moments[1:], owners, strict=False):
        if owner is not None:
            host[owner] += end - start

    device = dict.fromkeys((*PARTS, OTHER), 0.0)
    launches = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    for event in events:
        if event.get("cat") not in DEVICE_WORK:
            continue
        launched = launches.get(event.get("args", {}).get("correlation"))
        place = -1 if launched is None else bisect_right(moments, launched) - 1
        owner = owners[place] if place >= 0 else None
        part = "communication" if "nccl" in str(event["name"]).lower() else owner or OTHER
        device[part] += float(event["dur"])
    scale = 1e-3 / max(steps, 1)
    host, device = ({part: scale * time for part, time in times.items() if time} for times in (host, device))
    return steps, host, device


def memory_curve(events: Iterable[Event], device_type: int) -> list[tuple[float, float]]:
    """Return (milliseconds since the first event, largest MiB) of each bin. device_type: 0 for the CPU, 1 for CUDA."""
    points = sorted(
        (float(event["ts"]), float(event["args"]["Total Allocated"]))
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == device_type
    )
    if not points:
        return []
    begin, width = points[0][0], max(points[-1][0] - points[0][0], 1e-9) / BINS
    bins = groupby(points, key=lambda point: int((point[0] - begin) / width))
    largest = [max(group, key=itemgetter(1)) for _, group in bins]
    return [((time - begin) / 1e3, size / 2**20) for time, size in largest]
