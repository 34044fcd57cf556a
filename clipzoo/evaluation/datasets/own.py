"""Evaluation datasets made from the user's own images, written in the tar layout and checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clipzoo.data.captions import CaptionCounts, has_text
from clipzoo.data.faults import NO_IMAGE_FILE, BadSampleError, LeftOut, write_left_out
from clipzoo.data.images import MAX_PIXELS, read_header, read_image_file
from clipzoo.data.maps.engines import map_in_children
from clipzoo.data.tar import IMAGE_EXTENSIONS
from clipzoo.errors import ConfigError, number_of
from clipzoo.evaluation.datasets.dataset import ImageFile, ImageFiles, Metric, catalogue
from clipzoo.evaluation.datasets.tar import open_tar_dataset, write_classification, write_retrieval
from clipzoo.io import MB, folder_name, read_bytes, read_table

SPLITS = ("train", "val", "test")
CHUNK = 50
"""Images that a worker process decodes at a time; fewer images are decoded in the main process."""


@dataclass(frozen=True)
class OwnImage:
    """An image file with the name of its class, or with captions."""

    path: Path
    split: str = "test"
    class_name: str = ""
    captions: tuple[str, ...] = ()


@dataclass
class Source:
    """Images in the order of the source, the files that are left out, and the names of all classes."""

    images: list[OwnImage] = field(default_factory=list)
    class_names: set[str] = field(default_factory=set)
    left_out: list[LeftOut] = field(default_factory=list)

    def accepts(self, path: Path) -> bool:
        """Return True for the extension of an image; leave other files out."""
        is_image = path.suffix[1:].lower() in IMAGE_EXTENSIONS
        if not is_image:
            self.left_out.append(LeftOut(path, NO_IMAGE_FILE, f"files of type {path.suffix or 'none'} are not read"))
        return is_image

    def add_captions(self, path: Path, texts: Collection[str]) -> None:
        """Add an image with the captions that have a letter or digit."""
        captions = tuple(" ".join(text.split()) for text in texts if has_text(text))
        if captions:
            self.images.append(OwnImage(path, captions=captions))
        else:
            self.left_out.append(LeftOut(path, "empty_caption", "its caption has no letter or digit"))


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
            files = list(_files(entry))
            images = {path.with_suffix("") for path in files if path.suffix[1:].lower() in IMAGE_EXTENSIONS}
            for path in files:
                if path.suffix.lower() == ".txt" and path.with_suffix("") in images:
                    continue  # the caption of an image
                if path == entry:
                    source.left_out.append(LeftOut(path, "no_class", "it is in no folder of a class"))
                elif source.accepts(path):
                    source.images.append(OwnImage(path, split, class_name))
    return source


def captioned_folder(folder: Path) -> Source:
    """Read all images below the folder with the captions in NAME.txt next to them, one per line."""
    source = Source()
    for path in _files(folder):
        text = path.with_suffix(".txt")
        if path.suffix.lower() == ".txt" or not source.accepts(path):
            continue
        if text.is_file():
            source.add_captions(path, read_bytes(text, MB).decode("utf-8-sig", errors="replace").splitlines())
        else:
            source.left_out.append(LeftOut(path, "no_caption_file", f"{text.name} is missing"))
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


def table_of_captions(table: Path, image: str, caption: str, split: str | None) -> Source:
    """Read a table of captions; rows with the same image are its captions. Only rows of the split test are read."""
    source, captions = Source(), dict[Path, list[str]]()
    for path, part, text in _rows(table, image, caption, split):
        if part == "test":
            captions.setdefault(path, []).append(text)
    for path, texts in captions.items():
        source.add_captions(path, texts)
    return source


def _rows(table: Path, image: str, column: str, split: str | None) -> Iterator[tuple[Path, str, str]]:
    """Yield (path, split, value of the column) of a table; paths are relative to the table."""
    for row in read_table(table, [image, column, *([split] if split else [])]):
        part = row[split].strip() if split else "test"
        if part not in SPLITS:
            raise ConfigError(f"{table} has the split {part!r} for {row[image]}: splits are {', '.join(SPLITS)}")
        yield table.parent / row[image], part, row[column]


def _files(entry: Path) -> Iterator[Path]:
    """Yield the file `entry`, or all files below the folder `entry` in the order of their names, no hidden ones."""
    for path in [entry] if entry.is_file() else sorted(entry.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(entry.parent).parts):
            yield path


@dataclass(frozen=True)
class WrittenDataset:
    """A dataset that was written.

    samples: number of images per split. left_out: files that are not in the dataset. classes, captions: their numbers;
    0 for the other kind of dataset. repetition: counts of repeated captions. probed: True if every class has images in
    train, as a linear probe needs. empty_classes: classes that are left out because they have no image in test.
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
) -> WrittenDataset:
    """Write the images with their classes to `folder`, whose name is that of the dataset.

    Images keep their bytes if they are JPEG, PNG or WebP, others become PNG. Files that cannot be decoded are left out,
    and so are all images of a class without an image in test. Classes are in alphabetical order.

    progress: called with the numbers of decoded images and of all images. Raises ConfigError if fewer than two
    classes remain, a template lacks {c}, or the folder exists.
    """
    if bad := [template for template in templates if "{c}" not in template]:
        raise ConfigError(f"the prompt template {bad[0]!r} has no {{c}}, where the class name goes")
    require_free(folder)
    images, left_out = _usable(source, processes, progress)
    names = sorted({image.class_name for image in images if image.split == "test"})
    labels = {name: label for label, name in enumerate(names)}
    left_out += [
        LeftOut(image.path, "class_without_test", f"the class {image.class_name!r} has no image in test")
        for image in images
        if image.class_name not in labels
    ]
    images = [image for image in images if image.class_name in labels]
    if len(names) < 2:
        raise ConfigError(f"{folder.name} needs at least two classes and has {len(names)}" + _summary(left_out))
    splits = {split: part for split in SPLITS if (part := [image for image in images if image.split == split])}
    recipe = f"own images; {number_of(len(left_out), 'file')} left out"
    of_split = {split: [labels[image.class_name] for image in part] for split, part in splits.items()}
    rows = {split: zip(_encoded(part), of_split[split], strict=True) for split, part in splits.items()}
    write_classification(folder, class_names=names, templates=templates, metric=metric, recipe=recipe, splits=rows)
    probed = {image.class_name for image in splits.get("train", ())} == set(names)
    samples = {split: len(part) for split, part in splits.items()}
    empty = sorted(source.class_names - set(names))
    return _written(WrittenDataset(folder, samples, left_out, len(names), probed=probed, empty_classes=empty))


def make_retrieval(
    source: Source, folder: Path, processes: int = 1, progress: Callable[[int, int], None] = lambda done, total: None
) -> WrittenDataset:
    """Write the images with their captions to `folder`; otherwise like `make_classification`."""
    require_free(folder)
    images, left_out = _usable(source, processes, progress)
    if not images:
        raise ConfigError(f"{folder.name} has no image" + _summary(left_out))
    examples = zip(_encoded(images), [image.captions for image in images], strict=True)
    write_retrieval(folder, recipe=f"own images; {number_of(len(left_out), 'file')} left out", examples=examples)
    captions = sum(len(image.captions) for image in images)
    # A caption that repeats within one image is the same pair.
    repetition = CaptionCounts.of_captions(caption for image in images for caption in dict.fromkeys(image.captions))
    return _written(WrittenDataset(folder, {"test": len(images)}, left_out, captions=captions, repetition=repetition))


def _usable(
    source: Source, processes: int, progress: Callable[[int, int], None]
) -> tuple[list[OwnImage], list[LeftOut]]:
    """Return the images that can be decoded, and all files that are left out."""
    paths = list(dict.fromkeys(image.path for image in source.images))
    faults = map_in_children(fault, paths, min(processes, -(-len(paths) // CHUNK)), CHUNK)
    faulty: dict[Path, LeftOut] = {}
    for done, (path, left_out) in enumerate(zip(paths, faults, strict=True), start=1):
        if left_out is not None:
            faulty[path] = left_out
        progress(done, len(paths))
    return [image for image in source.images if image.path not in faulty], [*source.left_out, *faulty.values()]


def fault(path: Path) -> LeftOut | None:
    """Return the reason why an image file cannot be decoded completely; None if it can."""
    try:
        read_header(read_image_file(path), MAX_PIXELS).decode(1)
    except BadSampleError as error:
        return LeftOut(path, error.kind, error.reason)
    return None


def _encoded(images: Sequence[OwnImage]) -> Iterator[bytes]:
    files = ImageFiles([ImageFile(image.path) for image in images])
    return map(files.encoded, range(len(files)))


def _summary(left_out: Sequence[LeftOut]) -> str:
    """Return the first files that are left out, for a message."""
    shown = "; ".join(f"{entry.path}: {entry.reason}" for entry in left_out[:3])
    return f" (left out: {number_of(len(left_out), 'file')}, {shown})" if left_out else ""


def _written(made: WrittenDataset) -> WrittenDataset:
    """Check that an evaluation can open the dataset, and list the files that are left out in left_out.tsv."""
    open_tar_dataset(made.folder.parent, made.folder.name)
    write_left_out(made.left_out, made.folder)
    return made
