"""Interface of evaluation tasks: columns that are computed from the images of a dataset, and metrics from columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import ChoiceDataset, EvaluationDataset, RetrievalDataset
from clipzoo.evaluation.encoder import BatchEncoder, gathered_batches, joined
from clipzoo.model import Model
from clipzoo.runs.record import MetricKey
from clipzoo.types import Embedding, Features, map_embedding

Dataset = TypeVar("Dataset", bound=EvaluationDataset)
Column = Callable[[Features, Tensor], Embedding]
"""Image features of b images and their indices in the split [b] int64 -> one row per image: [b, ...] or a PointSet."""
PROJECTIONS = ("before", "after")


class View(NamedTuple):
    """Images of a split as the encoder sees them. size: side in pixels to which they are resized before the crop."""

    split: str
    size: int


Rows = Mapping[View, Mapping[str, Embedding]]
"""All rows of the columns of a dataset, on the CPU."""
Metrics = Mapping[str, Mapping[str, float]]
"""Metrics in percent by protocol ("" for none) and name."""


class Solve(NamedTuple):
    """A computation on one rank. cost: estimate in any unit. run: returns a JSON value."""

    cost: float
    run: Callable[[], Any]


@dataclass(frozen=True)
class Evaluation:
    """Model, encoder and output folder, shared by all tasks of an evaluation.

    draws: number of draws of random features, 1 for heads without. output: folder for files of the report. solved:
    results of the task's `solves` by name, for `measure`.
    """

    model: Model
    encoder: BatchEncoder
    draws: int
    output: Path
    solved: Mapping[str, Any] = field(default_factory=dict)
    _captions: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def feature_columns(self) -> dict[str, Column]:
        """Columns of float32 features "before" and "after" the projection, [b, d]."""

        def features_of(features: Features, _: Tensor, projection: str) -> Tensor:
            return self.model.head.probe(features, projection).float()

        return {projection: partial(features_of, projection=projection) for projection in PROJECTIONS}

    def image_columns(self) -> dict[str, Column]:
        """Columns of image embeddings: "image.0", "image.1", ... for the draws of random features."""
        head = self.model.head

        def embedding(features: Features, _: Tensor, draw: int) -> Embedding:
            if self.draws == 1:
                return head.embed_image(features)
            head.resample(draw)
            embedded = head.embed_image(features)
            head.resample(0)
            return embedded

        return {f"image.{draw}": partial(embedding, draw=draw) for draw in range(self.draws)}

    def captions(self, dataset: RetrievalDataset | ChoiceDataset) -> list[Embedding]:
        """Embed all captions for each draw, [k, ...] on the device of every rank. Collective.

        Embeddings of the latest dataset are kept for the next task.
        """
        if self._captions.get("dataset") is not dataset:

            def embed(rows: Sequence[int]) -> list[Embedding]:
                return self.encoder.embed_captions(self.model, [dataset.captions[row] for row in rows], self.draws)

            count, size = len(dataset.captions), self.encoder.batch_size
            embeddings = joined(list(gathered_batches(count, size, embed, self.encoder.world)))
            self._captions.update(dataset=dataset, embeddings=embeddings)
        return self._captions["embeddings"]


class Task(ABC, Generic[Dataset]):
    """A way to measure a model on a dataset.

    The suite computes the columns of all tasks in one pass over the images of each view; columns of the same name are
    computed once. Then each task turns columns into metrics.
    """

    name: ClassVar[str]
    """Key of its datasets in `eval`, folder of its files, and first segment of its metrics."""
    splits: ClassVar[tuple[str, ...]] = ("test",)
    """Splits that the dataset must have."""

    @property
    def settings(self) -> tuple[object, ...]:
        """Settings that affect the metrics, for the cache key; the name of a column states those that affect it."""
        return tuple(vars(self).values())

    @abstractmethod
    def check(self, dataset: EvaluationDataset) -> None:
        """Raise ConfigError if the dataset cannot be measured."""

    def views(self, evaluation: Evaluation, dataset: Dataset) -> Sequence[View]:
        """Images that are encoded."""
        return [View(split, evaluation.encoder.image_size) for split in self.splits]

    @abstractmethod
    def columns(self, evaluation: Evaluation, dataset: Dataset) -> Mapping[str, Column]:
        """Columns of each view by name. Collective: classifiers are embedded here."""

    def solves(self, evaluation: Evaluation, dataset: Dataset, columns: Rows) -> Mapping[str, Solve]:
        """Long computations by name, shared by the ranks; `measure` gets their results in `evaluation.solved`.

        Columns are read from files when they are used, so a computation should look them up itself.
        """
        return {}

    @abstractmethod
    def measure(self, evaluation: Evaluation, dataset: Dataset, columns: Rows) -> Metrics:
        """Turn columns into metrics. Collective. Writes the files of the report on the first rank."""

    def key(self, dataset: Dataset, protocol: str, metric: str) -> MetricKey:
        """Name of a metric in results.json."""
        return MetricKey(self.name, dataset.name, protocol, metric)


def compute(
    evaluation: Evaluation, dataset: EvaluationDataset, view: View, columns: Mapping[str, Column]
) -> dict[str, Embedding]:
    """Compute columns in memory: the twin of `clipzoo.evaluation.columns.store`. Collective."""
    images, functions = dataset.split_images(view.split), list(columns.values())
    batches = evaluation.encoder.images(evaluation.model, images, view.size, functions)
    parts = [[map_embedding(Tensor.cpu, part) for part in batch] for batch in batches]
    return dict(zip(columns, joined(parts), strict=True))


CONTENTS = {"zero_shot": "classes", "retrieval": "captions", "choice": "choices of captions"}
"""Content of a dataset by its `task`."""
Kind = TypeVar("Kind")


def require_kind(kind: type[Kind], task: str, dataset: EvaluationDataset) -> Kind:
    """Return a dataset of this class. Raises ConfigError for another one. task: key of `eval` that names it."""
    if not isinstance(dataset, kind):
        raise ConfigError(
            f"{dataset.name} has {CONTENTS[dataset.task]} and does not fit: move it from eval.{task} to "
            f"eval.{dataset.task}"
        )
    return dataset
