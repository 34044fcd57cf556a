"""Files and folders that are written completely or not at all."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from clipzoo import io
from clipzoo.errors import ConfigError
from tests.support.disks import fill, small_disk, use_all_inodes


def test_a_file_takes_its_name_when_it_is_complete_and_an_error_leaves_the_old_file_and_no_temporary_one(tmp_path):
    path = tmp_path / "a" / "b" / "results.json"
    with io.whole(path) as file:
        file.write(b"new")
        assert not path.exists()
    with pytest.raises(LookupError), io.whole(path) as file:
        file.write(b"half")
        raise LookupError
    assert path.read_text() == "new" and list(path.parent.iterdir()) == [path]


def test_text_that_no_encoding_holds_is_written_all_the_same(tmp_path):
    io.write_whole(tmp_path / "report.md", "a file name of other bytes: \udcff")
    assert (tmp_path / "report.md").read_bytes() == b"a file name of other bytes: \\udcff"


def test_content_and_name_are_flushed_to_the_disk_before_the_old_file_is_gone(tmp_path):
    """The order of the system's calls: write, fsync, rename, fsync of the folder."""
    calls = []
    hooks = {name: getattr(os, name) for name in ("fsync", "replace")}
    patch = pytest.MonkeyPatch()
    for name, call in hooks.items():
        patch.setattr(os, name, lambda *given, name=name, call=call: (calls.append(name), call(*given))[1])
    with patch.context():
        io.write_json(tmp_path / "results.json", {"a": 1})
    patch.undo()
    assert calls == ["fsync", "replace", "fsync"]


def test_a_full_disk_is_named_with_the_free_space_and_the_remedy_and_the_old_file_stays(tmp_path):
    with small_disk(tmp_path / "disk", size="1m") as disk:
        path = disk / "results.json"
        io.write_whole(path, "old")
        fill(disk)
        with pytest.raises(io.WriteError) as caught:
            io.write_whole(path, "x" * 10_000)
        assert str(caught.value) == (
            f"could not write {path}: No space left on device (0.0 MB free on its disk). "
            "Free some space, then run the same command again"
        )
        assert path.read_text() == "old" and not list(disk.glob(".*"))


def test_a_disk_without_inodes_is_told_from_one_without_space(tmp_path):
    with small_disk(tmp_path / "disk", size="10m", nr_inodes="10") as disk:
        use_all_inodes(disk)
        with pytest.raises(io.WriteError, match=r"the disk has no free inodes \(10.5 MB free on its disk\). Remove fi"):
            io.write_whole(disk / "results.json", "new")
        with pytest.raises(io.WriteError, match="could not write .*/runs/run: the disk has no free inodes"):
            io.make_folder(disk / "runs" / "run")


def test_a_kill_at_the_rename_leaves_the_old_file(tmp_path):
    path = tmp_path / "results.json"
    io.write_whole(path, "old")
    child = os.fork()
    if child == 0:
        sys.addaudithook(lambda event, _: os.kill(os.getpid(), signal.SIGKILL) if event == "os.rename" else None)
        io.write_whole(path, "new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.read_text() == "old"


def ensure(root, recipe, text="text"):
    """Make a folder with one file; return True if it was written."""

    def write(folder):
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text(text)

    return io.ensure_folder(root, "record.json", recipe, write, "the folder of this test")


def test_a_folder_is_written_once_for_each_recipe_and_holds_its_digests(tmp_path):
    root = tmp_path / "missing" / "root"
    assert ensure(root, {"seed": 1}) and not ensure(root, {"seed": 1})
    record = json.loads((root / "record.json").read_text())
    assert record["seed"] == 1 and record["files"] == {"below/file": io.digest_of(root / "below" / "file")}
    assert ensure(root, {"seed": 2}, "other") and (root / "below" / "file").read_text() == "other"


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_text("changed")])
def test_a_folder_with_a_missing_or_changed_file_is_written_again(tmp_path, damage):
    file = tmp_path / "root" / "below" / "file"
    ensure(tmp_path / "root", {})
    damage(file)
    assert ensure(tmp_path / "root", {}) and file.read_text() == "text"


def test_a_folder_of_other_files_is_refused_and_kept_and_after_an_error_no_file_is_left(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="holds something else than the folder of this test"):
        ensure(tmp_path / "other", {})
    assert (tmp_path / "other" / "notes").read_text() == "mine"

    def fail(folder):
        (folder / "half").write_text("")
        raise ConfigError("no registry")

    with pytest.raises(ConfigError, match="no registry"):
        io.ensure_folder(tmp_path / "root", "record.json", {}, fail, "a folder")
    assert {path.name for path in tmp_path.iterdir()} == {"other", ".other.lock", ".root.lock"}
