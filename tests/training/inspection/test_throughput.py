"""Throughput of a training."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from clipzoo.distributed.world import World
from clipzoo.training.inspection.throughput import Throughput

BATCH = 10


def test_the_seconds_of_a_resumed_run_go_on_from_those_of_its_checkpoint():
    throughput = Throughput(10, 4, World())
    throughput.resume(5, {"seconds": 100.0, "steps": 5})
    assert 100.0 <= throughput.read(6)["seconds"] < 160.0


def test_the_operations_of_a_training_are_those_of_all_its_steps_on_all_ranks():
    throughput = Throughput(10, 4, SimpleNamespace(device=World().device, size=2))
    throughput.resume(5, {"seconds": 1.0, "steps": 5})
    assert "flops" not in throughput.summary(10)
    throughput.flops_per_step = 3e9
    assert throughput.summary(10)["flops"] == 2 * 10 * 3e9


@pytest.mark.parametrize("start", [0, 50])
def test_the_first_reading_of_a_run_and_of_a_resume_leaves_out_the_start_up(monkeypatch, start):
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("clipzoo.training.inspection.throughput.time", clock)
    throughput = Throughput(100, BATCH, World())
    throughput.resume(start, {"seconds": 7.0, "steps": start})
    now = 1000.0

    def batches() -> Iterator[None]:
        nonlocal now
        for seconds in (500.0, 1.0, 1.0, 1.0, 1.0, 1.0):
            now += seconds
            yield

    readings = []
    for number, _ in enumerate(throughput.timed(batches()), start=1):
        now += 90.0 if number == 1 else 3.0
        throughput.mark("forward")
        if number % 3 == 0:
            readings.append(throughput.read(start + number))
    for reading in readings:
        assert reading["samples_per_second"] == pytest.approx(BATCH / 4)
        assert (reading["data_wait"], reading["forward"]) == pytest.approx((0.25, 0.75))
    values = {**readings[-1], "epoch": 1.0, "loss": 1.0, "lr": 1.0}
    left = round(4 * (94 - start))
    assert f"left {left // 60} min {left % 60:02d} s" in throughput.progress_line(start + 6, values)
    # The cost of the training includes its start-up.
    assert throughput.summary(start + 6)["seconds"] == 7 + 1000 + 500 + 90 + 5 * 4


def test_a_reading_of_the_first_step_alone_leaves_out_the_wait_for_its_batch(monkeypatch):
    now = 0.0
    monkeypatch.setattr("clipzoo.training.inspection.throughput.time", SimpleNamespace(perf_counter=lambda: now))
    throughput = Throughput(100, BATCH, World())

    def batches() -> Iterator[None]:
        nonlocal now
        now += 500.0
        yield

    for _ in throughput.timed(batches()):
        now += 2.0
        assert throughput.read(1)["samples_per_second"] == BATCH / 2
