"""Runs with sharded checkpoints: killed at any moment, resumed on another number of ranks, loaded and evaluated."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import clipzoo
from clipzoo.cli.evaluate import evaluate
from tests.support.processes import Process
from tests.support.runs import assert_close, assert_equal, losses, newest_state, start, train

pytestmark = pytest.mark.slow

SHARDED = (
    "head=cosine", "objective=nuclr", "objective._target_=tests.support.faults.FaultyNUCLR",
    "objective.frozen_epochs=0", "objective.eta=0.01", "trainer.sample_state=sharded",
    "trainer.checkpoints.in_background=true",
)  # fmt: skip
KILLS, STEPS, SEED = 20, 34, 3


def state_of(runs: Path, steps: int) -> dict[str, dict[str, torch.Tensor]]:
    state = newest_state(runs, steps)
    return {part: state[part] for part in ("model", "objective")}


@pytest.fixture(scope="module")
def straight(tiny_shards, tmp_path_factory) -> Path:
    """The runs folder of an undisturbed run on two ranks."""
    runs = tmp_path_factory.mktemp("straight")
    train(tiny_shards, runs, *SHARDED, ranks=2)
    return runs


@pytest.mark.parametrize("name", ["step_00000004", "step_00000004.json"])
def test_a_kill_between_data_and_mark_leaves_the_checkpoint_before_in_use(tiny_shards, straight, tmp_path, name):
    first, second = start(tiny_shards, tmp_path, *SHARDED, ranks=2, killed_at_rename=name)
    assert first.wait() == -signal.SIGKILL
    second.wait()
    assert not (tmp_path / "run" / "checkpoints" / "step_00000004.json").exists()
    assert "resuming from step 2" in train(tiny_shards, tmp_path, *SHARDED, ranks=2)
    expected, actual = state_of(straight, 9), state_of(tmp_path, 9)
    for part, tensors in expected.items():
        assert_equal(actual[part], tensors)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_twenty_kills_of_any_rank_at_random_moments_change_no_bit_of_the_weights(tiny_shards, tmp_path):
    length = (f"trainer.steps={STEPS}", "trainer.checkpoints.every=1", "trainer.checkpoints.keep=2")
    train(tiny_shards, tmp_path / "undisturbed", *SHARDED, *length, ranks=2)
    moments, runs = random.Random(SEED), tmp_path / "disturbed"
    for _ in range(KILLS):
        ranks = start(tiny_shards, runs, *SHARDED, *length, ranks=2, pause=0.05)
        kill_at_a_random_moment(ranks, runs / "run" / "checkpoints", moments)
    train(tiny_shards, runs, *SHARDED, *length, ranks=2)
    expected, actual = state_of(tmp_path / "undisturbed", STEPS), state_of(runs, STEPS)
    for part, tensors in expected.items():
        assert_equal(actual[part], tensors)
    assert losses(runs)[-1] == losses(tmp_path / "undisturbed")[-1]


def kill_at_a_random_moment(ranks: list[Process], folder: Path, moments: random.Random) -> None:
    """Kill one rank some checkpoints after the start, and the others as a launcher does, a moment later."""
    before, more = newest_mark(folder), moments.randint(0, 1)
    while newest_mark(folder) < before + more and all(rank.process.is_alive() for rank in ranks):
        time.sleep(0.005)
    time.sleep(moments.uniform(0, 0.3 if more else 2.0))
    assert newest_mark(folder) < STEPS, "the run has ended before it was killed"
    victim = moments.choice(ranks)
    victim.process.kill()
    time.sleep(moments.uniform(0, 0.5))
    for rank in ranks:
        rank.process.kill()
        rank.wait()


def newest_mark(folder: Path) -> int:
    return max((int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.json")), default=0)


def test_a_run_goes_from_two_ranks_to_one_to_four_in_mid_epoch(tiny_shards, straight, tmp_path):
    length = "trainer.checkpoints.every=3"
    plans = [(2, 2, SHARDED), (1, 4, (*SHARDED[:-2], "trainer.checkpoints.format=file")), (4, 7, SHARDED)]
    for ranks, step, settings in plans:
        processes = start(tiny_shards, tmp_path, *settings, length, ranks=ranks, pause=0.5)
        processes[0].wait_for(f"step {step}/")
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert {process.wait() for process in processes} == {75}
    train(tiny_shards, tmp_path, *SHARDED, length, ranks=2)
    expected, actual = state_of(straight, 9), state_of(tmp_path, 9)
    for part, tensors in expected.items():
        assert_close(actual[part], tensors, rtol=1e-9, atol=1e-9)
    assert losses(tmp_path) == pytest.approx(losses(straight), abs=1e-9)


def test_a_sharded_run_equals_one_with_files_and_is_loaded_and_evaluated_like_it(tiny_shards, straight, tmp_path):
    whole = (*SHARDED[:-2], "trainer.sample_state=whole", "trainer.checkpoints.format=file")
    train(tiny_shards, tmp_path, *whole, ranks=2)
    for part, tensors in state_of(tmp_path, 9).items():
        assert_equal(state_of(straight, 9)[part], tensors)
    path = straight / "run" / "checkpoints" / "step_00000009"
    for place in (straight / "run", path):
        assert_equal(clipzoo.load(place).state_dict(), clipzoo.load(tmp_path / "run").state_dict())
    assert evaluate([f"run={path}", "device=cpu", "eval=none"]) == {}
    assert (straight / "run" / "step_00000009" / "report.md").exists()


def test_a_missing_shard_is_named_and_training_goes_on_from_the_checkpoint_before(tiny_shards, straight, tmp_path):
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run" / "results.json").unlink()
    newest = tmp_path / "run" / "checkpoints" / "step_00000009"
    (newest / "rank_00001.safetensors").unlink()
    log = train(tiny_shards, tmp_path, *SHARDED, ranks=2)
    assert f"{newest} is not used: rank_00001.safetensors: it is missing" in log
    assert "resuming from step 8" in log
    for part, tensors in state_of(straight, 9).items():
        assert_equal(state_of(tmp_path, 9)[part], tensors)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_one_message(tiny_shards, tmp_path):
    blocked = tmp_path / "run" / "checkpoints"
    blocked.parent.mkdir()
    blocked.write_text("a file in place of the folder")
    logs = train_and_fail(tiny_shards, tmp_path, *SHARDED)
    assert "could not write" in logs and "Earlier checkpoints are untouched" in logs and "Traceback" not in logs


def train_and_fail(shards: str, runs: Path, *changes: str) -> str:
    processes = start(shards, runs, *changes, ranks=2)
    assert all(process.wait() != 0 for process in processes)
    return "".join(process.stderr for process in processes)
