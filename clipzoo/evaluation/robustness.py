"""Robustness to distribution shifts of ImageNet, from the metrics of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.special import expit, logit

from clipzoo.runs.record import MetricKey

TASK, SOURCE = "robustness", "imagenet"
BASELINES = {
    "imagenet_v2": None, "imagenet_v2_matched": (0.958306, -0.303915), "imagenet_a": (1.099454, -1.056111),
    "imagenet_r": (1.173557, 0.602570), "imagenet_sketch": (1.074670, -0.669807), "imagenet_o": (0.313384, -0.683894),
    "objectnet": (0.873276, -0.380831),
}  # fmt: skip
"""By shift, slope and intercept of logit(accuracy on the shift) over logit(accuracy on ImageNet): least squares over
the 121 zero-shot models of report/open_clip/openclip_results.csv. None: the table has another test set."""


def expected(shift: str, source: float | np.ndarray) -> float | np.ndarray:
    """Return the accuracy in percent on a shift that its baseline expects of an accuracy on ImageNet."""
    slope, intercept = BASELINES[shift] or (np.nan, np.nan)
    return 100 * expit(slope * logit(source / 100) + intercept)


def robustness(metrics: Mapping[MetricKey, float]) -> dict[MetricKey, float]:
    """Return robustness/SHIFT/gap and robustness/SHIFT/effective in percentage points, for zero-shot top-1.

    gap: accuracy on ImageNet minus that on the shift. effective: rho = accuracy on the shift minus beta(accuracy on
    ImageNet), the accuracy that the baseline expects, beta(x) = sigmoid(slope logit(x) + intercept) (Taori et al. 2020;
    Shi et al. 2023, section 2). The baseline is zero-shot models, not models trained on ImageNet as in these papers.
    """
    result = {}
    source = metrics.get(MetricKey("zero_shot", SOURCE, "", "top1"))
    for shift in BASELINES:
        accuracy = metrics.get(MetricKey("zero_shot", shift, "", "top1"))
        if source is None or accuracy is None:
            continue
        result[MetricKey(TASK, shift, "", "gap")] = source - accuracy
        if BASELINES[shift] and 0 < source < 100:
            result[MetricKey(TASK, shift, "", "effective")] = float(accuracy - expected(shift, source))
    return result
