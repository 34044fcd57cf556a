"""Profiles of a training: what they contain, and that they change nothing."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

import clipzoo
from clipzoo.errors import ConfigError
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.report.pages import write_report
from clipzoo.training.profile import PARTS, memory_curve, part_times
from clipzoo.training.settings import Inspection
from clipzoo.training.train import TrainingResult
from tests.support.pairs import pair_dataset, pair_model
from tests.support.runs import assert_equal, train as train_run, weights

LOCAL = set(PARTS) - {"communication"}


def train(folder: Path, profile: tuple[int, int] | None, steps: int = 6) -> TrainingResult:
    return clipzoo.train(
        pair_model(), InfoNCE(0.5, 0.5), pair_dataset(), batch=8, steps=steps, device="cpu", quiet=True, folder=folder,
        save_every=4, inspection=Inspection(profile=profile),
    )  # fmt: skip


def ranges(run: Path) -> Counter[str]:
    """Number of ranges of each part in the trace of a run."""
    with gzip.open(run / "profile" / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    annotations = (event["name"] for event in events if event.get("cat") == "user_annotation")
    return Counter(name for name in annotations if name in {*PARTS, "step"})


@pytest.mark.medium
def test_a_profile_has_the_parts_of_its_steps_alone_and_changes_nothing(tmp_path):
    profiled, plain = train(tmp_path / "a", (3, 4)), train(tmp_path / "b", None)
    assert_equal(profiled.model.state_dict(), plain.model.state_dict())
    assert ranges(tmp_path / "a") == Counter({"step": 2, **dict.fromkeys(LOCAL, 2)})
    assert not (tmp_path / "b" / "profile").exists()
    summary = json.loads((tmp_path / "a" / "profile" / "summary.json").read_text())
    assert summary["steps"] == [3, 4] and set(summary["host_ms"]) == {*LOCAL, "other"}
    assert summary["operations"] and max(size for _, size in summary["memory"]) > 0
    page = write_report(tmp_path / "a").read_text()
    assert "[Profile of steps 3 to 4](profile/profile.md)" in page
    written = (tmp_path / "a" / "profile" / "profile.md").read_text()
    assert "| image tower |" in written and "no memory snapshot" in written
    assert (tmp_path / "a" / "profile" / "profile.png").stat().st_size > 1000


@pytest.mark.medium
def test_a_resumed_run_profiles_the_steps_that_are_left(tmp_path, caplog):
    train(tmp_path / "a", None, steps=4)
    train(tmp_path / "a", (3, 6))
    assert ranges(tmp_path / "a")["step"] == 2
    train(tmp_path / "b", None, steps=4)
    train(tmp_path / "b", (1, 3))
    assert not (tmp_path / "b" / "profile").exists()
    assert "trainer.profile=[1,3]: the run resumes after step 4, nothing is profiled" in caplog.text


def test_steps_that_the_training_does_not_have_are_one_clear_message(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer.profile=\[3,7\]: the training has 6 steps"):
        train(tmp_path, (3, 7))
    with pytest.raises(ConfigError, match=r"profile must be .* in ascending order"):
        Inspection(profile=(4, 3))


@pytest.mark.slow
def test_on_two_ranks_the_first_is_profiled_with_its_communication(tiny_shards, undisturbed, tmp_path):
    train_run(tiny_shards, tmp_path, "trainer.profile=[3,4]", ranks=2)
    train_run(tiny_shards, tmp_path / "plain", ranks=2)
    assert_equal(weights(tmp_path), weights(tmp_path / "plain"))
    found = ranges(tmp_path / "run")
    assert found["step"] == 2 and found["communication"] >= 4


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


def test_a_part_is_without_the_parts_inside_and_all_sum_to_the_step_without_the_time_between_steps():
    later = [{**event, "ts": event["ts"] + 50_000} for event in STEP]
    expected = {"data": 1, "image tower": 3, "head": 1.5, "communication": 0.5, "backward": 3, "other": 1}
    for steps, events in ((1, STEP), (2, [*STEP, *later])):
        assert part_times(events) == (steps, pytest.approx(expected), {})


def test_a_kernel_belongs_to_the_part_that_started_it_and_one_of_nccl_to_communication():
    """The head's communication ends at 5000; autograd's own thread starts the kernels of the backward pass."""
    events = [
        *STEP, *kernel("gemm", 2000, 700, 1), *kernel("gemm", 7000, 900, 2),
        *kernel("ncclDevKernel_AllReduce", 8000, 400, 3), *kernel("softmax", 5500, 100, 4),
        *kernel("copy", 9500, 50, 5),
    ]  # fmt: skip
    expected = {"image tower": 0.7, "backward": 0.9, "communication": 0.4, "head": 0.1, "other": 0.05}
    assert part_times(events)[2] == pytest.approx(expected)


def test_the_memory_curve_keeps_its_peak_and_few_points():
    sizes = [(number, 2**20 * (500 if number == 4321 else number % 7)) for number in range(10_000)]
    events = [
        {"name": "[memory]", "ts": 1000.0 + number, "args": {"Total Allocated": size, "Device Type": 0}}
        for number, size in sizes
    ]
    curve = memory_curve([*events, {**events[0], "args": {"Total Allocated": 9e9, "Device Type": 1}}], device_type=0)
    assert len(curve) <= 401 and (4.321, 500.0) in curve
    assert memory_curve(events, device_type=1) == []
