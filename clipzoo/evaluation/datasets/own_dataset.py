"""Evaluation datasets made from the user's own images, written in the tar layout and checked."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from clipzoo.data.children import map_in_children
from clipzoo.data.faults import BadSampleError
from clipzoo.data.images.decoding import MAX_PIXELS, read_header, read_image_file
from clipzoo.data.left_out import LeftOut, write_left_out
from clipzoo.data.shards.captions import CaptionCounts
from clipzoo.errors import ConfigError, number_of
from clipzoo.evaluation.datasets.catalogue import catalogue
from clipzoo.evaluation.datasets.dataset import Metric
from clipzoo.evaluation.datasets.images import EXTENSIONS
from clipzoo.evaluation.datasets.own_sources import SPLITS, OwnImage, Source
from clipzoo.evaluation.datasets.tar_dataset import open_tar_dataset
from clipzoo.evaluation.datasets.tar_writer import write_classification, write_retrieval
from clipzoo.io import folder_name

_CHUNK = 50
"""Images that a process decodes at a time; fewer images are decoded in this process."""


@dataclass(frozen=True)
class Made:
    """A dataset that was written.

    samples: number of images per split. left_out: files that are not in the dataset. classes, captions: their numbers,
    0 for a dataset of the other kind. repetition: how often captions repeat among images. probed: True if a linear
    probe can be fitted: every class has images in train. empty_classes: classes that are left out because they have no
    image in test.
    """

    folder: Path
    samples: dict[str, int]
    left_out: Sequence[LeftOut]
    classes: int = 0
    captions: int = 0
    repetition: CaptionCounts = CaptionCounts()
    probed: bool = False
    empty_classes: Sequence[str] = ()


def require_free(folder: Path) -> None:
    """Raise ConfigError if the folder exists, or if its name is that of a benchmark dataset or of no folder."""
    if folder_name(folder.name, "the dataset's name") in catalogue():
        raise ConfigError(f"{folder.name} is the name of a benchmark dataset (clipzoo datasets list): choose another")
    if folder.exists():
        raise ConfigError(f"{folder} exists already: remove it to write the dataset again")


def make_classification(
    source: Source,
    folder: Path,
    templates: Sequence[str],
    metric: Metric,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Made:
    """Write the images with their classes to `folder`, whose name is that of the dataset.

    Images keep their bytes if they are JPEG, PNG or WebP, others become PNG. Files that cannot be decoded are left out,
    and so are the other images of a class that has none in test. Classes are in alphabetical order.

    progress: called with the number of images that are decoded, and of all.

    Raises:
        ConfigError: fewer than two classes remain, a template lacks {c}, or the folder exists.
    """
    wrong = next((template for template in templates if "{c}" not in template), None)
    if wrong is not None:
        raise ConfigError(f"the prompt template {wrong!r} has no {{c}}, where the class name goes")
    require_free(folder)
    images, left_out = _usable(source, processes, progress)
    names = sorted({image.class_name for image in images if image.split == "test"})
    left_out += [
        LeftOut(image.path, "class_without_test", f"the class {image.class_name!r} has no image in test")
        for image in images
        if image.class_name not in names
    ]
    images = [image for image in images if image.class_name in names]
    if len(names) < 2:
        raise ConfigError(f"{folder.name} needs at least two classes and has {len(names)}" + _summary(left_out))
    labels = {name: label for label, name in enumerate(names)}
    splits = {split: part for split in SPLITS if (part := [image for image in images if image.split == split])}
    write_classification(
        folder,
        class_names=names,
        templates=templates,
        metric=metric,
        recipe=f"own images; {number_of(len(left_out), 'file')} left out",
        splits={split: _labelled(part, labels) for split, part in splits.items()},
    )
    probed = {image.class_name for image in splits.get("train", ())} == set(names)
    samples = {split: len(part) for split, part in splits.items()}
    empty = sorted(source.class_names - set(names))
    return _written(Made(folder, samples, left_out, len(names), probed=probed, empty_classes=empty))


def make_retrieval(
    source: Source,
    folder: Path,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Made:
    """Write the images with their captions to `folder`; otherwise like `make_classification`.

    Raises:
        ConfigError: no image remains, or the folder exists.
    """
    require_free(folder)
    images, left_out = _usable(source, processes, progress)
    if not images:
        raise ConfigError(f"{folder.name} has no image" + _summary(left_out))
    examples = ((_encoded(image.path), image.captions) for image in images)
    write_retrieval(folder, recipe=f"own images; {number_of(len(left_out), 'file')} left out", examples=examples)
    captions = sum(len(image.captions) for image in images)
    # A caption that repeats within one image is the same pair.
    repetition = CaptionCounts.of_captions(caption for image in images for caption in dict.fromkeys(image.captions))
    return _written(Made(folder, {"test": len(images)}, left_out, captions=captions, repetition=repetition))


def _usable(
    source: Source, processes: int, progress: Callable[[int, int], None]
) -> tuple[list[OwnImage], list[LeftOut]]:
    """Return the images that can be decoded, and all files that are left out."""
    paths = list(dict.fromkeys(image.path for image in source.images))
    if processes > 1 and len(paths) > _CHUNK:
        faults = map_in_children(fault, paths, min(processes, -(-len(paths) // _CHUNK)), _CHUNK)
    else:
        faults = map(fault, paths)
    faulty: dict[Path, LeftOut] = {}
    for done, (path, left_out) in enumerate(zip(paths, faults, strict=True), start=1):
        if left_out is not None:
            faulty[path] = left_out
        progress(done, len(paths))
    return [image for image in source.images if image.path not in faulty], [*source.left_out, *faulty.values()]


def fault(path: Path) -> LeftOut | None:
    """Return why an image file cannot be decoded whole, None if it can be."""
    try:
        read_header(read_image_file(path), MAX_PIXELS).decode(1)
    except BadSampleError as error:
        return LeftOut(path, error.kind, error.reason)
    return None


def _labelled(images: Sequence[OwnImage], labels: dict[str, int]) -> Iterator[tuple[bytes, int]]:
    for image in images:
        yield _encoded(image.path), labels[image.class_name]


def _encoded(path: Path) -> bytes:
    """Return the bytes of the file, or a PNG of its pixels if the tar layout does not hold its format."""
    content = read_image_file(path)
    if content.startswith(tuple(EXTENSIONS)):
        return content
    stream = io.BytesIO()
    Image.fromarray(read_header(content, MAX_PIXELS).decode(1)).save(stream, "PNG")
    return stream.getvalue()


def _summary(left_out: Sequence[LeftOut]) -> str:
    """Return the first files that are left out, for a message."""
    shown = "; ".join(f"{entry.path}: {entry.reason}" for entry in left_out[:3])
    return f" (left out: {number_of(len(left_out), 'file')}, {shown})" if left_out else ""


def _written(made: Made) -> Made:
    """Open the dataset as an evaluation does, and name the files that are left out beside it."""
    open_tar_dataset(made.folder.parent, made.folder.name)
    write_left_out(made.left_out, made.folder)
    return made
