"""Throughput of a training, and its slow ranks."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import clipzoo
from clipzoo.build import build_model
from clipzoo.config.compose import compose
from clipzoo.distributed.world import World
from clipzoo.encoders.base import Encoder
from clipzoo.heads.vector import ClipHead
from clipzoo.model import Model
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.training.settings import Computation, Inspection, SlowRankSettings
from clipzoo.training.throughput import CAUSES, EVALUATION, SlowRank, SlowRanks, Throughput, flops_per_step
from clipzoo.types import Batch, Features, Progress
from tests.support.ranks import run_ranks

BATCH = 10


def test_seconds_and_operations_of_a_resumed_run_include_those_before_on_all_ranks():
    throughput = Throughput(10, 4, SimpleNamespace(device=World().device, size=2))
    throughput.resume(5, {"seconds": 100.0, "steps": 5})
    assert 100.0 <= throughput.read(6)["seconds"] < 160.0
    assert "flops" not in throughput.summary(10)
    throughput.flops_per_step = 3e9
    assert throughput.summary(10)["flops"] == 2 * 10 * 3e9


@pytest.mark.parametrize("start", [0, 50])
def test_the_first_reading_of_a_run_and_of_a_resume_leaves_out_the_start_up(monkeypatch, start):
    now = 0.0
    monkeypatch.setattr("clipzoo.training.throughput.time", SimpleNamespace(perf_counter=lambda: now))
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
            with throughput.part(EVALUATION):
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
        InfoNCE(0.5, 0.5)(model.compare(image, text), batch, Progress(0, 1, 3, 3)).total.backward()
    # The head counts three times: here without the gradient of frozen features.
    assert flops_per_step(model, batch, World(), None) == pytest.approx(counter.get_total_flops(), rel=1e-3)


USUAL = {"data": 0.5, "transfer": 0.1, "computation": 6.0, "checkpoint": 0.0}
"""Seconds of an interval of ten seconds and ten steps."""


def rows(*changes: dict[str, float], seconds: float = 10.0) -> list[list[float]]:
    """Times of one rank for each of the changes of USUAL."""
    return [[seconds, 10.0, *({**USUAL, **change}[cause] for cause in CAUSES)] for change in changes]


def found(intervals: list[list[list[float]]]) -> list[SlowRank]:
    ranks = SlowRanks(threshold=0.2, period=60.0)
    return [slow for interval in intervals for slow in ranks.judge(interval)[1]]


@pytest.mark.parametrize(
    ("cause", "seconds"), [("data", 3.5), ("transfer", 3.1), ("computation", 9.0), ("checkpoint", 3.0)]
)
def test_a_rank_slower_than_the_median_for_the_whole_period_is_found_once_with_its_cause(cause, seconds):
    slow = rows({}, {}, {cause: seconds}, {})
    assert found([slow] * 5) == []
    (one,) = found([slow] * 30)
    # The others would have steps of 7 seconds.
    assert (one.rank, one.cause, one.seconds) == (2, cause, 60.0)
    assert one.excess == pytest.approx(3 / 7)
    assert (one.own, one.median) == pytest.approx((seconds / 10, USUAL[cause] / 10))


@pytest.mark.parametrize(
    "intervals",
    [
        [rows({}, {}, {"data": 1.8}, {})] * 30,
        [rows({}, {}, {}, {})] * 15 + [rows({}, {}, {"data": 20.5}, {}, seconds=30.0)] + [rows({}, {}, {}, {})] * 15,
        ([rows({}, {}, {"data": 4.0}, {})] * 4 + [rows({}, {}, {}, {})] * 2) * 5,
        [rows({}, {"data": 4.0}, {}, {}), rows({"data": 4.0}, {}, {}, {}), rows({}, {}, {"data": 4.0}, {})] * 10,
        [rows({"data": 9.0})] * 30,
    ],
    ids=["13 % slower", "one pause", "slow for 40 seconds", "each in its turn", "a single rank"],
)
def test_no_rank_is_found_that_is_not_slower_by_the_threshold_for_the_whole_period(intervals):
    assert found(intervals) == []


def test_every_reading_names_the_slowest_rank():
    values, _ = SlowRanks(0.2, 60.0).judge(rows({}, {"computation": 9.0}, {"data": 1.5}))
    assert values == {"slowest_rank": 1, "slowest_rank_excess": pytest.approx(2 / 8)}


class Pause(torch.autograd.Function):
    """The identity, with a pause in the forward pass and one twice as long in the backward pass."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * context.seconds)
        return gradient, None


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self._seconds = nn.Linear(8, 8), seconds

    def forward(self, points: Tensor) -> Tensor:
        return Pause.apply(self.layer(points), self._seconds)


class Towers(Encoder):
    """Blocks for the images; every pass takes `seconds`, and its backward pass twice as long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(seconds / 3) for _ in range(3))
        self.text_layer = nn.Linear(3, 8)

    def image(self, image: Tensor) -> Features:
        points = self.embedding(image)
        for block in self.blocks:
            points = block(points)
        return Features(points)

    def text(self, text: Tensor) -> Features:
        return Features(self.text_layer(text))


class PausingDataset(clipzoo.InMemoryDataset):
    def __init__(self, image: Tensor, text: Tensor, seconds: float) -> None:
        super().__init__(image, text)
        self._seconds = seconds

    def batches(self, **arguments: Any):
        for batch in super().batches(**arguments):
            time.sleep(self._seconds)
            yield batch


def trained(folder: Path, parallel: str, micro_batch: int | None, slow: int, cause: str) -> None:
    """Train on this rank, of which `slow` is slowed down."""
    is_slow = int(os.environ["RANK"]) == slow
    torch.manual_seed(0)
    encoder = Towers(0.06 if is_slow and cause == "computation" else 0.01)
    model = Model(encoder, ClipHead(8, 8, 4, temperature=0.07, max_scale=100.0, learnable_temperature=True))
    pause = 0.2 if is_slow and cause == "data" else 0.0
    clipzoo.train(
        model, InfoNCE(0.5, 0.5), PausingDataset(torch.randn(48, 4), torch.randn(48, 3), pause), batch=12, steps=40,
        world=World.from_process_group(), folder=folder, log_every=4, quiet=True,
        computation=Computation(parallel=parallel, micro_batch=micro_batch),
        inspection=Inspection(slow_ranks=SlowRankSettings(seconds=2.0)),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "micro_batch", "slow", "cause"),
    [
        ("ddp", None, 1, "data"),
        ("ddp", 2, 2, "computation"),
        ("fsdp", None, 0, "computation"),
        ("fsdp", 2, 1, "data"),
    ],
)
def test_of_three_ranks_the_slow_one_is_named_once_with_its_cause(tmp_path, parallel, micro_batch, slow, cause):
    run_ranks(3, trained, tmp_path, parallel, micro_batch, slow, cause)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = [line for line in lines if line.get("event") == "slow_rank"]
    assert [(event["rank"], event["cause"]) for event in events] == [(slow, cause)]
    assert events[0]["host"] == socket.gethostname()
    assert [line["slowest_rank"] for line in lines if "slowest_rank" in line].count(slow) >= 7
