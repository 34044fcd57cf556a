"""A run that continues from a checkpoint of another run equals a run of its configuration from the first step."""

from __future__ import annotations

import json

import pytest

from clipzoo.runs.directory import config_of
from clipzoo.runs.identity import digest
from tests.support.runs import assert_equal, newest_state, train

STABLE = (
    "optim/schedule=wsd", "optim.schedule.warmup_epochs=null", "optim.schedule.warmup_steps=2",
    "optim.schedule.cooldown_steps=3", "average=ema", "average.half_life_steps=2",
)  # fmt: skip
BRANCH = (*STABLE, "trainer.steps=7")


@pytest.fixture
def stable(tiny_shards, tmp_path):
    """A run of 9 steps whose cooldown begins after step 6, with all of its checkpoints."""
    train(tiny_shards, tmp_path / "stable", *STABLE, "trainer.keep=9")
    return tmp_path / "stable" / "run"


def rows(run):
    """The logged values of the steps that do not depend on time."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in ("step", "loss", "lr", "gradient_norm")} for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_cooldown_from_a_stable_checkpoint_equals_a_direct_run_bit_for_bit(stable, tiny_shards, tmp_path):
    log = train(tiny_shards, tmp_path / "branch", *BRANCH, f"init.resume={stable}")
    # Its own cooldown begins after step 4, so that the checkpoint after step 6 does not serve.
    assert f"continues from step 4 of {stable}" in log and "resuming from step 4" in log
    train(tiny_shards, tmp_path / "direct", *BRANCH)
    branch, direct = (newest_state(tmp_path / name, steps=7) for name in ("branch", "direct"))
    for part in ("model", "objective"):
        assert_equal(branch[part], direct[part])
        assert_equal(branch["average"][part], direct["average"][part])
    for parameter, moments in direct["optimizer"]["state"].items():
        assert_equal(branch["optimizer"]["state"][parameter], moments)
    assert rows(tmp_path / "branch" / "run") == rows(tmp_path / "direct" / "run")
    assert rows(tmp_path / "branch" / "run")[-1]["lr"] < 5e-4
    # It is the same run: the same configuration without init.resume finds it.
    digests = {digest(config_of(tmp_path / name / "run")) for name in ("branch", "direct")}
    assert len(digests) == 1
    assert "is finished after 7 steps" in train(tiny_shards, tmp_path / "branch", *BRANCH)


@pytest.mark.slow
def test_a_checkpoint_that_a_run_would_not_reach_is_refused_and_leaves_no_directory(stable, tiny_shards, tmp_path):
    checkpoints = stable / "checkpoints"
    refused = {
        "optim.schedule.peak=1e-3": "the learning rates of the two runs are equal: train that run with a larger",
        "head.temperature=0.5": "is a run of another configuration (head.temperature 0.07 -> 0.5): only its length",
        f"init.resume={checkpoints}/step_00000006.pt": "the learning rates of the two runs differ after step 5",
        f"init.resume={checkpoints}/step_00000003.pt": f"does not exist: the run's checkpoints are in {checkpoints}",
        f"init.resume={tmp_path}/nothing": f"init.resume={tmp_path}/nothing is not a run: there is no",
    }
    for change, message in refused.items():
        log = train(tiny_shards, tmp_path / "branch", *BRANCH, f"init.resume={stable}", change, expected_code=2)
        assert message in log, log
        assert not (tmp_path / "branch" / "run").exists()
