"""Averages over the datasets of a suite, from the metrics of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from clipzoo.evaluation.datasets.dataset import catalogue, suites
from clipzoo.runs.record import MetricKey

DATACOMP = "datacomp"


def datacomp_average(metrics: Mapping[MetricKey, float]) -> dict[MetricKey, float]:
    """Return datacomp/average, the mean in percent of DataComp's metric over the measured datasets of eval=datacomp.

    datacomp/datasets is their number: only with all 38 is the average that of the published tables (Gadre et al. 2023,
    appendix N). Retrieval counts the mean recall at 1 of both directions, WinoGAViL the Jaccard index of its examples
    with 10 to 12 candidates. Empty without any of the datasets.
    """
    values = []
    for task, names in suites()[DATACOMP].items():
        for name in names:
            keys = {
                "zero_shot": [MetricKey(task, name, "", catalogue()[name].get("metric", ""))],
                "retrieval": [MetricKey(task, name, way, "recall_at_1") for way in ("image_to_text", "text_to_image")],
                "choice": [MetricKey(task, name, "10_to_12_candidates", "jaccard")],
            }[task]
            if all(key in metrics for key in keys):
                values.append(fmean(metrics[key] for key in keys))
    if not values:
        return {}
    average = {"average": fmean(values), "datasets": float(len(values))}
    return {MetricKey(DATACOMP, "", "", metric): value for metric, value in average.items()}
