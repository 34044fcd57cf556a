"""Evaluation datasets made from the user's own images, written in the tar layout and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from clipzoo.data.faults import NO_IMAGE_FILE, BadSampleError, LeftOut, write_left_out
from clipzoo.data.images import MAX_PIXELS, read_header, read_image_file
from clipzoo.data.maps.engines import map_in_children
from clipzoo.data.tar import IMAGE_EXTENSIONS
from clipzoo.data.write import Pair, usable_captions
from clipzoo.errors import ConfigError, number_of
from clipzoo.evaluation.datasets.dataset import EvaluationDataset, ImageFile, ImageFiles, Metric, catalogue
from clipzoo.evaluation.datasets.tar import open_tar_dataset, write_classification, write_retrieval
from clipzoo.io import folder_name, read_table

T = TypeVar("T")
SPLITS = ("train", "val", "test")
CHUNK = 50
"""Images that a worker process decodes at a time; fewer images are decoded in the main process."""


@dataclass(frozen=True)
class OwnImage:
    """An image file with the name of its class."""

    path: Path
    split: str
    class_name: str


@dataclass
class Source:
    """Images in the order of the source, the files that are left out, and the names of all classes."""

    images: list[OwnImage] = field(default_factory=list)
    class_names: set[str] = field(default_factory=set)
    left_out: list[LeftOut] = field(default_factory=list)


def class_folders(folder: Path) -> Source:
    """Read <folder>/<class>/.../IMAGE as the split test, or <folder>/<split>/<class>/.../IMAGE.

    Class names are the folders' names, with spaces for underscores. Captions next to images (NAME.txt) are not used.
    Raises ConfigError if there is no folder in `folder`, or no split test.
    """
    parts = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    names = {part.name for part in parts}
    if not parts:
        raise ConfigError(f"{folder} has no folder: put the images of each class into a separate folder, or give "
                          "--captions for images with NAME.txt next to them")  # fmt: skip
    by_split = names <= set(SPLITS) or {"train", "test"} <= names
    if by_split and ("test" not in names or names - set(SPLITS)):
        shown = ", ".join(sorted(names))
        raise ConfigError(f"{folder} has the folders {shown}: splits are called train, val and test, and need test")
    source = Source()
    for split, root in [(part.name, part) for part in parts] if by_split else [("test", folder)]:
        for entry in sorted(root.iterdir()):
            class_name = " ".join(entry.name.replace("_", " ").split()) or entry.name
            if entry.is_dir() and not entry.name.startswith("."):
                source.class_names.add(class_name)
            # In the order of their names, no hidden ones.
            paths = [entry] if entry.is_file() else sorted(path for path in entry.rglob("*") if path.is_file())
            files = [path for path in paths if not any(part[0] == "." for part in path.relative_to(root).parts)]
            is_image = {path: path.suffix[1:].lower() in IMAGE_EXTENSIONS for path in files}
            stems = {path.with_suffix("") for path in files if is_image[path]}
            for path in files:
                if path.suffix.lower() == ".txt" and path.with_suffix("") in stems:
                    continue  # the caption of an image
                if path == entry:
                    source.left_out.append(LeftOut(path, "no_class", "it is in no folder of a class"))
                elif is_image[path]:
                    source.images.append(OwnImage(path, split, class_name))
                else:
                    reason = f"files of type {path.suffix or 'none'} are not read"
                    source.left_out.append(LeftOut(path, NO_IMAGE_FILE, reason))
    return source


def table_of_classes(table: Path, image: str, class_name: str, split: str | None) -> Source:
    """Read a table with one image per row. image, class_name, split: columns; without `split` all rows are test."""
    source = Source()
    for path, part, value in _rows(table, image, class_name, split):
        if name := " ".join(value.split()):
            source.class_names.add(name)
            source.images.append(OwnImage(path, part, name))
        else:
            source.left_out.append(LeftOut(path, "no_class", f"its {class_name} is empty"))
    return source


def table_of_captions(table: Path, image: str, caption: str, split: str | None) -> list[Pair]:
    """Read a table of captions; rows with the same image are its captions. Only rows of the split test are read."""
    captions: dict[Path, list[str]] = {}
    for path, part, text in _rows(table, image, caption, split):
        if part == "test":
            captions.setdefault(path, []).append(text)
    return [Pair(path, texts) for path, texts in captions.items()]


def _rows(table: Path, image: str, column: str, split: str | None) -> Iterator[tuple[Path, str, str]]:
    """Yield (path, split, value of the column) of a table; paths are relative to the table."""
    for row in read_table(table, [image, column, *([split] if split else [])]):
        part = row[split].strip() if split else "test"
        if part not in SPLITS:
            raise ConfigError(f"{table} has the split {part!r} for {row[image]}: splits are {', '.join(SPLITS)}")
        yield table.parent / row[image], part, row[column]


def require_free(folder: Path) -> None:
    """Raise ConfigError if the folder exists, or its name is invalid or that of a benchmark dataset."""
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
) -> tuple[EvaluationDataset, list[LeftOut]]:
    """Write the images with their classes to `folder`, whose name is that of the dataset; return it, and other files.

    Images keep their bytes if they are JPEG, PNG or WebP, others become PNG. Files that cannot be decoded are left out,
    and so are all images of a class without an image in test. Classes are in alphabetical order.

    progress: called with the numbers of decoded images and of all images. Raises ConfigError if fewer than two
    classes remain, a template lacks {c}, or the folder exists.
    """
    if bad := [template for template in templates if "{c}" not in template]:
        raise ConfigError(f"the prompt template {bad[0]!r} has no {{c}}, where the class name goes")
    require_free(folder)
    faulty = _faulty([image.path for image in source.images], processes, progress)
    images = [image for image in source.images if image.path not in faulty]
    names = sorted({image.class_name for image in images if image.split == "test"})
    labels = {name: label for label, name in enumerate(names)}
    left_out = [*source.left_out, *faulty.values()]
    left_out += [
        LeftOut(image.path, "class_without_test", f"the class {image.class_name!r} has no image in test")
        for image in images
        if image.class_name not in labels
    ]
    if len(names) < 2:
        raise ConfigError(f"{folder.name} needs at least two classes and has {len(names)}" + _summary(left_out))
    rows = dict[str, list[tuple[Path, int]]]()
    for image in images:
        if image.class_name in labels:
            rows.setdefault(image.split, []).append((image.path, labels[image.class_name]))
    splits = {split: _encoded(rows[split]) for split in SPLITS if split in rows}
    recipe = f"own images; {number_of(len(left_out), 'file')} left out"
    write_classification(folder, class_names=names, templates=templates, metric=metric, recipe=recipe, splits=splits)
    return _opened(folder, left_out), left_out


def make_retrieval(
    pairs: Sequence[Pair],
    folder: Path,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
    others: Sequence[LeftOut] = (),
) -> tuple[EvaluationDataset, list[LeftOut]]:
    """Write the images with their captions to `folder`; otherwise like `make_classification`.

    others: files of the source that are in no pair.
    """
    require_free(folder)
    faulty, rows, left_out = _faulty([pair.image for pair in pairs], processes, progress), [], [*others]
    for pair in pairs:
        try:
            captions = usable_captions(pair)
        except BadSampleError as error:
            faulty[pair.image] = LeftOut(pair.image, error.kind, error.reason)
        if pair.image not in faulty:
            rows.append((pair.image, captions))
    left_out += faulty.values()
    if not rows:
        raise ConfigError(f"{folder.name} has no image" + _summary(left_out))
    recipe = f"own images; {number_of(len(left_out), 'file')} left out"
    write_retrieval(folder, recipe=recipe, examples=_encoded(rows))
    return _opened(folder, left_out), left_out


def _faulty(images: Sequence[Path], processes: int, progress: Callable[[int, int], None]) -> dict[Path, LeftOut]:
    """Return the images that cannot be decoded."""
    paths, faulty = list(dict.fromkeys(images)), dict[Path, LeftOut]()
    faults = map_in_children(fault, paths, min(processes, -(-len(paths) // CHUNK)), CHUNK)
    for done, (path, left_out) in enumerate(zip(paths, faults, strict=True), start=1):
        if left_out is not None:
            faulty[path] = left_out
        progress(done, len(paths))
    return faulty


def fault(path: Path) -> LeftOut | None:
    """Return the reason why an image file cannot be decoded completely; None if it can."""
    try:
        read_header(read_image_file(path), MAX_PIXELS).decode(1)
    except BadSampleError as error:
        return LeftOut(path, error.kind, error.reason)
    return None


def _encoded(rows: Sequence[tuple[Path, T]]) -> Iterator[tuple[bytes, T]]:
    files = ImageFiles([ImageFile(path) for path, _ in rows])
    return ((files.encoded(number), label) for number, (_, label) in enumerate(rows))


def _summary(left_out: Sequence[LeftOut]) -> str:
    """Return the first files that are left out, for a message."""
    shown = "; ".join(f"{entry.path}: {entry.reason}" for entry in left_out[:3])
    return f" (left out: {number_of(len(left_out), 'file')}, {shown})" if left_out else ""


def _opened(folder: Path, left_out: Sequence[LeftOut]) -> EvaluationDataset:
    """Open the dataset as an evaluation does, and list the files that are left out in left_out.tsv."""
    write_left_out(left_out, folder)
    return open_tar_dataset(folder.parent, folder.name)
