"""Robustness gap and effective robustness against open_clip's published accuracies."""

from __future__ import annotations

import numpy as np
import pytest

from clipzoo.evaluation.robustness import BASELINES, robustness
from clipzoo.report.published import OPEN_CLIP, read_numbers
from clipzoo.runs.record import parsed

COLUMNS = {
    "imagenet_a": "ImageNet-A", "imagenet_r": "ImageNet-R", "imagenet_sketch": "ImageNet Sketch",
    "imagenet_o": "ImageNet-O", "objectnet": "ObjectNet", "imagenet_v2_matched": "ImageNet v2",
}  # fmt: skip


def logit(share: np.ndarray) -> np.ndarray:
    return np.log(share / (1 - share))


def test_the_baselines_are_the_least_squares_lines_through_all_published_models():
    rows = read_numbers("openclip_results.csv", OPEN_CLIP)
    assert len(rows) == 121
    source = np.array([float(row["ImageNet 1k"]) for row in rows])
    assert {name for name, baseline in BASELINES.items() if baseline} == set(COLUMNS)
    for name, column in COLUMNS.items():
        shift = np.array([float(row[column]) for row in rows])
        np.testing.assert_allclose(BASELINES[name], np.polyfit(logit(source), logit(shift), 1), atol=1e-6)
        # The mean residual of the logits is zero, so half of the models lie above the line and half below, roughly.
        effective = [
            robustness(parsed({"zero_shot/imagenet/top1": 100 * x, f"zero_shot/{name}/top1": 100 * y}))
            for x, y in zip(source, shift, strict=True)
        ]
        values = np.array([next(v for key, v in part.items() if key.metric == "effective") for part in effective])
        assert 0.25 < (values > 0).mean() < 0.75


def test_gap_and_effective_robustness_of_a_model_on_the_line_and_above_it():
    slope, intercept = BASELINES["objectnet"]
    expected = 100 / (1 + np.exp(-intercept))  # logit(50 %) = 0
    metrics = {
        "zero_shot/imagenet/top1": 50.0,
        "zero_shot/objectnet/top1": expected + 3,
        "zero_shot/imagenet_v2/top1": 44.0,
    }
    values = {str(key): value for key, value in robustness(parsed(metrics)).items()}
    assert values == {
        "robustness/imagenet_v2/gap": pytest.approx(6),
        "robustness/objectnet/gap": pytest.approx(47 - expected),
        "robustness/objectnet/effective": pytest.approx(3),
    }
    assert robustness(parsed({"zero_shot/objectnet/top1": 40.0})) == {}
