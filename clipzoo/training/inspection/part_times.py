"""Times of the parts of a step, from the events of a profiler's trace. Needs no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEP = "step"
"""Range of a whole step."""
PARTS = (
    "data", "transfer", "image tower", "text tower", "head", "objective", "backward", "optimizer", "communication",
)  # fmt: skip
"""Ranges inside a step, by their names in the trace. What is left of a step is "other"."""
OTHER = "other"
LAUNCHES = ("cuda_runtime", "cuda_driver")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
BINS = 400
"""Largest number of points of the memory's curve."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class PartTimes:
    """Milliseconds per step. host: of the process; they sum to the time of a step. device: of the kernels it starts."""

    steps: int
    host: Mapping[str, float]
    device: Mapping[str, float]


def part_times(events: Sequence[Event]) -> PartTimes:
    """Return the times of the parts of the steps in a trace.

    A moment belongs to the range that began last: a part does not include the parts inside, such as the communication
    of the backward pass. A kernel belongs to the part that started it, one of NCCL to communication.
    """
    ranges = [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))
        for event in events
        if event.get("cat") == "user_annotation" and event.get("name") in (STEP, *PARTS)
    ]
    steps = sum(name == STEP for _, _, name in ranges)
    starts, owners = _timeline(ranges)
    host = dict.fromkeys((*PARTS, OTHER), 0.0)
    for start, end, owner in zip(starts, starts[1:], owners, strict=False):
        if owner is not None:
            host[_part(owner)] += end - start
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
        place = -1 if launched is None else bisect_right(starts, launched) - 1
        owner = owners[place] if place >= 0 else None
        part = "communication" if "nccl" in str(event["name"]).lower() else _part(owner or OTHER)
        device[part] += float(event["dur"])
    scale = 1e-3 / max(steps, 1)
    return PartTimes(
        steps,
        {part: scale * time for part, time in host.items() if time},
        {part: scale * time for part, time in device.items() if time},
    )


def memory_curve(events: Iterable[Event], device_type: int) -> list[tuple[float, float]]:
    """Return the allocated memory over time: (milliseconds since the first event, MiB), the largest value of each bin.

    device_type: 0 for the CPU, 1 for CUDA, as in the trace.
    """
    points = sorted(
        (float(event["ts"]), float(event["args"]["Total Allocated"]))
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == device_type
    )
    if not points:
        return []
    begin, width = points[0][0], max(points[-1][0] - points[0][0], 1e-9) / BINS
    largest: dict[int, tuple[float, float]] = {}
    for time, size in points:
        place = int((time - begin) / width)
        if place not in largest or size > largest[place][1]:
            largest[place] = (time, size)
    return [((time - begin) / 1e3, size / 2**20) for time, size in largest.values()]


def _timeline(ranges: Iterable[tuple[float, float, str]]) -> tuple[list[float], list[str | None]]:
    """Return the moments at which the owner of the time changes, and the range that owns the time from each on."""
    ordered = sorted(ranges)
    moments = sorted({moment for start, end, _ in ordered for moment in (start, end)})
    owners: list[str | None] = []
    active: list[tuple[float, float, str]] = []
    following = 0
    for moment in moments:
        while following < len(ordered) and ordered[following][0] <= moment:
            active.append(ordered[following])
            following += 1
        active = [part for part in active if part[1] > moment]
        # If two ranges began together, the one that ends first is inside the other.
        owners.append(max(active, key=lambda part: (part[0], -part[1]))[2] if active else None)
    return moments, owners


def _part(owner: str) -> str:
    return OTHER if owner == STEP else owner
