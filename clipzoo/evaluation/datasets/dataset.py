"""Evaluation datasets as the evaluators read them: labelled images in splits, or images with captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from PIL.Image import Image

Metric = Literal["top1", "mean_per_class"]
METRICS: tuple[Metric, ...] = get_args(Metric)


class Images(Protocol):
    """RGB images, read at random; processes that decode get a copy of the object."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Image: ...


class LabelledImages(Protocol):
    """One split of a classification dataset: index -> (RGB image, label)."""

    @property
    def labels(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image, int]: ...


@dataclass(frozen=True)
class ClassificationDataset:
    """Splits of labelled images with the class names and prompt templates of zero-shot classification.

    class_names: in the order of the labels. templates: "{c}" is replaced by the class name. metric: what papers report
    for this dataset. splits: "test", for linear probes also "train" and optionally "val".
    """

    name: str
    class_names: Sequence[str]
    templates: Sequence[str]
    metric: Metric
    splits: Mapping[str, LabelledImages]


@dataclass(frozen=True)
class RetrievalDataset:
    """n images and k >= n captions. caption_image: index of each caption's image."""

    name: str
    images: Images
    captions: Sequence[str]
    caption_image: Sequence[int]


EvaluationDataset = ClassificationDataset | RetrievalDataset
