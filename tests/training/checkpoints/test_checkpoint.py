"""Checkpoints are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clipzoo.errors import TrainingError
from clipzoo.io import DamagedFileError
from clipzoo.training import checkpoint_files
from tests.support import damage


def state(step: int) -> dict:
    return {"step": step, "model": {"weight": torch.full((1000,), float(step))}}


def steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.split("_")[1]) for path in folder.glob("step_*.pt"))


def test_the_newest_are_kept_and_the_newest_is_loaded(tmp_path):
    for step in (2, 4, 6, 8):
        checkpoint_files.save(tmp_path, step, state(step), {}, keep=3)
    assert steps(tmp_path) == [4, 6, 8]
    content, path = checkpoint_files.load_newest(tmp_path) or pytest.fail("none found")
    assert content["step"] == 8 and torch.equal(content["model"]["weight"], state(8)["model"]["weight"])
    assert path.name == "step_00000008.pt"
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [f"step_0000000{n}.json" for n in (4, 6, 8)]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove_its_mark(path: Path) -> None:
    path.with_suffix(".json").unlink()


def empty_its_mark(path: Path) -> None:
    path.with_suffix(".json").write_text("{}")


def damage_its_mark(kind: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda path: kind(path.with_suffix(".json"))


@pytest.mark.parametrize(
    "harm", [truncate, flip_a_bit, remove_its_mark, empty_its_mark, *map(damage_its_mark, damage.KINDS)]
)
def test_a_broken_newest_one_is_named_and_the_one_before_is_used(tmp_path, caplog, harm):
    for step in (2, 4):
        path = checkpoint_files.save(tmp_path, step, state(step), {}, keep=2)
    harm(path)
    assert checkpoint_files.newest(tmp_path) == tmp_path / "step_00000002.pt"
    assert "step_00000004.pt is not used" in caplog.text


def test_a_damaged_newer_checkpoint_does_not_remove_a_valid_one(tmp_path):
    for step in (2, 4, 8):
        path = checkpoint_files.save(tmp_path, step, state(step), {}, keep=2)
    remove_its_mark(path)
    checkpoint_files.save(tmp_path, 6, state(6), {}, keep=2)
    assert checkpoint_files.newest(tmp_path) == tmp_path / "step_00000006.pt"
    assert steps(tmp_path) == [4, 6, 8]


def test_partial_files_of_a_killed_process_are_removed_by_the_next_one(tmp_path):
    (tmp_path / ".step_00000002.pt.4321.tmp").write_bytes(b"half")
    (tmp_path / ".step_00000002.pt.tmp").write_bytes(b"half, of an earlier version")
    checkpoint_files.save(tmp_path, 4, state(4), {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000004.json", "step_00000004.pt"]


def test_a_full_disk_is_named_and_leaves_the_last_one_untouched(tmp_path):
    checkpoint_files.save(tmp_path, 2, state(2), {}, keep=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(TrainingError, match="04.pt: File too large .* Earlier checkpoints are untouched"):
            checkpoint_files.save(tmp_path, 4, state(4), {}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002.json", "step_00000002.pt"]
    assert checkpoint_files.newest(tmp_path) == tmp_path / "step_00000002.pt"


@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_damaged_mark_of_the_best_checkpoint_counts_as_none(tmp_path, kind):
    checkpoint_files.save(tmp_path, 2, state(2), {"value": 3.5}, keep=1)
    assert checkpoint_files.value_of_best(tmp_path) == 3.5
    kind(tmp_path / "step_00000002.json")
    assert checkpoint_files.value_of_best(tmp_path) is None


@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_damaged_checkpoint_that_is_read_by_its_name_is_one_message(tmp_path, kind):
    path = checkpoint_files.save(tmp_path, 2, state(2), {}, keep=1)
    kind(path)
    with pytest.raises(DamagedFileError, match="step_00000002.pt is .*: give another checkpoint of the run"):
        checkpoint_files.read(path)


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
