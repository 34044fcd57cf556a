"""The metrics that a search compares."""

from __future__ import annotations

import json

import pytest

from clipzoo.errors import ConfigError
from clipzoo.runs.search import SUITE, measured, require_metrics, results_of

METRICS = {"zero_shot/a/top1": 40.0, "zero_shot/b/top1": 60.0, "zero_shot/b/top5": 90.0}


def test_a_name_is_one_metric_and_a_pattern_the_mean_of_its_matches():
    assert measured(["zero_shot/b/top1", "zero_shot/*/top1"], METRICS) == [60.0, 50.0]
    with pytest.raises(ConfigError, match="there is no metric zero_shot/c/top1 .there are: zero_shot/a/top1, "):
        measured(["zero_shot/c/top1"], METRICS)


def test_costs_and_the_last_loss_are_metrics_of_a_finished_run(tmp_path):
    record = {"metrics": METRICS, "training": {"seconds": 12.5, "steps": 3, "device": "CPU"}}
    (tmp_path / "results.json").write_text(json.dumps(record))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5}\n')
    names = ["zero_shot/*/top1", "training/seconds", "loss"]
    assert measured(names, results_of(tmp_path)) == [50.0, 12.5, 2.5]


def test_a_metric_that_the_evaluation_lacks_is_refused_before_training():
    evaluation = {"_target_": SUITE, "zero_shot": ["a"], "linear_probe": [], "retrieval": ["c"]}
    names = ["zero_shot/a/top1", "retrieval/*/image_to_text/recall_at_1", "retrieval/c_paired/x/y", "loss"]
    require_metrics(names, evaluation, rungs=[0.5])
    for name in ("zero_shot/b/top1", "top1", "linear_probe/*/before/top1"):
        with pytest.raises(ConfigError, match="there is no metric .* .there are: zero_shot/a/..., retrieval/c/..."):
            require_metrics([name], evaluation, rungs=[])
    with pytest.raises(ConfigError, match="search.rungs compare evaluations during training, and loss is not one"):
        require_metrics(["loss"], evaluation, rungs=[0.5])
    require_metrics(["mine/b/top1"], {"_target_": "mypackage.MyEvaluator"}, rungs=[0.5])
