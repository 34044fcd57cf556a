"""A run is known by the content of its dataset: a moved dataset is the same one."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch

from clipzoo.errors import ConfigError
from clipzoo.runs.directory import claim, find_run
from clipzoo.runs.identity import DATASET_FILE
from clipzoo.runs.lock import RunLock
from clipzoo.training import checkpoint_files
from tests.support import damage
from tests.support.evaluation_sets import config_of
from tests.support.processes import start_script
from tests.support.runs import STEPS, assert_equal, overrides


@pytest.mark.slow
def test_an_unnamed_run_resumes_and_is_found_finished_after_its_dataset_was_moved(tiny_shards, undisturbed, tmp_path):
    folders = [tmp_path / "first" / "data", tmp_path / "second" / "elsewhere", tmp_path / "third"]
    shutil.copytree(Path(tiny_shards).parent, folders[0])

    def run(folder: Path, code: int, **environment: str) -> str:
        shards = f"{folder}/{Path(tiny_shards).name}"
        process = start_script(
            "train.py", *overrides(shards, tmp_path / "runs"), log=tmp_path / folder.name, environment=environment
        )
        assert process.wait() == code, process.stderr
        return process.stderr

    run(folders[0], -signal.SIGKILL, FAULT="killed:5:0")
    for old, new in ((folders[0], folders[1]), (folders[1], folders[2])):
        new.parent.mkdir(exist_ok=True)
        old.rename(new)
        log = run(new, 0)
        assert ("resuming from step " if new == folders[1] else f"is finished after {STEPS} steps") in log
    (trained,) = (tmp_path / "runs").glob("*")
    newest, expected = (checkpoint_files.load_newest(path / "checkpoints") for path in (trained, undisturbed / "run"))
    assert_equal(newest[0]["model"], expected[0]["model"])
    assert newest[0]["step"] == STEPS


def claimed(folder: Path, fingerprint: str = "a", shards: str = "old", *changes: str) -> None:
    plain = config_of("clip", f"data.shards={shards}", f"name={folder.name}", f"runs={folder.parent}", *changes)
    with RunLock(folder) as lock:
        claim(lock, plain, fingerprint)


def found(folder: Path, fingerprint: str | None, *changes: str) -> Path:
    plain = config_of("clip", "data.shards=new", f"name={folder.name}", f"runs={folder.parent}", *changes)
    return find_run(plain, [], lambda run: fingerprint)


def test_a_named_run_goes_on_with_the_same_dataset_in_another_place_and_with_no_other(tmp_path):
    claimed(tmp_path / "run")
    assert found(tmp_path / "run", "a") == tmp_path / "run"
    with pytest.raises(ConfigError, match="another configuration .data.shards 'old' -> 'new'.: give another name="):
        found(tmp_path / "run", "b")
    with pytest.raises(ConfigError, match="seed 0 -> 1"):
        found(tmp_path / "run", "a", "seed=1")
    claimed(tmp_path / "run", "a", "new")
    with pytest.raises(ConfigError, match="data.shards 'new' -> 'other'"):
        claimed(tmp_path / "run", "b", "other")


def test_a_dataset_without_an_index_is_compared_once_it_has_one(tmp_path):
    claimed(tmp_path / "run")
    found(tmp_path / "run", None)
    (tmp_path / "run" / "results.json").write_text("{}")
    with pytest.raises(ConfigError, match="another configuration"):
        found(tmp_path / "run", None)


@pytest.mark.parametrize("change", [Path.unlink, damage.empty])
def test_a_run_without_a_fingerprint_is_compared_by_the_place_of_its_dataset(tmp_path, change):
    claimed(tmp_path / "run")
    change(tmp_path / "run" / DATASET_FILE)
    with pytest.raises(ConfigError, match="another configuration"):
        found(tmp_path / "run", "a")


def test_the_fingerprint_of_a_run_with_checkpoints_does_not_change(tmp_path):
    claimed(tmp_path / "run")
    claimed(tmp_path / "run", "b")
    assert found(tmp_path / "run", "b")
    (tmp_path / "run" / "checkpoints").mkdir()
    torch.save({}, tmp_path / "run" / "checkpoints" / "step_00000002.pt")
    claimed(tmp_path / "run", "c")
    assert found(tmp_path / "run", "b")
