"""Names of runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from clipzoo.config.trust import read
from clipzoo.io import folder_name
from clipzoo.runs.directory import LONGEST_DESCRIPTION, claim, description, find_run, run_folder
from clipzoo.runs.identity import digest
from clipzoo.runs.lock import RunLock
from clipzoo.runs.sweep import points
from tests.support.experiments import composed_once

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
    assert find_run(composed_once(*other), other) == Path(
        tmp_path, f"data.shards-a.tar+encoder-tiny+seed-1-{digest(composed_once(*other))}"
    )
