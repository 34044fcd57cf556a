"""Folders made from a recipe: written once, again after a change, never over other files."""

from __future__ import annotations

import json

import pytest

from clipzoo.errors import ConfigError
from clipzoo.io import digest_of, ensure_folder


def ensure(root, recipe, text="text"):
    """Make a folder with one file; return True if it was written."""

    def write(folder):
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text(text)

    return ensure_folder(root, "record.json", recipe, write, "the folder of this test")


def test_a_folder_is_written_once_for_each_recipe_and_holds_its_digests(tmp_path):
    root = tmp_path / "missing" / "root"
    assert ensure(root, {"seed": 1}) and not ensure(root, {"seed": 1})
    record = json.loads((root / "record.json").read_text())
    assert record["seed"] == 1 and record["files"] == {"below/file": digest_of(root / "below" / "file")}
    assert ensure(root, {"seed": 2}, "other") and (root / "below" / "file").read_text() == "other"


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_text("changed")])
def test_a_folder_with_a_missing_or_changed_file_is_written_again(tmp_path, damage):
    ensure(tmp_path / "root", {})
    damage(tmp_path / "root" / "below" / "file")
    assert ensure(tmp_path / "root", {})
    assert (tmp_path / "root" / "below" / "file").read_text() == "text"


def test_a_folder_of_other_files_is_refused_and_kept(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="holds something else than the folder of this test"):
        ensure(tmp_path, {})
    assert (tmp_path / "notes").read_text() == "mine"


def test_after_an_error_while_writing_no_file_is_left(tmp_path):
    def fail(folder):
        (folder / "half").write_text("")
        raise ConfigError("no registry")

    with pytest.raises(ConfigError, match="no registry"):
        ensure_folder(tmp_path / "root", "record.json", {}, fail, "a folder")
    assert [path.name for path in tmp_path.iterdir()] == [".root.lock"]
