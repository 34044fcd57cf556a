"""Counts of unusable samples go on after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clipzoo.training.checkpoints import Counters
from tests.support.runs import train, train_and_kill
from tests.support.shards import numbered, write_shard


def test_resumed_counts_are_those_of_the_checkpoint_and_those_since():
    now = {"truncated_shards": 1}
    counters = Counters(lambda: now)
    counters.resume({"truncated_shards": 1, "empty_image": 4})
    assert counters.read() == {"truncated_shards": 1, "empty_image": 4}
    now |= {"empty_image": 2, "long_caption": 1}
    assert counters.read() == {"truncated_shards": 1, "empty_image": 6, "long_caption": 1}


def test_a_damaged_shard_that_is_new_after_a_resume_is_counted():
    counters = Counters(lambda: {"truncated_shards": 2})
    counters.resume({"truncated_shards": 1})
    assert counters.read() == {"truncated_shards": 2}


def rows(runs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_killed_and_resumed_logs_the_counts_of_an_undisturbed_run(tmp_path):
    samples = numbered(0, 100)
    for bad in (3, 40, 77):
        samples[bad] = samples[bad][0], {"png": b"", "txt": b"number 1"}
    write_shard(tmp_path / "shards" / "0.tar", samples)
    shards, setting = str(tmp_path / "shards"), "data.max_bad_fraction=0.1"
    train(shards, tmp_path / "whole", setting)
    train_and_kill(shards, tmp_path / "killed", 7, setting)
    train(shards, tmp_path / "killed", setting)
    whole, killed = (
        [row.get("empty_image", 0) for row in rows(tmp_path / name) if "loss" in row] for name in ("whole", "killed")
    )
    assert whole == killed and whole[-1] > whole[5] > 0
