"""Interface of evaluation tasks: columns that are computed from the images of a dataset, and metrics from columns.

Columns are kept in files of a few thousand images: computed in one pass, resumed after the last whole file.

    <folder>/<split>.<size>/<key>.<first row>.safetensors     all columns of CHUNK images

Files do not depend on the number of ranks. All ranks read them, so the folder must be shared.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from clipzoo import io
from clipzoo.distributed.launch import say
from clipzoo.errors import ConfigError, number_of
from clipzoo.evaluation.datasets.dataset import ChoiceDataset, EvaluationDataset, RetrievalDataset
from clipzoo.evaluation.encoder import SECONDS_BETWEEN_LINES, BatchEncoder, gathered_batches, joined
from clipzoo.io.weights import read_tensors
from clipzoo.model import Model
from clipzoo.runs.record import MetricKey
from clipzoo.types import Embedding, Features, PointSet, concatenate, map_embedding

Dataset = TypeVar("Dataset", bound=EvaluationDataset)
Column = Callable[[Features, Tensor], Embedding]
"""Image features of b images and their indices in the split [b] int64 -> one row per image: [b, ...] or a PointSet."""
PROJECTIONS = ("before", "after")
CHUNK = 8192
"""Images in a file, rounded down to whole batches."""
REMEDY = "its images are encoded again"


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
        """Embed all captions for each draw, [k, ...] on every rank's device; the latest are kept. Collective."""
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

    def write(self, evaluation: Evaluation, dataset: Dataset, arrays: Callable[[], Mapping[str, Any]]) -> None:
        """Write arrays for the figures of the report to <task>/<dataset>.npz on the first rank. Collective."""
        path = io.below(evaluation.output, f"{self.name}/{dataset.name}.npz")

        def save() -> None:
            with io.whole(path) as file:
                np.savez_compressed(file, **arrays())

        evaluation.encoder.world.run_on_first(save)

    def key(self, dataset: Dataset, protocol: str, metric: str) -> MetricKey:
        """Name of a metric in results.json."""
        return MetricKey(self.name, dataset.name, protocol, metric)


THUMBNAIL = 112


def thumbnails(images: Sequence[Image.Image]) -> np.ndarray:
    """[m, S, S, 3] uint8: whole images on white."""
    size = (THUMBNAIL, THUMBNAIL)
    squares = [np.asarray(ImageOps.pad(image, size, Image.Resampling.BICUBIC, "white")) for image in images]
    return np.array(squares, np.uint8).reshape(-1, *size, 3)


CONTENTS = {"zero_shot": "classes", "retrieval": "captions", "choice": "choices of captions"}
"""Content of a dataset by its `task`."""
Kind = TypeVar("Kind")


def require_kind(kind: type[Kind], task: str, dataset: EvaluationDataset) -> Kind:
    """Return a dataset of this class. Raises ConfigError for another one. task: key of `eval` that names it."""
    if not isinstance(dataset, kind):
        remedy = f"move it from eval.{task} to eval.{dataset.task}"
        raise ConfigError(f"{dataset.name} has {CONTENTS[dataset.task]} and does not fit: {remedy}")
    return dataset


# Values of columns: in memory, and in files.


def compute(
    evaluation: Evaluation, dataset: EvaluationDataset, view: View, columns: Mapping[str, Column]
) -> dict[str, Embedding]:
    """Compute columns in memory: the twin of `store`. Collective."""
    images, functions = dataset.split_images(view.split), list(columns.values())
    batches = evaluation.encoder.images(evaluation.model, images, view.size, functions)
    parts = [[map_embedding(Tensor.cpu, part) for part in batch] for batch in batches]
    return dict(zip(columns, joined(parts), strict=True))


class StoredColumns(UserDict[str, Any]):
    """Columns by name, read from their files on access. Values of a single file are memory-mapped."""

    def __init__(self, names: Iterable[str], files: Mapping[Path, range]) -> None:
        self.data, self._files = dict.fromkeys(names), files

    def __getitem__(self, name: str) -> Embedding:
        return concatenate([_read(path, len(rows), name) for path, rows in self._files.items()])


@dataclass
class Clock:
    """Prints every 10 s how long the images of an evaluation still take. images: number of images to encode."""

    images: int
    done: int = 0
    begin: float = field(default_factory=time.perf_counter)
    printed: float = field(default_factory=time.perf_counter)

    def encoded(self, count: int, place: str) -> None:
        """Count images. place: dataset and split, for the line."""
        self.done, now = self.done + count, time.perf_counter()
        if now - self.printed > SECONDS_BETWEEN_LINES:
            self.printed, rate = now, self.done / (now - self.begin)
            done, left = f"{self.done} of {number_of(self.images, 'image')}", (self.images - self.done) / rate
            say(f"evaluation: {place}; of all datasets {done}, {rate:.0f} images/s, {left:.0f} s remaining")


def store(
    evaluation: Evaluation,
    dataset: EvaluationDataset,
    view: View,
    columns: Mapping[str, Column],
    folder: Path,
    key: str,
    clock: Clock,
) -> StoredColumns:
    """Compute the columns of all images whose files are missing or damaged; the first rank writes. Collective.

    key: hexadecimal digest of everything that determines the columns. Raises WriteError, before the pass if the disk is
    too small.
    """
    world, size, images = evaluation.encoder.world, evaluation.encoder.batch_size, dataset.split_images(view.split)
    place = io.below(folder, f"{view.split}.{view.size}")
    # Whole batches: their rows, and so their rounding, are those of a pass without files.
    step, every = max(1, CHUNK // size) * size, range(len(images))
    files = {io.below(place, f"{key}.{first}.safetensors"): every[first : first + step] for first in every[::step]}

    def missing() -> list[Path]:
        for path in set(place.glob("*")) - set(files):
            path.unlink()
        return [path for path, part in files.items() if not _is_intact(path, len(part), columns)]

    todo = world.run_on_first(missing)
    rows = list(chain.from_iterable(files[path] for path in todo))
    clock.images -= len(images) - len(rows)
    pending: list[list[Embedding]] = []
    held = 0
    batches = evaluation.encoder.images(evaluation.model, images, view.size, list(columns.values()), rows)
    for batch_number, batch in enumerate(batches):
        if batch_number == 0:
            world.run_on_first(partial(_require_space, place, batch, len(rows)))
        count = len(batch[0])
        held += count
        if world.is_first:
            pending.append([map_embedding(Tensor.cpu, part) for part in batch])
        while todo and held >= (cut := len(files[todo[0]])):
            path, held = todo.pop(0), held - cut

            def write(path: Path = path, cut: int = cut) -> None:
                from safetensors.torch import save

                whole = [concatenate(parts) for parts in zip(*pending, strict=True)]
                tensors: dict[str, Tensor] = {}
                for name, part in zip(columns, whole, strict=True):
                    values = vars(part[:cut]) if isinstance(part, PointSet) else {"": part[:cut]}
                    tensors |= {f"{name}/{key}".rstrip("/"): tensor.contiguous() for key, tensor in values.items()}
                with io.whole(path) as file:
                    file.write(save(tensors))
                pending[:] = [[part[cut:] for part in whole]]

            world.run_on_first(write)
        clock.encoded(count, f"{dataset.name}, {view.split}")
    return StoredColumns(columns, files)


def _read(path: Path, rows: int, name: str) -> Embedding:
    tensors = read_tensors(path, REMEDY)
    parts = {part: tensors[part] for part in (name, f"{name}/points", f"{name}/log_weights") if part in tensors}
    if len(parts) not in (1, 2) or any(not part.ndim or len(part) != rows for part in parts.values()):
        raise io.DamagedFileError(path, f"has no column {name} of {rows} rows", REMEDY)
    return PointSet(*parts.values()) if len(parts) == 2 else parts[name]


def _is_intact(path: Path, rows: int, columns: Iterable[str]) -> bool:
    read = io.DamageLog().read
    return path.exists() and read(lambda: [_read(path, rows, name) for name in columns], None) is not None


def _require_space(place: Path, batch: Sequence[Embedding], rows: int) -> None:
    """Raise WriteError unless the disk has space for `rows` rows like those of a batch."""
    tensors = [tensor for part in batch for tensor in (vars(part).values() if isinstance(part, PointSet) else [part])]
    path = io.below(place, "space.safetensors")
    io.make_folder(place)
    with io.explained(path):
        try:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, rows * sum(tensor[0].nbytes for tensor in tensors)))
        finally:
            path.unlink(missing_ok=True)
