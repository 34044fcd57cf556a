"""NUCLR and FastCLIP through the real trainer: killed in the middle of an epoch, resumed on one rank and on two."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from tests.support.runs import assert_close, assert_equal, losses, newest_state, train, train_and_kill

pytestmark = pytest.mark.medium

NUCLR = (
    "head=cosine",
    "objective=nuclr",
    "objective._target_=tests.support.faults.FaultyNUCLR",
    # Popularity learns from the first step on, and fast enough to matter within these few.
    "objective.frozen_epochs=0",
    "objective.eta=0.01",
    # 100 samples in steps of 16: nine steps end in the second epoch, where samples come a second time.
    "trainer.checkpoints.every=3",
)
KILLED_AFTER = 4


@pytest.fixture(scope="module")
def straight(tiny_shards, tmp_path_factory) -> Path:
    """The runs folder of an undisturbed run."""
    runs = tmp_path_factory.mktemp("straight")
    train(tiny_shards, runs, *NUCLR)
    return runs


@pytest.fixture(scope="module")
def killed(tiny_shards, tmp_path_factory) -> Path:
    """The runs folder of a run that SIGKILL ended in its first epoch, a step after its checkpoint."""
    runs = tmp_path_factory.mktemp("killed")
    train_and_kill(tiny_shards, runs, KILLED_AFTER, *NUCLR)
    return runs


def test_nuclr_killed_within_an_epoch_ends_with_the_same_weights_and_state_bit_for_bit(
    tiny_shards, straight, killed, tmp_path
):
    runs = shutil.copytree(killed, tmp_path / "runs")
    train(tiny_shards, runs, *NUCLR)
    expected, actual = newest_state(straight), newest_state(runs)
    for part in ("model", "objective"):
        assert_equal(actual[part], expected[part])
    assert losses(runs) == losses(straight)
    assert (expected["objective"]["zeta"] + 0.05).abs().max() > 1e-3
    assert expected["objective"]["log_u"].isfinite().all(), "an epoch has seen every sample"


@pytest.mark.slow
def test_nuclr_killed_on_one_rank_and_resumed_on_two_ends_as_on_one(tiny_shards, straight, killed, tmp_path):
    runs = shutil.copytree(killed, tmp_path / "runs")
    train(tiny_shards, runs, *NUCLR, ranks=2)
    expected, actual = newest_state(straight), newest_state(runs)
    for part in ("model", "objective"):
        assert_close(actual[part], expected[part], rtol=1e-9, atol=1e-9)
    assert losses(runs) == pytest.approx(losses(straight), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["AmorLIP", "NeuCLIP"])
def test_networks_of_an_objective_killed_within_an_epoch_end_as_without_bit_for_bit(tiny_shards, tmp_path, objective):
    faulty = f"objective._target_=tests.support.faults.Faulty{objective}"
    changes = ("head=cosine", f"objective={objective.lower()}", faulty, "trainer.checkpoints.every=3")
    train(tiny_shards, tmp_path / "straight", *changes)
    train_and_kill(tiny_shards, tmp_path / "killed", KILLED_AFTER, *changes)
    train(tiny_shards, tmp_path / "killed", *changes)
    expected, actual = newest_state(tmp_path / "straight"), newest_state(tmp_path / "killed")
    for part in ("model", "objective"):
        assert_equal(actual[part], expected[part])
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    assert expected["objective"]["network"].abs().sum() > 0


FASTCLIP = (
    "head=cosine",
    "objective=fastclip",
    "objective._target_=tests.support.faults.FaultyFastCLIP",
    "objective.temperature_rate=0.05",
    "trainer.checkpoints.every=3",
)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v2", "v3"])
def test_fastclip_killed_within_an_epoch_ends_with_the_same_state_on_one_rank_and_on_two(
    tiny_shards, tmp_path, version
):
    changes = (*FASTCLIP, f"objective.version={version}")
    train(tiny_shards, tmp_path / "straight", *changes)
    expected = newest_state(tmp_path / "straight")
    train_and_kill(tiny_shards, tmp_path / "one", KILLED_AFTER, *changes)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    train(tiny_shards, tmp_path / "one", *changes)
    train(tiny_shards, tmp_path / "two", *changes, ranks=2)
    one, two = (newest_state(tmp_path / runs) for runs in ("one", "two"))
    for part in ("model", "objective"):
        assert_equal(one[part], expected[part])
        assert_close(two[part], expected[part], rtol=1e-9, atol=1e-9)
    moved = expected["objective"]["tau"].log() if version == "v2" else -expected["objective"]["log_scale"]
    assert (moved - math.log(0.07)).abs().max() > 0.1
