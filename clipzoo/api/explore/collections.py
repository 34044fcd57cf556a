"""Pictures to explore: the evaluation datasets of a run, or the images of a folder or of shards."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL.Image import Image

from clipzoo.api.search.gallery import Gallery, read_gallery
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.benchmarks import MissingDatasetError, open_benchmark
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, EvaluationDataset, Images, RetrievalDataset
from clipzoo.evaluation.suite import dataset_key

TASKS = ("retrieval", "zero_shot", "linear_probe")
REMEDY = "give --images FOLDER to explore a folder of images or tar shards"


@dataclass(frozen=True)
class Collection:
    """Pictures with their captions or classes.

    gallery: the pictures; their number in the dataset is their name. captions: captions of each picture, or none.
    choices: captions to choose from: those of the pictures, or a prompt for each class. labels: class of each picture.
    total: pictures of the dataset, of which the gallery may have a part.
    """

    name: str
    gallery: Gallery
    total: int
    captions: Mapping[int, Sequence[str]] = field(default_factory=dict)
    choices: Sequence[str] = ()
    labels: Sequence[int] = ()
    class_names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.gallery.names)


def collections_of(config: Mapping[str, Any], names: Sequence[str], limit: int) -> Iterator[Collection | str]:
    """Yield the evaluation datasets of a run's configuration, and a message for each that is not there.

    names: datasets to open; empty for all. limit: pictures of each, evenly spaced in the dataset.

    Raises:
        ConfigError: the configuration has no evaluation dataset, or none of these names.
    """
    node = config.get("eval") or {}
    known = list(dict.fromkeys(name for task in TASKS for name in node.get(task) or ()))
    if not known:
        raise ConfigError(f"the run has no evaluation data (its eval lists no dataset): {REMEDY}")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"--dataset {unknown[0]} is not an evaluation dataset of the run (it has: {', '.join(known)})"
        )
    for name in names or known:
        try:
            yield _collection(open_benchmark(name, Path(node["root"]), node.get("prompts", "set")), node["root"], limit)
        except MissingDatasetError as error:
            yield str(error)


def collection_of_images(source: str, limit: int) -> Collection:
    """Return the images of a folder, or of tar shards. Raises ConfigError if there are none."""
    gallery = read_gallery(source)
    rows = _spaced(len(gallery.names), limit)
    names = [gallery.names[row] for row in rows]
    # Pictures that change under their names are embedded again.
    changed = max((path.stat().st_mtime_ns for path in Path(source).rglob("*")), default=0)
    chosen = Gallery(f"{source} {len(gallery.names)} {changed}", names, Rows(gallery.images, rows))
    return Collection(Path(source).name or source, chosen, len(gallery.names))


class Rows:
    """Some of the images of a dataset."""

    def __init__(self, images: Images, rows: Sequence[int]) -> None:
        self._images, self._rows = images, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Image:
        return self._images[self._rows[index]]


class _Unlabelled:
    """Images of a split with labels."""

    def __init__(self, dataset: ClassificationDataset) -> None:
        self._split = dataset.splits["test"]

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> Image:
        return self._split[index][0]


def _collection(dataset: EvaluationDataset, root: str, limit: int) -> Collection:
    images: Images = dataset.images if isinstance(dataset, RetrievalDataset) else _Unlabelled(dataset)
    rows = _spaced(len(images), limit)
    source = hashlib.sha256(f"{root} {dataset_key('', dataset)} {len(images)}".encode()).hexdigest()
    gallery = Gallery(source, [str(row) for row in rows], Rows(images, rows))
    if isinstance(dataset, ClassificationDataset):
        labels = dataset.splits["test"].labels
        prompts = [dataset.templates[0].replace("{c}", name) for name in dataset.class_names]
        own = [int(labels[row]) for row in rows]
        return Collection(
            dataset.name, gallery, len(images), choices=prompts, labels=own, class_names=dataset.class_names
        )
    place = {row: index for index, row in enumerate(rows)}
    captions: dict[int, list[str]] = {}
    for caption, image in zip(dataset.captions, dataset.caption_image, strict=True):
        if (index := place.get(int(image))) is not None:
            captions.setdefault(index, []).append(caption)
    choices = list(dict.fromkeys(texts[0] for texts in captions.values()))
    return Collection(dataset.name, gallery, len(images), captions, choices)


def _spaced(count: int, limit: int) -> list[int]:
    """Return at most `limit` of `count` rows, evenly spaced."""
    step = max(1.0, count / limit)
    return [math.floor(place * step) for place in range(min(count, limit))]
