"""Throughput of a training."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from clipzoo.build import build_model
from clipzoo.config.compose import compose
from clipzoo.distributed.world import World
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.training.throughput import Throughput, flops_per_step
from clipzoo.types import Batch, Progress

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
    monkeypatch.setattr("clipzoo.training.throughput.time", clock)
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
    monkeypatch.setattr("clipzoo.training.throughput.time", SimpleNamespace(perf_counter=lambda: now))
    throughput = Throughput(100, BATCH, World())

    def batches() -> Iterator[None]:
        nonlocal now
        now += 500.0
        yield

    for _ in throughput.timed(batches()):
        now += 2.0
        assert throughput.read(1)["samples_per_second"] == BATCH / 2


def test_evaluations_count_apart_in_readings_and_in_the_summary_also_after_a_resume(monkeypatch):
    now, spent = 0.0, {"seconds": 0.0, "steps": 0}
    monkeypatch.setattr("clipzoo.training.throughput.time", SimpleNamespace(perf_counter=lambda: now))
    for start in (0, 6):
        throughput = Throughput(100, BATCH, World())
        throughput.resume(start, spent)
        for number, _ in enumerate(throughput.timed(range(6)), start=1):
            now += 4.0
            throughput.mark("forward")
            if number % 2 == 0:
                reading = throughput.read(start + number)
                assert reading["samples_per_second"] == pytest.approx(BATCH / 4)
                assert reading["forward"] == pytest.approx(1.0)
                assert reading["seconds"] == 4.0 * (start + number)
            with throughput.evaluating():
                now += 100.0
        cost, spent = throughput.summary(start + 6), throughput.state(start + 6)
        assert cost["seconds"] == 4.0 * (start + 6) and cost["evaluation_seconds"] == 100.0 * (start + 6)
        assert cost["samples_per_second"] == BATCH / 4 and cost["forward"] == 1.0


@pytest.mark.medium
@pytest.mark.parametrize("frozen", ["", "text_tower", "image_tower.convolutions.0"])
def test_the_operations_of_a_step_are_those_of_its_forward_and_backward_pass(frozen):
    model = build_model(compose(["data=demo", "eval=none", "encoder=demo"]))
    for name, parameter in model.encoder.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    captions = model.encoder.tokenizer(["a red circle"] * 3)
    batch = Batch(torch.zeros(3, 3, 64, 64, dtype=torch.uint8), captions, torch.arange(3))
    with FlopCounterMode(display=False) as counter:
        image, text = model.image_read_by_head(batch.image), model.text_read_by_head(batch.text)
        InfoNCE(0.5, 0.5)(model.compare(image, text, World(), None), batch, Progress(0, 1, 3, 3)).total.backward()
    # The head counts three times: here without the gradient of frozen features.
    assert flops_per_step(model, batch, World(), None) == pytest.approx(counter.get_total_flops(), rel=1e-3)
