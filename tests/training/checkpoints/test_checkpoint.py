"""Checkpoints are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from clipzoo.errors import TrainingError
from clipzoo.io import DamagedFileError
from clipzoo.training import checkpoint_files
from clipzoo.training.checkpoints import CheckpointWriter, Counters
from tests.support import damage, sharded
from tests.support.runs import train, train_and_kill
from tests.support.shards import numbered, write_shard


def save_file(folder: Path, step: int, keep: int = 2) -> Path:
    return checkpoint_files.save(folder, step, sharded.state(step), {}, keep)


@pytest.fixture(params=[save_file, sharded.save], ids=["file", "sharded"])
def save(request) -> Callable[..., Path]:
    return request.param


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept_and_the_newest_is_loaded_with_the_values_and_types_that_it_had(tmp_path, save):
    paths = [save(tmp_path, step, keep=3) for step in (2, 4, 6, 8)]
    content, path = checkpoint_files.load_newest(tmp_path) or pytest.fail("none found")
    assert path == paths[-1] and path.stem == "step_00000008"
    sharded.assert_same(content, sharded.state(8))
    assert names(tmp_path) == sorted(name for path in paths[1:] for name in (path.name, f"{path.stem}.json"))
    assert checkpoint_files.recorded(tmp_path, "step") == 8


def write_another_mark(path: Path) -> None:
    path.write_text("{}")


@pytest.mark.parametrize("harm", [Path.unlink, write_another_mark, *damage.KINDS])
def test_a_checkpoint_with_a_damaged_mark_is_named_and_the_one_before_is_used(tmp_path, caplog, save, harm):
    before, path = save(tmp_path, 2), save(tmp_path, 4)
    harm(path.with_suffix(".json"))
    assert checkpoint_files.newest(tmp_path) == before
    assert f"{path.name} is not used" in caplog.text and "step_00000004.json" in caplog.text


@pytest.mark.parametrize("harm", [damage.flip_a_bit, *damage.KINDS])
def test_a_damaged_file_is_named_and_the_one_before_is_used(tmp_path, caplog, harm):
    before, path = save_file(tmp_path, 2), save_file(tmp_path, 4)
    harm(path)
    assert checkpoint_files.newest(tmp_path) == before and "step_00000004.pt is not used" in caplog.text
    if harm in damage.KINDS:
        with pytest.raises(DamagedFileError, match="step_00000004.pt is .*: give another checkpoint of the run"):
            checkpoint_files.read(path)


def test_a_damaged_newer_checkpoint_does_not_remove_a_valid_one(tmp_path):
    for step in (2, 4, 8):
        path = save_file(tmp_path, step)
    path.with_suffix(".json").unlink()
    path = save_file(tmp_path, 6)
    assert checkpoint_files.newest(tmp_path) == path
    assert [path.stem for path in sorted(tmp_path.glob("*.pt"))] == [f"step_0000000{step}" for step in (4, 6, 8)]


def test_partial_files_of_a_killed_process_are_removed_by_the_next_one(tmp_path):
    (tmp_path / ".step_00000002.pt.4321.tmp").write_bytes(b"half")
    save_file(tmp_path, 4)
    assert names(tmp_path) == ["step_00000004.json", "step_00000004.pt"]


def test_a_full_disk_is_named_and_leaves_the_last_one_untouched(tmp_path, save):
    before = save(tmp_path, 2, keep=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(TrainingError, match="(04.pt|00.safetensors): File too large .* Earlier checkpoints are un"):
            save(tmp_path, 4, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint_files.newest(tmp_path) == before
    assert save is sharded.save or names(tmp_path) == ["step_00000002.json", "step_00000002.pt"]


@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_damaged_mark_of_the_best_checkpoint_counts_as_none(tmp_path, kind):
    checkpoint_files.save(tmp_path, 2, {"step": 2}, {"value": 3.5}, keep=1)
    assert checkpoint_files.value_of_best(tmp_path) == 3.5
    kind(tmp_path / "step_00000002.json")
    assert checkpoint_files.value_of_best(tmp_path) is None


def test_a_checkpoint_that_would_run_code_is_not_loaded(tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harmed"),)

    path = tmp_path / "step_00000002.pt"
    torch.save({"step": 2, "model": Harmful()}, path)
    with pytest.raises(DamagedFileError, match="step_00000002.pt is no checkpoint of weights and plain values"):
        checkpoint_files.read(path)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.medium
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """A process that does nothing but save is killed at different moments."""
    for moment in range(6):
        folder = tmp_path / str(moment)
        child = os.fork()
        if child == 0:
            for step in range(1, 10_000):
                checkpoint_files.save(
                    folder, step, {"step": step, "weight": torch.full((500_000,), float(step))}, {}, keep=1
                )
            os._exit(0)
        while not list(folder.glob("*.json")):
            time.sleep(0.001)
        time.sleep(0.003 * moment)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        content, path = checkpoint_files.load_newest(folder) or pytest.fail("none is whole")
        assert torch.equal(content["weight"], torch.full((500_000,), float(content["step"])))
        assert json.loads(path.with_suffix(".json").read_text())["step"] == content["step"]


def fail() -> None:
    raise OSError("the disk is gone")


def test_an_error_in_the_background_is_raised_by_the_next_wait_and_only_once():
    writer = CheckpointWriter(background=True)
    writer.run(fail)
    with pytest.raises(OSError, match="the disk is gone"):
        writer.wait()
    writer.wait()


def test_an_error_in_the_background_is_raised_by_the_next_step_once_it_is_known():
    writer, reached = CheckpointWriter(background=True), threading.Event()

    def fail_when_reached() -> None:
        reached.wait()
        fail()

    writer.run(fail_when_reached)
    writer.raise_error()  # it does not wait, and nothing is known yet
    reached.set()
    with pytest.raises(OSError, match="the disk is gone"):
        for _ in range(10_000):
            writer.raise_error()
            threading.Event().wait(0.001)


def test_a_checkpoint_waits_for_the_one_before():
    writer, may_end, order = CheckpointWriter(background=True), threading.Event(), []

    def first() -> None:
        may_end.wait()
        order.append("first")

    writer.run(first)
    timer = threading.Timer(0.05, may_end.set)
    timer.start()
    writer.run(lambda: order.append("second"))
    assert order[0] == "first"
    writer.wait()
    assert order == ["first", "second"]


def test_without_a_thread_a_checkpoint_is_written_at_once():
    writer, done = CheckpointWriter(background=False), []
    writer.run(lambda: done.append(1))
    assert done == [1]
    with pytest.raises(OSError, match="the disk is gone"):
        writer.run(fail)


def test_the_wait_for_files_of_other_ranks_is_not_the_own_time_of_a_writer():
    others, written = threading.Event(), threading.Event()
    writer = CheckpointWriter(background=True)

    def write() -> None:
        writer.end_own_part()
        written.set()
        others.wait()

    writer.run(write)
    written.wait()
    threading.Timer(0.1, others.set).start()
    writer.wait()
    assert writer.own_seconds == 0
    writer.run(partial(time.sleep, 0.05))
    writer.wait()
    assert 0 < writer.own_seconds < 30


def test_resumed_counts_are_those_of_the_checkpoint_and_those_since():
    now = {"truncated_shards": 1}
    counters = Counters(lambda: now)
    counters.resume({"truncated_shards": 1, "empty_image": 4})
    assert counters.read() == {"truncated_shards": 1, "empty_image": 4}
    now |= {"empty_image": 2, "long_caption": 1}
    assert counters.read() == {"truncated_shards": 1, "empty_image": 6, "long_caption": 1}


def test_a_damaged_shard_that_is_new_after_a_resume_is_counted():
    counters = Counters(lambda: {"truncated_shards": 2})
    counters.resume({"truncated_shards": 1})
    assert counters.read() == {"truncated_shards": 2}


def rows(runs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_killed_and_resumed_logs_the_counts_of_an_undisturbed_run(tmp_path):
    samples = numbered(0, 100)
    for bad in (3, 40, 77):
        samples[bad] = samples[bad][0], {"png": b"", "txt": b"number 1"}
    write_shard(tmp_path / "shards" / "0.tar", samples)
    shards, setting = str(tmp_path / "shards"), "data.max_bad_fraction=0.1"
    train(shards, tmp_path / "whole", setting)
    train_and_kill(shards, tmp_path / "killed", 7, setting)
    train(shards, tmp_path / "killed", setting)
    whole, killed = (
        [row.get("empty_image", 0) for row in rows(tmp_path / name) if "loss" in row] for name in ("whole", "killed")
    )
    assert whole == killed and whole[-1] > whole[5] > 0
