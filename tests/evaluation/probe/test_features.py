"""Features on disk: resumed, checked, and refused by a disk that is too small."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clipzoo.evaluation.probe import read_features, write_features
from clipzoo.io import WriteError
from tests.support import damage
from tests.support.disks import fill, small_disk
from tests.support.evaluation_sets import IMAGE_SIZE, batch_encoder, classes, model_of


@torch.no_grad()
def write(folder, key: str = "key") -> None:
    data = classes().splits["test"]
    write_features(model_of("clip"), data, "colours", "test", batch_encoder(), IMAGE_SIZE, folder, key)


@pytest.mark.medium
@pytest.mark.parametrize("file", ["test.before.npy", "test.labels.npy", "test.key"])
@pytest.mark.parametrize("kind", damage.KINDS)
def test_damaged_features_are_computed_again(tmp_path, caplog, kind, file):
    write(tmp_path)
    before = read_features(tmp_path, "test", "before")
    kind(tmp_path / file)
    write(tmp_path)
    again = read_features(tmp_path, "test", "before")
    assert torch.equal(again.features, before.features) and torch.equal(again.labels, before.labels)
    assert np.load(tmp_path / "test.before.npy").shape == tuple(before.features.shape)


def test_undamaged_features_are_not_computed_again(tmp_path):
    write(tmp_path)
    changed = (tmp_path / "test.before.npy").stat().st_mtime_ns
    write(tmp_path)
    assert (tmp_path / "test.before.npy").stat().st_mtime_ns == changed
    write(tmp_path, key="other")
    assert (tmp_path / "test.before.npy").stat().st_mtime_ns != changed


def test_a_disk_without_space_for_all_features_is_an_error_that_names_the_file(tmp_path):
    with small_disk(tmp_path / "disk", size="1m") as disk:
        (disk / "features").mkdir()
        fill(disk, leave=8192)
        with pytest.raises(
            WriteError, match=r"test.*npy: No space left on device \(0.0 MB free on its disk\). Free some"
        ):
            write(disk / "features")
        assert not (disk / "features" / "test.key").exists()
