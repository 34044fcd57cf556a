"""Metrics of groups, several labels and calibration against scikit-learn, numpy and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score

from clipzoo.evaluation.scoring import (
    TEMPERATURES,
    average_precision,
    calibration,
    group_accuracies,
    log_confidences,
    macro_f1,
)


def test_macro_f1_equals_scikit_learns_over_the_classes_with_samples():
    generator = torch.Generator().manual_seed(0)
    predictions, labels = (torch.randint(0, 9, (500,), generator=generator) for _ in range(2))
    labels[labels == 4] = 3  # no sample of class 4, which is predicted
    expected = f1_score(labels, predictions, average="macro", labels=labels.unique())
    assert macro_f1(predictions, labels, 12) == pytest.approx(100 * expected, rel=1e-12)


def test_group_accuracies_are_quotients_of_counts_and_leave_out_samples_without_a_group_and_empty_groups():
    position, groups = torch.tensor([0, 1, 0, 6, 0, 9, 0]), torch.tensor([0, 0, 2, 2, 2, -1, -1])
    metrics, top1 = group_accuracies(position, groups, 3, 10)
    assert metrics == {
        "worst_group_top1": 50.0,
        "worst_group_top5": pytest.approx(200 / 3),
        "group_gap": pytest.approx(50 / 3),
    }
    np.testing.assert_allclose(top1, [50, math.nan, 200 / 3])
    assert "worst_group_top5" not in group_accuracies(position, groups, 3, 5)[0]


def test_average_precision_equals_scikit_learns_and_puts_the_earlier_of_equally_scored_images_first():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(300, 6, generator=generator, dtype=torch.float64)
    member = torch.rand(300, 6, generator=generator) < torch.linspace(0.02, 0.9, 6)
    expected = average_precision_score(member.numpy(), scores.numpy(), average=None)
    np.testing.assert_allclose(average_precision(scores, member), expected, rtol=1e-13)
    # All scores equal: images at ranks 2 and 4 belong to the class.
    equal = average_precision(torch.zeros(4, 1), torch.tensor([[False], [True], [False], [True]]))
    assert equal.item() == (1 / 2 + 2 / 4) / 2


def sample(count: int = 4000, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores whose softmax at temperature 1/3 is the distribution of the labels."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(count, classes, generator=generator, dtype=torch.float64)
    return scores, (3 * scores).softmax(1).multinomial(1, generator=generator)[:, 0]


def test_confidences_at_all_temperatures_are_the_highest_softmax_probabilities():
    scores, _ = sample(50)
    confidences = log_confidences(scores, 20).exp()
    for column, temperature in enumerate(TEMPERATURES):
        torch.testing.assert_close(confidences[:, column], (20 * scores / temperature).softmax(1).amax(1))


def test_calibration_error_equals_a_loop_over_bins_and_the_fitted_temperature_is_the_one_of_the_labels():
    scores, labels = sample()
    best, predictions = scores.max(1)
    margin, right = best - scores.gather(1, labels[:, None])[:, 0], predictions == labels
    metrics = calibration(log_confidences(scores, 1), margin, right)

    def error(confidence: np.ndarray, hit: np.ndarray) -> float:
        total = 0.0
        for low in np.arange(15) / 15:
            inside = (confidence > low) & (confidence <= low + 1 / 15)
            if inside.any():
                total += inside.mean() * abs(confidence[inside].mean() - hit[inside].mean())
        return 100 * total

    assert metrics["ece"] == pytest.approx(error(scores.softmax(1).amax(1).numpy(), right.numpy()))
    assert metrics["temperature"] == pytest.approx(1 / 3, rel=0.05)
    assert metrics["fitted_ece"] < 2 < metrics["ece"]
    halves = [scores[0::2], scores[1::2]]
    fitted = [
        min(
            np.geomspace(0.2, 0.5, 400), key=lambda t, h=half, y=own: torch.nn.functional.cross_entropy(h / t, y).item()
        )
        for half, own in zip(halves, (labels[0::2], labels[1::2]), strict=True)
    ]
    assert metrics["temperature"] == pytest.approx(math.sqrt(fitted[0] * fitted[1]), rel=0.01)
    crossed = torch.empty(len(scores), dtype=torch.float64)
    crossed[0::2], crossed[1::2] = ((h / t).softmax(1).amax(1) for h, t in zip(halves, fitted[::-1], strict=True))
    assert metrics["fitted_ece"] == pytest.approx(error(crossed.numpy(), right.numpy()), abs=0.3)


def test_the_temperature_of_two_classes_with_equal_margins_has_a_closed_form():
    # 3 of 4 predictions are right with margin 2: p = 3/4 at 2 / T = log 3.
    margin = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0], dtype=torch.float64)
    scores = torch.tensor([[2.0, 0.0]], dtype=torch.float64).expand(8, 2)
    metrics = calibration(log_confidences(scores, 1), margin, margin == 0)
    assert metrics["temperature"] == pytest.approx(2 / math.log(3), rel=0.01)
    assert metrics["ece"] == pytest.approx(100 * (1 / (1 + math.exp(-2)) - 3 / 4))
    assert metrics["fitted_ece"] == pytest.approx(0, abs=0.5)


def test_average_precision_equals_clip_benchmarks():
    peer = pytest.importorskip("clip_benchmark.metrics.zeroshot_classification")
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(400, 20, generator=generator)
    member = torch.rand(400, 20, generator=generator) < 0.1
    expected = peer.average_precision_per_class(scores, member.long())
    torch.testing.assert_close(average_precision(scores, member).float(), expected)
