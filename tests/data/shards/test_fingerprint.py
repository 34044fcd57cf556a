"""Fingerprints from stored indexes."""

from __future__ import annotations

import shutil
from pathlib import Path

from clipzoo.data.index import DATASET, stored_fingerprint
from tests.support.shards import opened, write_numbered


def stored(shards: Path, index_folder: Path | None = None) -> str | None:
    data = {"_target_": DATASET, "shards": str(shards), "caption_key": None, "shuffle_window": 2}
    return stored_fingerprint({**data, "index_folder": index_folder and str(index_folder)}, shards)


def fingerprint(shards: Path, index_folder: Path | None = None) -> str:
    return opened(shards, index_folder=index_folder and str(index_folder)).fingerprint


def test_a_moved_dataset_has_the_fingerprint_of_the_opened_one(tmp_path):
    folder = write_numbered(tmp_path / "a", [3, 2])
    assert stored(folder) is None
    expected = fingerprint(folder)
    folder.rename(tmp_path / "b")
    assert stored(tmp_path / "b") == expected
    shutil.copytree(tmp_path / "b", tmp_path / "c")  # keeps the times of modification
    assert stored(tmp_path / "c") == expected


def test_the_index_of_another_dataset_with_the_same_names_is_not_used(tmp_path):
    index = tmp_path / "index"
    first, second = (write_numbered(tmp_path / name, [3, 2]) for name in ("a", "b"))
    fingerprint(first, index)
    assert stored(first, index) is not None and stored(second, index) is None
    write_numbered(first, [3, 4])
    assert stored(first, index) is None
