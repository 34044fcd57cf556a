"""Columns in files: resumed after the last whole file, on any number of ranks; damage; full disks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clipzoo.evaluation import task
from clipzoo.evaluation.task import Clock, Evaluation, View, compute, store
from clipzoo.io import WriteError
from clipzoo.types import PointSet
from tests.support import damage
from tests.support.disks import fill, small_disk
from tests.support.evaluation_sets import IMAGE_SIZE, batch_encoder, classes, model_of

VIEW = View("train", IMAGE_SIZE)


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(task, "CHUNK", 17)


@torch.no_grad()
def write(folder: Path, head: str = "clip", key: str = "ab", draws: int = 1):
    evaluation = Evaluation(model_of(head), batch_encoder(), draws, folder)
    functions = {**evaluation.feature_columns(), **evaluation.image_columns()}
    clock = Clock(42)
    stored = store(evaluation, classes(), VIEW, functions, folder, key, clock)
    return evaluation, functions, stored, clock


def files(folder: Path) -> list[Path]:
    return sorted((folder / "train.32").iterdir())


@pytest.mark.medium
@pytest.mark.parametrize(("head", "draws"), [("clip", 1), ("kme", 1), ("wpse", 3)])
@torch.no_grad()
def test_stored_columns_are_those_of_a_pass_in_memory_to_the_last_bit(tmp_path, head, draws):
    evaluation, functions, stored, _ = write(tmp_path, head, draws=draws)
    # 42 images in files of two batches of 8.
    assert [path.name for path in files(tmp_path)] == [f"ab.{first}.safetensors" for first in (0, 16, 32)]
    expected = compute(evaluation, classes(), VIEW, functions)
    assert list(stored) == list(expected) and len(stored) == 2 + draws
    for name, values in expected.items():
        read = stored[name]
        if isinstance(values, PointSet):
            assert isinstance(read, PointSet)
            assert torch.equal(read.points, values.points) and torch.equal(read.log_weights, values.log_weights)
        else:
            assert torch.equal(read, values) and read.dtype == values.dtype
    if draws > 1:
        assert not torch.equal(stored["image.0"], stored["image.1"])


@pytest.mark.medium
@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_damaged_file_is_named_and_computed_again_and_the_others_are_kept(tmp_path, caplog, kind):
    before = write(tmp_path)[2]["before"].clone()
    old = {path: path.stat().st_mtime_ns for path in files(tmp_path)}
    kind(files(tmp_path)[1])
    *_, stored, clock = write(tmp_path)
    assert torch.equal(stored["before"], before) and clock.done == clock.images == 16
    assert str(files(tmp_path)[1]) in caplog.text
    changed = {path for path in files(tmp_path) if path.stat().st_mtime_ns != old[path]}
    assert changed == {files(tmp_path)[1]}


def test_files_of_another_key_are_removed(tmp_path):
    write(tmp_path)
    clock = write(tmp_path, key="cd")[3]
    assert clock.done == 42 and {path.name.partition(".")[0] for path in files(tmp_path)} == {"cd"}
    assert write(tmp_path, key="cd")[3].done == 0


def test_a_disk_without_space_for_all_columns_is_an_error_before_the_second_batch(tmp_path):
    with small_disk(tmp_path / "disk", size="1m") as disk:
        (disk / "features" / "train.32").mkdir(parents=True)
        fill(disk, leave=8192)
        with pytest.raises(
            WriteError, match=r"train.*safetensors: No space left on device \(0.0 MB free on its disk\)"
        ):
            write(disk / "features")
        assert not files(disk / "features")
