"""Names of metrics. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

PAIRED = "_paired"
DEVIATION = "_std"
VALIDATION = "validation"
"""Task of the loss on held-out pairs, and their name as a dataset of retrieval."""
AVERAGE = "average"
"""First segment of the metrics of averaged weights, "average/zero_shot/cifar10/top1"."""


@dataclass(frozen=True)
class MetricKey:
    """Name of one number in results.json, written as "zero_shot/cifar10/top1".

    Args:
        task: "zero_shot", "linear_probe", "retrieval", "validation", "training", or the name of a custom evaluator.
        dataset: name of the evaluation dataset; empty for "training" and "validation".
        protocol: "before" or "after" (projection) for linear probes; "image_to_text", "text_to_image" or
            "paired_image_to_text" for retrieval; empty otherwise.
        metric: "top1", "recall_at_5", in percent; "loss" of "validation"; the deviation over draws of random features
            ends in "_std".

    `parse(str(key)) == key`, and `str(parse(text)) == text` for every text without empty segments.
    """

    task: str
    dataset: str
    protocol: str
    metric: str

    @classmethod
    def parse(cls, text: str) -> MetricKey:
        """Parse the written form: 1 segment is a metric, 2 are task and metric, 3 have a dataset, 4 a protocol."""
        *places, metric = text.split("/")
        task, dataset, protocol = places[:1], places[1:2], places[2:]
        if task == ["retrieval"] and protocol and dataset[0].endswith(PAIRED):
            dataset, protocol = [dataset[0].removesuffix(PAIRED)], [f"paired_{protocol[0]}", *protocol[1:]]
        return cls("".join(task), "".join(dataset), "/".join(protocol), metric)

    def __str__(self) -> str:
        dataset, protocol = self.dataset, self.protocol
        if self.paired:
            dataset, protocol = f"{dataset}{PAIRED}", protocol.removeprefix("paired_")
        return "/".join(segment for segment in (self.task, dataset, protocol, self.metric) if segment)

    @property
    def paired(self) -> bool:
        """True for retrieval with one caption per image in the gallery at a time."""
        return self.task == "retrieval" and self.protocol.startswith("paired_")

    @property
    def lower_is_better(self) -> bool:
        """True for a loss."""
        return self.metric == "loss"

    @property
    def decimals(self) -> int:
        """Number of decimals that are shown."""
        return 4 if self.lower_is_better else 2

    def is_better(self, value: float, other: float) -> bool:
        """Return True if `value` of this metric is better than `other`."""
        return value < other if self.lower_is_better else value > other

    @property
    def deviation(self) -> MetricKey:
        """Key of this metric's standard deviation over draws."""
        return replace(self, metric=f"{self.metric}{DEVIATION}")


VALIDATION_LOSS = MetricKey(VALIDATION, "", "", "loss")


def parsed(metrics: Mapping[str, float]) -> dict[MetricKey, float]:
    """Metrics by parsed key, in the same order."""
    return {MetricKey.parse(text): value for text, value in metrics.items()}


def written(metrics: Mapping[MetricKey, float]) -> dict[str, float]:
    """Metrics by written key, in the same order: the inverse of `parsed`."""
    return {str(key): value for key, value in metrics.items()}


def of_average(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics by the written keys of averaged weights."""
    return {f"{AVERAGE}/{text}": value for text, value in metrics.items()}


def of_weights(metric: str | None, averaged: bool) -> str | None:
    """The key of a metric without the segment of averaged weights, if there are any."""
    return metric.removeprefix(f"{AVERAGE}/") if metric and averaged else metric


def split(metrics: Mapping[MetricKey, float]) -> tuple[dict[MetricKey, float], dict[MetricKey, float]]:
    """Metrics of the weights and, by the same keys, those of averaged weights."""
    average = {str(key).removeprefix(f"{AVERAGE}/"): value for key, value in metrics.items() if key.task == AVERAGE}
    return {key: value for key, value in metrics.items() if key.task != AVERAGE}, parsed(average)
