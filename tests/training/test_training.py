"""Whole runs of train.py: killed and resumed, on several ranks, finished and started again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import clipzoo
from clipzoo.build import build_part
from clipzoo.config.compose import compose
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.runs.record import RunRecord
from clipzoo.training import checkpoint_files
from tests.support.evaluation_sets import write_sets
from tests.support.paths import ROOT
from tests.support.runs import (
    STEPS,
    assert_close,
    assert_equal,
    assert_same_training,
    losses,
    newest_state,
    overrides,
    train,
    train_and_kill,
    weights,
)


@pytest.mark.medium
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_a_run_killed_and_started_again_ends_with_the_same_weights_bit_for_bit(
    tiny_shards, undisturbed, tmp_path, step
):
    train_and_kill(tiny_shards, tmp_path, step)
    assert not (tmp_path / "run" / "results.json").exists()
    train(tiny_shards, tmp_path)
    assert_same_training(tmp_path, undisturbed)


@pytest.mark.slow
def test_two_ranks_with_micro_batches_and_tiles_train_the_weights_of_one(tiny_shards, undisturbed, tmp_path):
    train(tiny_shards, tmp_path, "trainer.micro_batch=2", "trainer.tile=3", ranks=2)
    assert_same_training(tmp_path, undisturbed, atol=1e-10)


@pytest.mark.slow
def test_torchrun_starts_two_ranks_that_train_the_weights_of_one(tiny_shards, undisturbed, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "train.py", *overrides(tiny_shards, tmp_path, "name=run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_training(tmp_path, undisturbed, atol=1e-10)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("changes", "code", "expected"),
    [
        ((), 0, (f"is finished after {STEPS} steps",)),
        (("head.temperature=0.1",), 2, ("holds a run of another configuration (head.temperature 0.07 -> 0.1)",)),
        (
            ("eval=demo", "trainer.log_every=3"), 0,
            ("is finished", "eval configuration was different", "clipzoo evaluate run="),
        ),
    ],
)  # fmt: skip
def test_a_finished_run_trains_no_more_and_says_what_differs(
    tiny_shards, undisturbed, tmp_path, changes, code, expected
):
    run = Path(shutil.copytree(undisturbed / "run", tmp_path / "run"))
    before = (run / "metrics.jsonl").read_text()
    (run / "report.md").unlink()
    log = train(tiny_shards, tmp_path, *changes, expected_code=code)
    assert all(words in log for words in expected) and (code or f"clipzoo report {run} writes it" in log)
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.medium
def test_results_name_the_evaluated_model_and_the_log_has_the_gap_and_the_spread_of_the_embeddings(undisturbed):
    results = json.loads((undisturbed / "run" / "results.json").read_text())
    assert {"experiment", "row", "overrides", "seed", "versions", "revision", "metrics"} <= results.keys()
    assert results["training"]["steps"] == STEPS
    assert torch.__version__.startswith(results["versions"]["torch"])
    assert (undisturbed / "run" / "report.md").exists()
    line = json.loads((undisturbed / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["gap_image_to_text"] == pytest.approx(line["positive_image_to_text"] - line["negative_image_to_text"])
    assert 0 <= line["alignment"] <= 4 and line["uniformity_image"] <= 0


@pytest.mark.medium
def test_an_unfinished_run_of_another_configuration_is_refused(tiny_shards, tmp_path):
    train_and_kill(tiny_shards, tmp_path, 2)
    log = train(tiny_shards, tmp_path, "seed=5", expected_code=2)
    assert "holds a run of another configuration (seed 0 -> 5)" in log


@pytest.mark.medium
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (None, "nowhere/00.tar"),
        ("trainer.global_batch=104", "a batch takes up to 104 samples of a source that has only 100"),
        ("head.text_width=3", "head.text_width=3, encoder.text_width=32: the head's width must be that of the encoder"),
        (
            "trainer.checkpoints.best_metric=zero_shot/cars/top1",
            "there is no metric trainer.checkpoints.best_metric=zero_shot/cars/top1",
        ),
    ],
)
def test_a_setting_that_would_fail_later_is_refused_at_the_start(tiny_shards, tmp_path, override, expected):
    shards = tiny_shards if override else "nowhere/{00..03}.tar"
    assert expected in train(shards, tmp_path, *filter(None, [override]), expected_code=2)
    assert not (tmp_path / "run").exists()


FSDP = "trainer.parallel=fsdp"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (("trainer.fsdp.offload=true",), "the settings of trainer.fsdp need trainer.parallel=fsdp"),
        ((FSDP, "trainer.fsdp.offload=true", "trainer.precision=fp16"), "offloaded gradients cannot be scaled"),
        ((FSDP, "trainer.fsdp.shard_group=0"), "trainer.fsdp.shard_group must be"),
        (("trainer.parallel=zero",), "trainer.parallel must be ddp or fsdp"),
        ((FSDP, "optim=adafactor"), "this optimizer cannot update weights that ranks divide"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        compose(["data.shards=a.tar", *changes])


def test_a_length_below_one_step_is_refused():
    plain = compose(["data.shards=x.tar", "trainer.epochs=0.5", "optim.schedule.warmup_epochs=0"])
    plain["trainer"]["global_batch"] = 8
    with pytest.raises(ConfigError, match=r"trainer.epochs=0.5 of 15 samples is less than one step of 8"):
        build_part(plain["trainer"]).check(15, World())


EMA = ("average=ema", "average.half_life_steps=2")


@pytest.mark.medium
def test_a_run_saves_evaluates_and_loads_the_average_of_the_weights_of_its_steps(tiny_shards, undisturbed, tmp_path):
    write_sets(tmp_path / "sets")
    train(
        tiny_shards, tmp_path, *EMA, "trainer.checkpoints.every=1", f"trainer.checkpoints.keep={STEPS}", "eval=none",
        f"eval.root={tmp_path / 'sets'}", "eval.zero_shot=[colours]", "eval.batch_size=16", "eval.workers=0",
    )  # fmt: skip
    averaged = tmp_path / "run"
    paths = (averaged / "checkpoints" / f"step_{step:08d}.pt" for step in range(1, STEPS + 1))
    steps = [checkpoint_files.read(path) for path in paths]
    shares = [0.5 ** ((STEPS - step) / 2) for step in range(1, STEPS + 1)]
    average = steps[-1]["average"]["model"]
    assert average.keys() == {name for name, value in steps[-1]["model"].items() if value.is_floating_point()}
    for name, value in average.items():
        offline = sum(share * state["model"][name] for share, state in zip(shares, steps, strict=True)) / sum(shares)
        torch.testing.assert_close(value, offline, rtol=1e-12, atol=1e-14)
    # The weights themselves are those of a run without an average, whose checkpoints have none.
    assert_equal(steps[-1]["model"], weights(undisturbed))
    assert newest_state(undisturbed).keys() == steps[-1].keys() - {"average"}

    metrics = {str(key): value for key, value in RunRecord.read(averaged).metrics.items()}
    assert {"zero_shot/colours/top1", "average/zero_shot/colours/top1"} <= metrics.keys()
    page = (averaged / "report.md").read_text()
    assert "## Zero-shot classification, %" in page and "## Averaged weights: zero-shot classification, %" in page
    logged = [json.loads(line) for line in (averaged / "metrics.jsonl").read_text().splitlines()]
    assert any("average/zero_shot/colours/top1" in line for line in logged)

    loaded = clipzoo.load(averaged, average=True).state_dict()
    assert all(torch.equal(loaded[name], value.float()) for name, value in average.items())
    assert_equal(clipzoo.load(averaged).state_dict(), clipzoo.load(undisturbed / "run").state_dict())
    with pytest.raises(ConfigError, match="has no averaged weights: its run was trained without average=ema"):
        clipzoo.load(undisturbed / "run", average=True)


@pytest.mark.slow
def test_an_average_is_the_same_after_a_kill_and_on_two_ranks(tiny_shards, tmp_path):
    train(tiny_shards, tmp_path / "whole", *EMA)
    expected = newest_state(tmp_path / "whole")["average"]["model"]
    train_and_kill(tiny_shards, tmp_path / "killed", 5, *EMA)
    train(tiny_shards, tmp_path / "killed", *EMA)
    assert_equal(newest_state(tmp_path / "killed")["average"]["model"], expected)
    sgd = ("optim=sgd", "optim.schedule.peak=0.1")
    train(tiny_shards, tmp_path / "one", *EMA, *sgd)
    train(tiny_shards, tmp_path / "two", *EMA, *sgd, ranks=2)
    one, two = (newest_state(tmp_path / name)["average"]["model"] for name in ("one", "two"))
    assert_close(two, one, rtol=1e-9, atol=1e-12)


RECIPES = {
    "sgd": ("optim=sgd", "optim.schedule.peak=0.1"),
    "adafactor": ("optim=adafactor", "optim/schedule=inverse_sqrt"),
    "muon": ("optim=muon", "optim/schedule=wsd", "optim.adamw_rate=0.5"),
    "lion": ("optim=timm", "optim.name=lion", "optim/schedule=linear", "tune.image.layer_decay=0.8"),
}
TOLERANCES = {"muon": 1e-4}
"""Relative difference of losses. Muon's Newton-Schulz iterations are in bfloat16, which magnifies rounding."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_resumes_bit_for_bit_and_has_the_same_losses_on_two_ranks(name, tiny_shards, tmp_path):
    train(tiny_shards, tmp_path / "whole", *RECIPES[name])
    train_and_kill(tiny_shards, tmp_path / "killed", 5, *RECIPES[name])
    assert "resuming from step" in train(tiny_shards, tmp_path / "killed", *RECIPES[name])
    assert_same_training(tmp_path / "killed", tmp_path / "whole")
    train(tiny_shards, tmp_path / "two", *RECIPES[name], ranks=2)
    # Not the weights: the sign of a gradient that is zero in theory is that of its rounding error.
    tolerance = TOLERANCES.get(name, 1e-9)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "whole"), rel=tolerance)
