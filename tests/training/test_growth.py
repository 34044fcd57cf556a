"""data.grow: a resumed run takes appended samples from its next epoch on, and every resume after it is exact."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clipzoo.io.weights import recorded
from tests.conftest import write_tiny_shards
from tests.support.processes import start_script
from tests.support.runs import (
    assert_close,
    assert_equal,
    log_of_end,
    losses,
    newest_state,
    overrides,
    train,
    train_and_kill,
)
from tests.support.shards import numbered, write_shard

pytestmark = pytest.mark.medium

NUCLR = (
    "head=cosine", "objective=nuclr", "objective._target_=tests.support.faults.FaultyNUCLR",
    "objective.frozen_epochs=0", "objective.eta=0.01", "trainer.checkpoints.every=3",
)  # fmt: skip
STEPS = 17
"""100 samples in steps of 16, then 160: the first epoch ends in step 6, the first one of all samples in step 16."""
LENGTH = f"trainer.steps={STEPS}"


@pytest.fixture
def shards(tmp_path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    write_tiny_shards(folder)
    return folder


def append(shards: Path) -> None:
    """Append 60 samples in two shards."""
    write_shard(shards / "00004.tar", numbered(100, 25))
    write_shard(shards / "00005.tar", numbered(125, 35))


def test_a_grown_run_keeps_its_epoch_and_state_and_is_resumed_bit_for_bit(shards, tmp_path):
    runs, others = tmp_path / "runs", tmp_path / "others"
    train_and_kill(f"{shards}", runs, 4, *NUCLR, LENGTH)
    before = newest_state(runs, 3)["objective"]
    append(shards)
    assert "data.grow=true" in train(f"{shards}", runs, *NUCLR, LENGTH, expected_code=2)
    shutil.copytree(runs, others)

    grow = (*NUCLR, LENGTH, "data.grow=true")
    train(f"{shards}", runs, *grow)
    # Killed in the first step of an epoch with all samples.
    train_and_kill(f"{shards}", others, 7, *grow)
    assert [stage["samples"] for stage in recorded(others / "run" / "checkpoints", "data", list)] == [100, 160]
    assert "data.grow=true" in train(f"{shards}", others, *NUCLR, LENGTH, expected_code=2)
    train(f"{shards}", others, *grow)

    grown, again = newest_state(runs, STEPS), newest_state(others, STEPS)
    for part in ("model", "objective"):
        assert_equal(again[part], grown[part])
    assert losses(others) == losses(runs)
    assert before["zeta"].shape == (2, 100) and grown["objective"]["zeta"].shape == (2, 160)
    assert grown["objective"]["log_u"].isfinite().all(), "ten steps from row 100 on see all 160 samples"


@pytest.mark.slow
def test_batches_of_the_old_epoch_are_those_of_a_run_that_does_not_grow_and_two_ranks_train_as_one(shards, tmp_path):
    straight, one, two = tmp_path / "straight", tmp_path / "one", tmp_path / "two"
    train(f"{shards}", straight, LENGTH)
    train_and_kill(f"{shards}", one, 3, LENGTH)
    append(shards)
    shutil.copytree(one, two)
    train(f"{shards}", one, LENGTH, "data.grow=true")
    train(f"{shards}", two, LENGTH, "data.grow=true", ranks=2)
    assert losses(one)[:6] == losses(straight)[:6] and losses(one)[7:] != losses(straight)[7:]
    assert_close(newest_state(two, STEPS)["model"], newest_state(one, STEPS)["model"])


@pytest.mark.slow
def test_an_unnamed_run_is_found_when_its_pattern_names_more_shards(shards, tmp_path):
    def go(pattern: str, *changes: str, fault: str = "none:-1:-1", code: int = 0) -> str:
        environment = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "PICTURES": "blank", "FAULT": fault}
        lines = overrides(f"{shards}/{pattern}.tar", tmp_path / "runs", LENGTH, *changes)
        process = start_script("train.py", *lines, log=tmp_path / "log", environment=environment)
        return log_of_end(process, code)

    go("{00000..00003}", fault="killed:4:0", code=-9)
    append(shards)
    log = go("{00000..00005}", "data.grow=true")
    (run,) = (tmp_path / "runs").glob("*/results.json")
    assert len(list((tmp_path / "runs").glob("*/config.yaml"))) == 1 and "60 samples were appended to 100" in log
    assert [stage["samples"] for stage in recorded(run.parent / "checkpoints", "data", list)] == [100, 160]
