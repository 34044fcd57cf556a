"""The user's own images for an evaluation dataset: folders by class, images with caption files, tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from clipzoo.data.left_out import NO_IMAGE_FILE, LeftOut
from clipzoo.data.shards.captions import has_text
from clipzoo.data.shards.scan import IMAGE_EXTENSIONS
from clipzoo.errors import ConfigError
from clipzoo.io import MB, read_bytes, read_table

SPLITS = ("train", "val", "test")


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


def class_folders(folder: Path) -> Source:
    """Read <folder>/<class>/.../IMAGE as the split test, or <folder>/<split>/<class>/.../IMAGE.

    A class is called like its folder, with spaces for underscores. Captions beside images (NAME.txt) are not used.

    Raises:
        ConfigError: there is no folder in `folder`, or no split test.
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
                    _leave_out(source, path, "no_class", "it is in no folder of a class")
                elif _is_image(source, path):
                    source.images.append(OwnImage(path, split, class_name))
    return source


def captioned_folder(folder: Path) -> Source:
    """Read all images below the folder with the captions in NAME.txt beside them, one per line."""
    source = Source()
    for path in _files(folder):
        text = path.with_suffix(".txt")
        if path.suffix.lower() == ".txt" or not _is_image(source, path):
            continue
        if text.is_file():
            lines = read_bytes(text, MB).decode("utf-8-sig", errors="replace").splitlines()
            _add_captions(source, path, lines)
        else:
            _leave_out(source, path, "no_caption_file", f"{text.name} is missing")
    return source


def table_of_classes(table: Path, image: str, class_name: str, split: str | None) -> Source:
    """Read a table with one image a row. image, class_name, split: columns; without `split` all rows are test."""
    source = Source()
    for path, part, row in _rows(table, image, split, (class_name,)):
        name = " ".join(row[class_name].split())
        if name:
            source.class_names.add(name)
            source.images.append(OwnImage(path, part, name))
        else:
            _leave_out(source, path, "no_class", f"its {class_name} is empty")
    return source


def table_of_captions(table: Path, image: str, caption: str, split: str | None) -> Source:
    """Read a table of captions; rows with the same image are its captions. Only rows of the split test are read."""
    captions: dict[Path, list[str]] = {}
    for path, part, row in _rows(table, image, split, (caption,)):
        if part == "test":
            captions.setdefault(path, []).append(row[caption])
    source = Source()
    for path, texts in captions.items():
        _add_captions(source, path, texts)
    return source


def _rows(
    table: Path, image: str, split: str | None, columns: Collection[str]
) -> Iterator[tuple[Path, str, dict[str, str]]]:
    """Yield (path, split, row) of a table; paths are relative to the table."""
    for row in read_table(table, [image, *columns, *([split] if split else [])]):
        part = row[split].strip() if split else "test"
        if part not in SPLITS:
            raise ConfigError(f"{table} has the split {part!r} for {row[image]}: splits are {', '.join(SPLITS)}")
        yield table.parent / row[image], part, row


def _add_captions(source: Source, path: Path, texts: Collection[str]) -> None:
    captions = tuple(" ".join(text.split()) for text in texts if has_text(text))
    if captions:
        source.images.append(OwnImage(path, captions=captions))
    else:
        _leave_out(source, path, "empty_caption", "its caption has no letter or digit")


def _files(entry: Path) -> Iterator[Path]:
    """Yield the file `entry`, or all files below the folder `entry` in the order of their names; no hidden ones."""
    for path in [entry] if entry.is_file() else sorted(entry.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(entry.parent).parts)
        if path.is_file() and not hidden:
            yield path


def _is_image(source: Source, path: Path) -> bool:
    if path.suffix[1:].lower() in IMAGE_EXTENSIONS:
        return True
    _leave_out(source, path, NO_IMAGE_FILE, f"files of type {path.suffix or 'none'} are not read")
    return False


def _leave_out(source: Source, path: Path, kind: str, reason: str) -> None:
    source.left_out.append(LeftOut(path, kind, reason))
