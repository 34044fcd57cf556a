"""Run directories: made, refused and removed, known by their configuration and the content of their dataset."""

from __future__ import annotations

import shlex
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml

from clipzoo.config.trust import read
from clipzoo.errors import ConfigError
from clipzoo.io import DamagedFileError, folder_name
from clipzoo.runs import directory as run
from clipzoo.runs.directory import (
    LONGEST_DESCRIPTION,
    check_configuration,
    claim,
    config_of,
    description,
    find_run,
    run_folder,
)
from clipzoo.runs.identity import DATASET_FILE, digest
from clipzoo.runs.lock import RunLock
from clipzoo.runs.sweep import points
from clipzoo.training import checkpoint_files
from tests.support import damage
from tests.support.evaluation_sets import config_of as composed
from tests.support.experiments import composed_once
from tests.support.processes import start_script
from tests.support.runs import STEPS, assert_equal, overrides

TUNED = ("tune/image=frozen", "tune/text=frozen", "tune/image=lora", "tune.image.rate=0.1", "tune.head_steps=5")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    message = r"file/run cannot be made \(Not a directory\): give another runs="
    with pytest.raises(ConfigError, match=message), run.created(tmp_path / "file" / "run", is_first=True):
        raise AssertionError("the run starts nevertheless")


def test_tuning_is_part_of_the_identity():
    names = {digest(composed_once("data.shards=a.tar", *changes)) for changes in ((), *((line,) for line in TUNED))}
    assert len(names) == 1 + len(TUNED)


def test_a_finished_run_that_is_asked_for_more_steps_names_the_way_to_continue_it(tmp_path):
    plain = dict(composed_once("data.shards=x.tar", "encoder=tiny"))
    shorter, longer = ({**plain, "trainer": {**plain["trainer"], "epochs": epochs}} for epochs in (50.0, 80.0))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(shorter))
    with pytest.raises(ConfigError, match=r"trainer.epochs 50.0 -> 80.0\): give another name=..., or remove"):
        check_configuration(tmp_path, longer)
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"50.0 -> 80.0\): .* give another name=... and init.resume={tmp_path} "):
        check_configuration(tmp_path, longer)


def claimed(folder: Path, fingerprint: str = "a", shards: str = "old", *changes: str) -> None:
    plain = composed("clip", f"data.shards={shards}", f"name={folder.name}", f"runs={folder.parent}", *changes)
    with RunLock(folder) as lock:
        claim(lock, plain, fingerprint)


@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_damaged_config_is_named_instead_of_compared(tmp_path, kind):
    claimed(tmp_path)
    kind(tmp_path / "config.yaml")
    with pytest.raises(ConfigError) as caught:
        check_configuration(tmp_path, composed("clip"))
    message = str(caught.value)
    assert "another configuration" not in message and "config.yaml" in message
    assert "restore it from a copy, or give another name=... to train anew" in message
    assert kind is not damage.empty or "config.yaml is empty: restore it" in message


def test_an_unchanged_config_is_not_written_again(tmp_path):
    claimed(tmp_path)
    before = (tmp_path / "config.yaml").stat()
    claimed(tmp_path)
    after = (tmp_path / "config.yaml").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    claimed(tmp_path, "a", "old", "trainer.checkpoints.every=7")
    assert config_of(tmp_path)["trainer"]["checkpoints"]["every"] == 7


def test_nodes_of_another_type_are_named(tmp_path):
    plain = composed("clip")
    for changes, fault in (
        ({"head": "clip"}, "has 'clip' as head, not a mapping"),
        ({"head": {}}, "lacks head._target_"),
        ({"eval": {**plain["eval"], "zero_shot": [1]}}, "has 1 as eval.zero_shot.0, not text"),
        ({"row": 3}, "has 3 as row, not text or nothing"),
        ({"eval": None}, "has None as eval, not a mapping"),
        ({"trainer": {**plain["trainer"], "epochs": "ten"}}, "has 'ten' as trainer.epochs, not a number or nothing"),
        ({"encoder": {**plain["encoder"], "image_tower": {"_target_": [1]}}}, "has .1. as encoder.image_tower._target"),
        ({"seed": "none"}, "has 'none' as seed, not a number"),
    ):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({**plain, **changes}))
        with pytest.raises(DamagedFileError, match=f"config.yaml {fault}"):
            config_of(tmp_path)


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


def found(folder: Path, fingerprint: str | None, *changes: str) -> Path:
    plain = composed("clip", "data.shards=new", f"name={folder.name}", f"runs={folder.parent}", *changes)
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


@pytest.mark.parametrize("change", [Path.unlink, damage.empty])
def test_without_a_fingerprint_the_place_of_the_dataset_counts_once_the_run_is_finished(tmp_path, change):
    claimed(tmp_path / "run")
    found(tmp_path / "run", None)  # a dataset without an index is compared once it has one
    (tmp_path / "run" / "results.json").write_text("{}")
    with pytest.raises(ConfigError, match="another configuration"):
        found(tmp_path / "run", None)
    (tmp_path / "run" / "results.json").unlink()
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


# Names of runs

LINES = [
    (["data=demo", "head=kme", "trainer.epochs=40"], "data-demo+head-kme+trainer.epochs-40"),
    (["scale=demo", "head.a=[0.6,0.4]", "experiment=wpse/cc3m_clip"], "wpse-cc3m_clip+scale-demo+head.a-0.6-0.4"),
    (["data.shards=/data/cc3m/{00000..00331}.tar", "seed=1", "seed=2"], "data.shards-cc3m+seed-2"),
    (["objective._target_=mine.parts.Loss", "head/kernel=imq"], "objective-Loss+head-kernel-imq"),
    (["data.shards='pipe:curl -H tok https://u:p@h/a.tar'", "+a.b=-1"], "data.shards-pipe-curl+a.b--1"),
    (["init.weights=open_clip:ViT-B-16/laion2b_s34b", "init.text=runs/a-1"], "init.weights-laion2b_s34b+init.text-a-1"),
    (["runs=x", "logger=wandb", "eval=demo", "search=wpse", "hydra/launcher=processes"], "run"),
    (["head.note='; rm -rf $HOME `x` | ä'"], "head.note-rm-rf-HOME-x"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "expected"), LINES)
def test_a_name_says_which_settings_were_overridden(overrides, expected):
    name = description(overrides)
    assert name == expected
    assert folder_name(name, "name") == shlex.quote(name) == name
    override = read(f"run=runs/{name}-1a2b3c4d/checkpoints/step_00000001.pt")
    assert override.value() == f"runs/{name}-1a2b3c4d/checkpoints/step_00000001.pt"


def test_a_long_name_has_short_keys_and_then_fewer_of_them():
    keys = [f"optim.schedule.{letter * 8}=1e-3" for letter in "abcdefgh"]
    assert description(keys[:4]) == "+".join(f"{letter * 8}-0.001" for letter in "abcd")
    assert description(keys) == "+".join(f"{letter * 8}-0.001" for letter in "abcde")
    assert len(description([f"head.{'x' * 200}=1"])) <= LONGEST_DESCRIPTION


@pytest.mark.parametrize("name", ["cliphead-infonce-{}", "best of all-{}"])
def test_a_run_with_another_description_is_found_by_its_digest(name, tmp_path):
    overrides = ("data.shards=a.tar", "encoder=tiny", f"runs={tmp_path}")
    plain = composed_once(*overrides)
    new = run_folder(plain, overrides)
    assert new == tmp_path / f"data.shards-a.tar+encoder-tiny-{digest(plain)}"
    old = tmp_path / name.format(digest(plain))
    with RunLock(old) as lock:
        claim(lock, plain, "fingerprint")
    (point,) = points(overrides)
    assert find_run(plain, overrides) == find_run(plain, overrides[::-1]) == point.folder == old
    new.mkdir()
    assert find_run(plain, overrides) == new


def test_a_run_of_another_configuration_is_not_found(tmp_path):
    overrides = ("data.shards=a.tar", "encoder=tiny", f"runs={tmp_path}")
    (tmp_path / f"cliphead-infonce-{digest(composed_once(*overrides))}").mkdir()
    other = (*overrides, "seed=1")
    name = f"data.shards-a.tar+encoder-tiny+seed-1-{digest(composed_once(*other))}"
    assert find_run(composed_once(*other), other) == tmp_path / name
