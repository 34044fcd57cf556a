"""Numbers of open_clip's tables by our metrics, and outcomes of samples whose mean is a metric."""

from __future__ import annotations

import csv
import re

import numpy as np
import pytest
import yaml

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import catalogue
from clipzoo.report.published import OPEN_CLIP, expected_numbers, open_clip_metric
from clipzoo.report.statistics import outcomes_of
from clipzoo.runs.record import MetricKey

FACTS = yaml.safe_load((OPEN_CLIP / "columns.yaml").read_text())


def number(name: str, key: str, prompts: str = "clip") -> float | None:
    value = expected_numbers(None, name, prompts)[0].get(MetricKey.parse(key))
    return value and value.value


def test_numbers_of_all_tables_are_found_in_percent_with_the_metric_of_datacomp():
    name = "ViT-B-32/laion2b_s34b_b79k"
    rows = {file: next(row for row in csv.reader((OPEN_CLIP / file).open()) if row[:2] == name.split("/"))
            for file in FACTS["files"][:2]}  # fmt: skip
    assert f"{number(name, 'zero_shot/imagenet/top1') / 100:.4f}" == rows["openclip_results.csv"][5]
    assert number(name, "zero_shot/pets/mean_per_class") and number(name, "zero_shot/pets/top1") is None
    keys = [f"retrieval/flickr30k/text_to_image/recall_at_{cut}" for cut in (1, 5, 10)]
    assert [f"{number(name, key) / 100:.4f}" for key in keys] == rows["openclip_retrieval_results.csv"][5:8]
    assert number("nllb-clip-large-siglip/mrl", "retrieval/crossmodal3600_de/text_to_image/recall_at_1") == 75.69
    # ImageNet's numbers are those of 80 templates.
    assert number(name, "zero_shot/imagenet/top1", "slip") is None and number(name, "zero_shot/dtd/top1", "slip")


def test_each_column_has_one_metric_or_one_reason_and_each_metric_is_that_of_the_catalogue():
    columns = [column for file in FACTS["files"] for column in next(csv.reader((OPEN_CLIP / file).open()))[2:]]
    for column in columns:
        patterns = [p for p in (*FACTS["columns"], *FACTS["left_out"]) if re.fullmatch(p, column)]
        assert len(patterns) == 1 or (not patterns and open_clip_metric(column)), column
    keys = filter(None, map(open_clip_metric, columns))
    in_catalogue = [key for key in keys if key.dataset in catalogue() and key.task == "zero_shot"]
    assert len(in_catalogue) == 35 and all(key.metric == catalogue()[key.dataset]["metric"] for key in in_catalogue)


def test_an_unknown_model_is_named_with_its_neighbours_if_it_was_given():
    assert expected_numbers(None, "ViT-B-32/laion2b_s34b_b79", "clip") == ({}, "")
    with pytest.raises(ConfigError, match="nor MODEL/TAG .*did you mean ViT-B-32/laion2b_s34b_b79k"):
        expected_numbers("ViT-B-32/laion2b_s34b_b79", "None/None", "clip")


def test_the_mean_of_the_outcomes_is_the_metric():
    labels, answers = np.array([0, 0, 0, 1, 3]), np.array([0, 1, 0, 1, 0])
    arrays = {"all_labels": labels, "all_predictions": answers, "all_image_places": np.array([0, 4, 7])}

    def mean(key: str) -> float:
        outcomes = outcomes_of(MetricKey.parse(key), arrays)
        assert outcomes is not None
        return float(outcomes[0].mean())

    assert mean("zero_shot/x/top1") == pytest.approx(3 / 5)
    assert mean("zero_shot/x/mean_per_class") == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert mean("retrieval/x/image_to_text/recall_at_5") == pytest.approx(2 / 3)
    assert outcomes_of(MetricKey.parse("zero_shot/x/top5"), arrays) is None
    assert outcomes_of(MetricKey.parse("retrieval/x/text_to_image/recall_at_1"), arrays) is None
