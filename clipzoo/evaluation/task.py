"""Interface of evaluation tasks: columns that are computed from the images of a dataset, and metrics from columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

from clipzoo.evaluation.datasets.dataset import EvaluationDataset
from clipzoo.evaluation.encoder import BatchEncoder
from clipzoo.model import Model
from clipzoo.types import Embedding, Features

Dataset = TypeVar("Dataset", bound=EvaluationDataset)
Column = Callable[[Features, Tensor], Embedding]
"""Image features of b images and their indices in the split [b] int64 -> one row per image: [b, ...] or a PointSet."""


class View(NamedTuple):
    """Images of a split as the encoder sees them. size: side in pixels to which they are resized before the crop."""

    split: str
    size: int


Rows = Mapping[View, Mapping[str, Embedding]]
"""All rows of the columns of a dataset, on the CPU."""
Metrics = Mapping[str, Mapping[str, float]]
"""Metrics in percent by protocol ("" for none) and name."""


@dataclass(frozen=True)
class Evaluation:
    """What all tasks of an evaluation share.

    encoder: encodes images and captions on all ranks; its `world` and `image_size` are those of the evaluation. draws:
    number of draws of random features, 1 for heads without. output: folder for files of the report.
    """

    model: Model
    encoder: BatchEncoder
    draws: int
    output: Path


class Task(ABC, Generic[Dataset]):
    """A way to measure a model on a dataset.

    The suite asks all tasks of a dataset for their columns, computes these in one pass over the images for each view,
    and stores them in files; columns of the same name are computed once. Then each task turns columns into metrics.
    """

    name: ClassVar[str]
    """Key of its datasets in `eval`, folder of its files, and first segment of its metrics."""
    splits: ClassVar[tuple[str, ...]] = ("test",)
    """Splits that the dataset must have."""

    @property
    @abstractmethod
    def settings(self) -> tuple[object, ...]:
        """Settings that affect the metrics, for the cache key."""

    @abstractmethod
    def check(self, dataset: EvaluationDataset) -> None:
        """Raise ConfigError if the dataset cannot be measured."""

    @abstractmethod
    def columns(self, evaluation: Evaluation, dataset: Dataset) -> Mapping[View, Mapping[str, Column]]:
        """Columns by name for each view. Collective: classifiers are embedded here."""

    @abstractmethod
    def measure(self, evaluation: Evaluation, dataset: Dataset, columns: Rows) -> Metrics:
        """Turn columns into metrics. Collective. Writes the files of the report on the first rank."""
