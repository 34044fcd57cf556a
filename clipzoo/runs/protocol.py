"""Evaluation protocols: the `eval` settings that change a dataset's numbers. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clipzoo.runs.metric_key import AVERAGE, MetricKey

Setting = str | int | float | bool | None

SETTINGS = {
    "zero_shot": ("prompts", "interpolation", "resize_mode"),
    "linear_probe": ("interpolation", "resize_mode", "probe_resize", "probe_validation"),
    "retrieval": ("interpolation", "resize_mode"),
}
TWO_LISTS = ("imagenet", "imagenet_v2", "imagenet_r")
"""Datasets for which eval.prompts=slip and eval.prompts=clip are different prompts."""


def protocol(evaluation: Mapping[str, Setting], metrics: Iterable[MetricKey]) -> dict[str, dict[str, Setting]]:
    """Settings behind the metrics, by task and dataset ("zero_shot/imagenet").

    Args:
        evaluation: the `eval` node of the configuration.
        metrics: keys of the measured metrics; tasks without settings are left out.
    """
    # Averaged weights are evaluated with the settings of the weights.
    places = dict.fromkeys((key.task, key.dataset) for key in metrics if key.task != AVERAGE)
    by_place = {f"{task}/{dataset}": settings(evaluation, task, dataset) for task, dataset in places}
    return {place: values for place, values in by_place.items() if values}


def settings(evaluation: Mapping[str, Setting], task: str, dataset: str) -> dict[str, Setting]:
    """Settings of `eval` that the numbers of one task on one dataset depend on."""
    values = {name: evaluation[name] for name in SETTINGS.get(task, ()) if name in evaluation}
    if values.get("resize_mode") == "shortest":  # the only one of earlier versions
        del values["resize_mode"]
    if values.get("prompts") == "clip" and dataset not in TWO_LISTS:
        values["prompts"] = "slip"
    return values
