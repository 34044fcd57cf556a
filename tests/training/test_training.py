"""Whole runs of train.py: killed and resumed, on several ranks, finished and started again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clipzoo.build import build_part
from clipzoo.config.compose import compose
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from tests.support.paths import ROOT
from tests.support.runs import (
    STEPS,
    assert_close,
    assert_equal,
    losses,
    overrides,
    train,
    train_and_kill,
    weights,
)


@pytest.fixture
def finished(undisturbed, tmp_path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(undisturbed, tmp_path / "runs"))


@pytest.mark.medium
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_a_run_killed_and_started_again_ends_with_the_same_weights_bit_for_bit(
    tiny_shards, undisturbed, tmp_path, step
):
    train_and_kill(tiny_shards, tmp_path, step)
    assert not (tmp_path / "run" / "results.json").exists()
    train(tiny_shards, tmp_path)
    assert_equal(weights(tmp_path), weights(undisturbed))
    assert losses(tmp_path) == losses(undisturbed)


@pytest.mark.slow
def test_two_ranks_with_micro_batches_and_tiles_train_the_weights_of_one(tiny_shards, undisturbed, tmp_path):
    train(tiny_shards, tmp_path, "trainer.micro_batch=2", "trainer.tile=3", ranks=2)
    assert_close(weights(tmp_path), weights(undisturbed))
    assert losses(tmp_path) == pytest.approx(losses(undisturbed), abs=1e-10)


@pytest.mark.slow
def test_torchrun_starts_two_ranks_that_train_the_weights_of_one(tiny_shards, undisturbed, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "train.py", *overrides(tiny_shards, tmp_path, "name=run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_close(weights(tmp_path), weights(undisturbed))
    assert losses(tmp_path) == pytest.approx(losses(undisturbed), abs=1e-10)


@pytest.mark.medium
def test_a_finished_run_says_so_and_trains_no_more(tiny_shards, finished):
    before = (finished / "run" / "metrics.jsonl").read_text()
    assert f"is finished after {STEPS} steps" in train(tiny_shards, finished)
    assert (finished / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.medium
def test_a_finished_run_is_not_taken_for_one_of_another_configuration(tiny_shards, finished):
    log = train(tiny_shards, finished, "head.temperature=0.1", expected_code=2)
    assert "holds a run of another configuration (head.temperature 0.07 -> 0.1)" in log


@pytest.mark.medium
def test_a_finished_run_says_how_to_get_another_evaluation(tiny_shards, finished):
    log = train(tiny_shards, finished, "eval=demo", "trainer.log_every=3")
    assert "is finished" in log and "eval configuration was different" in log and "clipzoo evaluate run=" in log


@pytest.mark.medium
def test_results_name_the_evaluated_model(undisturbed):
    results = json.loads((undisturbed / "run" / "results.json").read_text())
    assert {"experiment", "row", "overrides", "seed", "versions", "revision", "metrics"} <= results.keys()
    assert results["training"]["steps"] == STEPS
    assert torch.__version__.startswith(results["versions"]["torch"])
    assert (undisturbed / "run" / "report.md").exists()


@pytest.mark.medium
def test_an_unfinished_run_of_another_configuration_is_refused(tiny_shards, tmp_path):
    train_and_kill(tiny_shards, tmp_path, 2)
    log = train(tiny_shards, tmp_path, "seed=5", expected_code=2)
    assert "holds a run of another configuration (seed 0 -> 5)" in log


@pytest.mark.medium
def test_missing_shards_are_named_and_leave_no_run_directory(tmp_path):
    log = train("nowhere/{00..03}.tar", tmp_path, expected_code=2)
    assert "nowhere/00.tar" in log
    assert not (tmp_path / "run").exists()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.global_batch=104", "a batch takes up to 104 samples of a source that has only 100"),
        ("head.text_width=3", "head.text_width=3, encoder.text_width=32: the head's width must be that of the encoder"),
        (
            "trainer.checkpoints.best_metric=zero_shot/cars/top1",
            "there is no metric trainer.checkpoints.best_metric=zero_shot/cars/top1",
        ),
    ],
)
def test_a_setting_that_would_fail_later_is_refused_at_the_start(tiny_shards, tmp_path, override, expected):
    assert expected in train(tiny_shards, tmp_path, override, expected_code=2)
    assert not (tmp_path / "run").exists()


def test_a_length_below_one_step_is_refused():
    plain = compose(["data.shards=x.tar", "trainer.epochs=0.5", "optim.schedule.warmup_epochs=0"])
    plain["trainer"]["global_batch"] = 8
    with pytest.raises(ConfigError, match=r"trainer.epochs=0.5 of 15 samples is less than one step of 8"):
        build_part(plain["trainer"]).check(15, World())


@pytest.mark.medium
def test_the_gap_and_the_spread_of_the_embeddings_are_logged(undisturbed):
    line = json.loads((undisturbed / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["gap_image_to_text"] == pytest.approx(line["positive_image_to_text"] - line["negative_image_to_text"])
    assert 0 <= line["alignment"] <= 4
    assert line["uniformity_image"] <= 0
