"""What a long run meets: lost ranks, hangs, broken losses, full disks, signals. Real processes throughout."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clipzoo.build import part
from clipzoo.config import compose as configuration
from clipzoo.data.in_memory import PairData
from clipzoo.errors import ConfigError
from clipzoo.runs import directory as run
from clipzoo.training import checkpoint
from tests.support.runs import STEPS, Rank, same, start, train, weights


@pytest.fixture(scope="module")
def undisturbed(tiny_shards, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("undisturbed")
    train(tiny_shards, runs)
    return runs


def ends(rank: Rank, code: int) -> str:
    assert rank.end() == code, rank.said
    return rank.said


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.global_batch=104", "a batch takes up to 104 samples of a source that has 100"),
        ("head.text_width=3", "head.text_width is 3, but the encoder's features have 32"),
        ("trainer.best_metric=zero_shot/cars/top1", "there is no metric trainer.best_metric=zero_shot/cars/top1"),
    ],
)
def test_what_would_fail_later_is_refused_at_the_start_and_leaves_no_folder(tiny_shards, tmp_path, override, expected):
    (rank,) = start(tiny_shards, tmp_path / "runs", override)
    assert expected in ends(rank, 2)
    assert not (tmp_path / "runs" / "run").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    named = pytest.raises(ConfigError, match=r"file/run cannot be made \(Not a directory\): give another runs=")
    with named, run.nothing_left_of_a_failed_start(tmp_path / "file" / "run"):
        raise AssertionError("it starts nevertheless")


def test_a_length_of_no_step_is_refused():
    plain = configuration.resolved(configuration.composed(["data.shards=x.tar", "trainer.epochs=0.5"]))
    plain["trainer"]["global_batch"] = 8
    few = PairData(torch.zeros(15, 1), torch.zeros(15, 1))
    with pytest.raises(ConfigError, match=r"trainer.epochs=0.5 of 15 samples is no whole step of 8"):
        part(plain["trainer"]).check(few, 0)


def test_a_killed_rank_ends_the_other_with_its_name(tiny_shards, tmp_path):
    first, second = start(tiny_shards, tmp_path, "trainer.steps=100000", ranks=2)
    first.wait_for("step 3/")
    second.signal(signal.SIGKILL)
    assert "rank 1 no longer answers: killed" in ends(first, 1)


def test_the_killed_first_rank_ends_the_others_though_it_served_their_store(tiny_shards, tmp_path):
    first, second = start(tiny_shards, tmp_path, "trainer.steps=100000", ranks=2)
    first.wait_for("step 3/")
    first.signal(signal.SIGKILL)
    assert "rank 0, or the torchrun, that serves the ranks' store is gone" in ends(second, 1)


def test_an_exception_on_one_rank_ends_all_and_its_traceback_is_the_only_one(tiny_shards, tmp_path):
    first, second = start(tiny_shards, tmp_path, ranks=2, fault="raises:3:1")
    assert "rank 1 failed:\nTraceback" in ends(second, 1)
    assert second.said.rstrip().endswith("LookupError: broken on purpose")
    assert "rank 1 ends the run: LookupError: broken on purpose" in ends(first, 1)
    assert "Traceback" not in first.said


def test_a_rank_that_hangs_is_named_when_the_timeout_is_over(tiny_shards, tmp_path):
    ranks = start(tiny_shards, tmp_path, "trainer.timeout=15", ranks=2, fault="hangs:3:1")
    said = "".join(ends(rank, 1) for rank in ranks)
    assert "rank 1 is at step 3, computing; the others wait for it" in said


@pytest.mark.parametrize("kind", ["nan", "huge"])
def test_a_broken_loss_stops_the_run_with_its_samples_named_and_the_checkpoint_untouched(
    tiny_shards, undisturbed, tmp_path, kind
):
    ranks = start(tiny_shards, tmp_path, ranks=2, fault=f"{kind}:5:1")
    assert "step 5 is broken" in "".join(ends(rank, 1) for rank in ranks)
    found = json.loads((tmp_path / "run" / "broken_step_5.json").read_text())["ranks"]
    assert len({each for rank in found for each in rank["sample_id"]}) == 8
    weights(tmp_path, 4)
    train(tiny_shards, tmp_path, ranks=2)
    expected, ended = weights(undisturbed), weights(tmp_path)
    for key, value in expected.items():
        torch.testing.assert_close(ended[key], value, rtol=0, atol=1e-10, msg=key)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_one_rank_that_is_asked_to_stop_makes_all_save_the_same_step_and_resume_on_other_ranks(
    tiny_shards, undisturbed, tmp_path, number
):
    first, second = start(tiny_shards, tmp_path, "trainer.save_every=1000", ranks=2, pause=0.5)
    first.wait_for("step 3/")
    second.signal(number)
    assert ends(first, 75) + ends(second, 75)
    found = checkpoint.load_newest(tmp_path / "run" / "checkpoints")
    assert found is not None and 3 <= found[0]["step"] < STEPS
    assert f"resuming from step {found[0]['step']}" in train(tiny_shards, tmp_path)
    expected, ended = weights(undisturbed), weights(tmp_path)
    for key, value in expected.items():
        torch.testing.assert_close(ended[key], value, rtol=0, atol=1e-10, msg=key)


def test_a_kill_in_the_middle_of_a_checkpoint_leaves_the_one_before_in_use(tiny_shards, undisturbed, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    (rank,) = start(tiny_shards, tmp_path)
    while not (folder / ".step_00000004.pt.tmp").exists():
        assert rank.process.is_alive(), rank.said
    rank.signal(signal.SIGKILL)
    assert rank.end() == -9
    assert not (folder / "step_00000004.json").exists()
    assert "resuming from step 2" in train(tiny_shards, tmp_path)
    assert same(weights(undisturbed), weights(tmp_path))
    assert not list(folder.glob(".*"))


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of 100 MiB."""
    if os.getuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_that_fills_up_stops_the_run_and_the_last_good_checkpoint_goes_on(tiny_shards, undisturbed, small_disk):
    first, second = start(tiny_shards, small_disk, ranks=2, pause=0.3)
    first.wait_for("step 2/")
    while not (small_disk / "run" / "checkpoints" / "step_00000002.json").exists():
        time.sleep(0.01)
    free = shutil.disk_usage(small_disk).free
    with (small_disk / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, free - 1_000_000)
    said = ends(first, 1) + ends(second, 1)
    assert "could not write the checkpoint" in said and "is the disk full? Earlier checkpoints are untouched" in said
    weights(small_disk, 2)
    (small_disk / "filler").unlink()
    assert "resuming from step 2" in train(tiny_shards, small_disk, "trainer.keep=1")
    expected, ended = weights(undisturbed), weights(small_disk)
    for key, value in expected.items():
        torch.testing.assert_close(ended[key], value, rtol=0, atol=1e-10, msg=key)


def test_a_corrupted_newest_checkpoint_is_named_and_the_one_before_is_used(tiny_shards, undisturbed, tmp_path):
    train(tiny_shards, tmp_path)
    (tmp_path / "run" / "results.json").unlink()
    newest = tmp_path / "run" / "checkpoints" / f"step_{STEPS:08d}.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    said = train(tiny_shards, tmp_path)
    assert f"{newest.name} is not used: its SHA-256 differs from its mark's" in said
    assert f"resuming from step {STEPS - 2}" in said
    assert same(weights(undisturbed), weights(tmp_path))
