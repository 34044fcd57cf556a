"""Datasets in Parquet files, or in Arrow files as the package `datasets` saves them, with embedded images."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

from clipzoo.data.faults import BadSampleError
from clipzoo.data.images import decode
from clipzoo.errors import ConfigError, installation
from clipzoo.evaluation.datasets.dataset import (
    SIGNATURES,
    ClassificationDataset,
    EvaluationDataset,
    Images,
    LabelledSplit,
    RetrievalDataset,
    png,
    version_of,
)

if TYPE_CHECKING:
    import pyarrow

SPLITS = {"train": "train", "val": "val", "validation": "val", "valid": "val", "test": "test"}
IMAGE, LABEL = ("image", "img", "jpg", "png", "webp"), ("label", "labels", "fine_label", "cls")
CAPTION = ("caption", "captions", "text", "txt", "sentences")
"""Names of columns; the first that a file has is read."""


def table_files(folder: Path) -> dict[str, list[Path]]:
    """Parquet and Arrow files by split: the folder of a file, the first word of its name, or else "test"."""
    files: dict[str, list[Path]] = {}
    for path in sorted(
        path for form in ("parquet", "arrow") for path in [*folder.glob(f"*.{form}"), *folder.glob(f"*/*.{form}")]
    ):
        words = [*path.relative_to(folder).parts[:-1], re.split(r"[-_.]", path.name)[0]]
        files.setdefault(next((SPLITS[word] for word in words if word in SPLITS), "test"), []).append(path)
    return files


def open_tables(folder: Path, name: str) -> EvaluationDataset:
    """Open a dataset with labels, whose type may name the classes, or with captions. Raises ConfigError."""
    files = table_files(folder)
    schema = next(row_groups(next(iter(files.values()))[0], ()))[2]
    image, label, caption = (next((key for key in keys if key in schema.names), "") for keys in (IMAGE, LABEL, CAPTION))
    if not image or not (label or (caption and "test" in files)):
        raise ConfigError(f"{folder} has no column of images and of labels or captions, only {', '.join(schema.names)}")
    images = {split: TableImages(paths, image) for split, paths in files.items()}
    parts = {
        split: [part for path in paths for _, part, _ in row_groups(path, [label or caption])]
        for split, paths in files.items()
    }
    values = {split: [value for part in of for value in part[0].to_pylist()] for split, of in parts.items()}
    if not label:
        captions = [[texts] if isinstance(texts, str) else texts for texts in values["test"]]
        caption_image = [index for index, texts in enumerate(captions) for _ in texts]
        flat = [" ".join(text.split()) for texts in captions for text in texts]
        return RetrievalDataset(name, images["test"], flat, caption_image)
    # The package `datasets` stores the names of the classes with the schema, and writes labels as numbers.
    features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    names = features.get(label, {}).get("names")
    number: Any = range(len(names)) if names else None
    if names is None:
        names = sorted({value for part in values.values() for value in part})
        number = {value: index for index, value in enumerate(names)}
    splits = {split: LabelledSplit(images[split], [number[value] for value in part]) for split, part in values.items()}
    return ClassificationDataset(name, [str(value) for value in names], (), "top1", splits)


class TableImages(Images):
    """Embedded images of a column. One row group of a Parquet file is in memory at a time; Arrow files are mapped."""

    def __init__(self, paths: Sequence[Path], column: str) -> None:
        groups = [(path, group, part.num_rows) for path in paths for group, part, _ in row_groups(path, ())]
        self._groups = [(path, [column], group) for path, group, _ in groups]
        self._ends = list(accumulate(count for _, _, count in groups))
        self._current: tuple[int, Any] = -1, None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_current": (-1, None)}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Image:
        try:
            return decode(self._read(index))
        except (BadSampleError, OSError) as error:
            path = self._groups[bisect_right(self._ends, index)][0]
            raise ConfigError(f"{path}: row {index} cannot be decoded: {error}") from error

    def encoded(self, index: int) -> bytes:
        content = self._read(index)
        return content if content.startswith(tuple(SIGNATURES)) else png(self[index])

    def fingerprint(self) -> str:
        return version_of([path for path, _, _ in self._groups], self._groups[0][1])

    def _read(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(index)
        position = bisect_right(self._ends, index)
        if self._current[0] != position:
            self._current = position, next(row_groups(*self._groups[position]))[1][0]
        column = self._current[1]
        value = column[index - (self._ends[position] - len(column))].as_py()
        return (value.get("bytes") if isinstance(value, dict) else value) or b""


def row_groups(
    path: Path, columns: Sequence[str], only: int | None = None
) -> Iterator[tuple[int, pyarrow.Table, pyarrow.Schema]]:
    """Yield number, columns and the file's schema for each row group; an Arrow file is one."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs the package pyarrow: {installation('tables')}") from error
    try:
        if path.suffix == ".parquet":
            with parquet.ParquetFile(path) as file:
                for group in range(file.num_row_groups) if only is None else [only]:
                    yield group, file.read_row_group(group, list(columns)), file.schema_arrow
        else:
            source = pyarrow.memory_map(str(path))
            # A file of the format for random access begins with its name.
            table = (ipc.open_file if source.read(6) == b"ARROW1" else ipc.open_stream)(
                source.seek(0) or source
            ).read_all()
            yield 0, table.select(list(columns)), table.schema
    except (pyarrow.ArrowException, OSError, KeyError) as error:
        raise ConfigError(f"{path} is damaged: {error}; download it again") from error
