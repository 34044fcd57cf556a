"""The times of a step's parts, from events whose answer is known."""

from __future__ import annotations

import pytest

from clipzoo.training.profile import memory_curve, part_times


def annotation(name: str, begin: float, end: float) -> dict:
    """A range in microseconds."""
    return {"cat": "user_annotation", "name": name, "ts": begin, "dur": end - begin}


def kernel(name: str, launched: float, duration: float, correlation: int) -> list[dict]:
    """A kernel that a call at `launched` has started, long after it."""
    launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 2.0}
    run = {"cat": "kernel", "name": name, "ts": launched + 5e4, "dur": duration}
    return [{**event, "args": {"correlation": correlation}} for event in (launch, run)]


STEP = [
    annotation("step", 0, 10_000), annotation("data", 0, 1000), annotation("image tower", 1000, 4000),
    annotation("head", 4000, 6000), annotation("communication", 4500, 5000), annotation("backward", 6000, 9000),
]  # fmt: skip


def test_a_part_is_without_the_parts_inside_and_all_sum_to_the_step():
    times = part_times(STEP)
    expected = {"data": 1, "image tower": 3, "head": 1.5, "communication": 0.5, "backward": 3, "other": 1}
    assert times.steps == 1 and times.host == pytest.approx(expected)
    assert sum(times.host.values()) == pytest.approx(10)
    assert times.device == {}


def test_times_are_means_over_steps_and_time_between_steps_does_not_count():
    later = [{**event, "ts": event["ts"] + 50_000} for event in STEP]
    assert part_times([*STEP, *later]).host == pytest.approx(part_times(STEP).host)


def test_a_kernel_belongs_to_the_part_that_started_it_and_one_of_nccl_to_communication():
    """The head's communication ends at 5000; autograd's own thread starts the kernels of the backward pass."""
    events = [
        *STEP, *kernel("gemm", 2000, 700, 1), *kernel("gemm", 7000, 900, 2),
        *kernel("ncclDevKernel_AllReduce", 8000, 400, 3), *kernel("softmax", 5500, 100, 4),
        *kernel("copy", 9500, 50, 5),
    ]  # fmt: skip
    expected = {"image tower": 0.7, "backward": 0.9, "communication": 0.4, "head": 0.1, "other": 0.05}
    assert part_times(events).device == pytest.approx(expected)


def test_the_memory_curve_keeps_its_peak_and_few_points():
    sizes = [(number, 2**20 * (500 if number == 4321 else number % 7)) for number in range(10_000)]
    events = [
        {"name": "[memory]", "ts": 1000.0 + number, "args": {"Total Allocated": size, "Device Type": 0}}
        for number, size in sizes
    ]
    curve = memory_curve([*events, {**events[0], "args": {"Total Allocated": 9e9, "Device Type": 1}}], device_type=0)
    assert len(curve) <= 401 and (4.321, 500.0) in curve
    assert memory_curve(events, device_type=1) == []
