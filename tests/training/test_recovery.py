"""Runs that meet broken losses, signals, kills, full disks and corrupted checkpoints, and resume."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipzoo.training import checkpoint_files
from tests.support.disks import fill, small_disk
from tests.support.runs import STEPS, assert_close, assert_equal, log_of_end, start, train, weights

pytestmark = pytest.mark.medium


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nan", "huge"])
def test_a_broken_loss_stops_the_run_with_its_samples_named_and_the_checkpoint_untouched(
    tiny_shards, undisturbed, tmp_path, kind
):
    ranks = start(tiny_shards, tmp_path, ranks=2, fault=f"{kind}:5:1")
    assert "step 5 diverged" in "".join(log_of_end(rank, 1) for rank in ranks)
    report = json.loads((tmp_path / "run" / "broken_step_5.json").read_text())
    assert len({sample for rank in report["ranks"] for sample in rank["sample_id"]}) == 16
    weights(tmp_path, 4)
    train(tiny_shards, tmp_path, ranks=2)
    assert_close(weights(tmp_path), weights(undisturbed))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGUSR1])
def test_a_signal_to_one_rank_makes_all_save_the_same_step_and_resume_on_another_number_of_ranks(
    tiny_shards, undisturbed, tmp_path, number
):
    first, second = start(tiny_shards, tmp_path, "trainer.checkpoints.every=1000", ranks=2, pause=0.5)
    first.wait_for("step 3/")
    second.send_signal(number)
    assert log_of_end(first, 75) + log_of_end(second, 75)
    saved, _ = checkpoint_files.load_newest(tmp_path / "run" / "checkpoints") or pytest.fail("no checkpoint")
    assert 3 <= saved["step"] < STEPS
    assert f"resuming from step {saved['step']}" in train(tiny_shards, tmp_path)
    assert_close(weights(tmp_path), weights(undisturbed))


def test_two_signals_save_one_checkpoint_from_which_the_run_resumes_bit_for_bit(tiny_shards, undisturbed, tmp_path):
    (rank,) = start(tiny_shards, tmp_path, "trainer.checkpoints.every=1000", pause=0.5)
    rank.wait_for("step 2/")
    rank.send_signal(signal.SIGTERM)
    rank.send_signal(signal.SIGTERM)
    log_of_end(rank, 75)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    train(tiny_shards, tmp_path, "trainer.checkpoints.every=1000")
    assert_equal(weights(tmp_path), weights(undisturbed))


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_checkpoint_leaves_the_one_before_in_use(tiny_shards, undisturbed, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    (rank,) = start(tiny_shards, tmp_path, killed_at_rename="step_00000004.pt")
    log_of_end(rank, -signal.SIGKILL)
    assert list(folder.glob(".step_00000004.pt.*.tmp")) and not (folder / "step_00000004.json").exists()
    assert "resuming from step 2" in train(tiny_shards, tmp_path)
    assert_equal(weights(tmp_path), weights(undisturbed))
    assert not list(folder.glob(".*"))


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", size="100m") as folder:
        yield folder


def test_a_full_disk_stops_the_run_and_training_resumes_from_the_last_good_checkpoint(tiny_shards, undisturbed, disk):
    first, second = start(tiny_shards, disk, ranks=2, pause=0.5)
    first.wait_for("step 2/")
    while not (disk / "run" / "checkpoints" / "step_00000002.json").exists():
        time.sleep(0.01)
    filler = fill(disk, leave=1_000_000)
    logs = log_of_end(first, 74) + log_of_end(second, 74)
    assert "step_00000004.pt: No space left on device" in logs and "Earlier checkpoints are untouched" in logs
    weights(disk, 2)
    filler.unlink()
    assert "resuming from step 2" in train(tiny_shards, disk, "trainer.checkpoints.keep=1")
    assert_close(weights(disk), weights(undisturbed))


def test_a_corrupted_newest_checkpoint_is_named_and_the_one_before_is_used(tiny_shards, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run" / "results.json").unlink()
    newest = tmp_path / "run" / "checkpoints" / f"step_{STEPS:08d}.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    log = train(tiny_shards, tmp_path)
    assert f"{newest.name} is not used: its SHA-256 differs from the one in" in log
    assert f"resuming from step {STEPS - 1}" in log
    assert_equal(weights(tmp_path), weights(undisturbed))
