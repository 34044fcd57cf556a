"""Averaged weights of runs: in checkpoints and results, beside the weights, which they do not change."""

from __future__ import annotations

import json

import pytest
import torch

import clipzoo
from clipzoo.errors import ConfigError
from clipzoo.runs.record import RunRecord
from clipzoo.training import checkpoint_files
from tests.support.evaluation_sets import write_sets
from tests.support.runs import STEPS, assert_equal, newest_state, train, train_and_kill, weights

EMA = ("average=ema", "average.half_life_steps=2")


@pytest.fixture
def averaged(tiny_shards, tmp_path):
    """A run with an average and an evaluation, with the checkpoints of all steps."""
    write_sets(tmp_path / "sets")
    sets = (
        "eval=none", f"eval.root={tmp_path / 'sets'}", "eval.zero_shot=[colours]", "eval.batch_size=16",
        "eval.workers=0",
    )  # fmt: skip
    train(
        tiny_shards, tmp_path / "whole", *EMA, *sets, "trainer.checkpoints.every=1", f"trainer.checkpoints.keep={STEPS}"
    )
    return tmp_path / "whole" / "run"


@pytest.mark.medium
def test_a_run_saves_evaluates_and_loads_the_average_of_the_weights_of_its_steps(averaged, undisturbed, tmp_path):
    folder = averaged / "checkpoints"
    steps = [checkpoint_files.read(folder / f"step_{step:08d}.pt") for step in range(1, STEPS + 1)]
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
    plain = clipzoo.load(averaged).state_dict()
    assert all(torch.equal(plain[name], value.to(plain[name].dtype)) for name, value in weights(undisturbed).items())
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
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-9, atol=1e-12)
