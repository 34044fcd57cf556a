"""Whole runs of train.py in their own processes, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from clipzoo.training import checkpoint
from tests.support.paths import ROOT

STEPS = 9


def command(shards: str, runs: Path, *overrides: str, ranks: int = 1) -> list[str]:
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [
        *start, "train.py", "encoder=tiny", f"data.shards='{shards}'", "data.workers=0", "trainer.global_batch=16",
        "trainer.epochs=null", f"trainer.steps={STEPS}", "trainer.precision=float64", "trainer.save_every=2",
        "trainer.log_every=1", "optim.schedule.warmup_epochs=0.3", f"runs={runs}", "name=run", *overrides,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def train(shards: str, runs: Path, *overrides: str, ranks: int = 1, expected: int = 0) -> str:
    done = subprocess.run(
        command(shards, runs, *overrides, ranks=ranks), cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == expected, done.stderr[-3000:]
    return done.stderr


def train_and_kill(shards: str, runs: Path, step: int) -> None:
    """Start a run and kill it with SIGKILL as soon as it says that `step` is done."""
    process = subprocess.Popen(
        command(shards, runs), cwd=ROOT, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(f"step {step}/"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.1)


def weights(runs: Path) -> dict[str, torch.Tensor]:
    state, path = checkpoint.load_newest(runs / "run" / "checkpoints")
    assert path.name == f"step_{STEPS:08d}.pt"
    return state["model"]


def losses(runs: Path) -> list[float]:
    lines = (json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def undisturbed(tiny_shards, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("undisturbed")
    train(tiny_shards, runs)
    return runs


@pytest.mark.parametrize("step", [1, 5])
def test_a_run_killed_and_started_again_ends_with_the_same_weights_bit_for_bit(
    tiny_shards, undisturbed, tmp_path, step
):
    train_and_kill(tiny_shards, tmp_path, step)
    assert not (tmp_path / "run" / "results.json").exists()
    train(tiny_shards, tmp_path)
    expected, found = weights(undisturbed), weights(tmp_path)
    assert all(torch.equal(value, found[key]) for key, value in expected.items())
    assert losses(tmp_path) == losses(undisturbed)


@pytest.mark.parametrize("overrides", [(), ("trainer.micro_batch=2", "trainer.tile=3")])
def test_two_ranks_train_the_weights_of_one(tiny_shards, undisturbed, tmp_path, overrides):
    train(tiny_shards, tmp_path, *overrides, ranks=2)
    expected, found = weights(undisturbed), weights(tmp_path)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-10, msg=key)
    assert losses(tmp_path) == pytest.approx(losses(undisturbed), abs=1e-10)


def test_a_finished_run_says_so_and_trains_no_more(tiny_shards, undisturbed):
    before = (undisturbed / "run" / "metrics.jsonl").read_text()
    said = train(tiny_shards, undisturbed)
    assert f"is finished after {STEPS} steps" in said
    assert (undisturbed / "run" / "metrics.jsonl").read_text() == before


def test_a_finished_run_is_not_taken_for_one_of_another_configuration(tiny_shards, undisturbed):
    said = train(tiny_shards, undisturbed, "head.temperature=0.1", expected=2)
    assert "holds a run of another configuration (head.temperature 0.07 -> 0.1)" in said


def test_a_finished_run_says_how_to_get_another_evaluation(tiny_shards, undisturbed):
    said = train(tiny_shards, undisturbed, "eval=demo", "trainer.log_every=3")
    assert "is finished" in said and "evaluated with another eval: python scripts/evaluate.py run=" in said


def test_results_name_what_was_run(undisturbed):
    results = json.loads((undisturbed / "run" / "results.json").read_text())
    assert {"experiment", "row", "overrides", "seed", "versions", "revision", "metrics"} <= results.keys()
    assert results["training"]["steps"] == STEPS
    assert torch.__version__.startswith(results["versions"]["torch"])
    assert (undisturbed / "run" / "report.md").exists()


def test_a_name_that_holds_another_run_is_refused(tiny_shards, tmp_path):
    train_and_kill(tiny_shards, tmp_path, 2)
    said = train(tiny_shards, tmp_path, "seed=5", expected=2)
    assert "holds a run of another configuration (seed 0 -> 5)" in said


def test_shards_that_are_not_there_are_named_and_leave_no_folder(tmp_path):
    said = train("nowhere/{00..03}.tar", tmp_path, expected=2)
    assert "nowhere/00.tar" in said
    assert not list(tmp_path.iterdir())


def test_the_gap_and_the_spread_of_the_embeddings_are_logged(undisturbed):
    line = json.loads((undisturbed / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["gap_image_to_text"] == pytest.approx(line["positive_image_to_text"] - line["negative_image_to_text"])
    assert 0 <= line["alignment"] <= 4
    assert line["uniformity_image"] <= 0
