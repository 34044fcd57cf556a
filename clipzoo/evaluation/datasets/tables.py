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
    schema = next(_groups(next(iter(files.values()))[0], ()))[2]
    image, label, caption = (
        next((column for column in columns if column in schema.names), None) for columns in (IMAGE, LABEL, CAPTION)
    )
    if image is None or (label is None and (caption is None or "test" not in files)):
        raise ConfigError(
            f"{folder} has the columns {', '.join(schema.names)}: an image and a label or caption are needed"
        )

    def values(split: str, column: str) -> list[Any]:
        return [
            value
            for path in files[split]
            for _, part, _ in _groups(path, [column])
            for value in part[column].to_pylist()
        ]

    images = {split: TableImages(paths, image) for split, paths in files.items()}
    if label is None:
        assert caption is not None
        captions = [[texts] if isinstance(texts, str) else list(texts) for texts in values("test", caption)]
        caption_image = [index for index, texts in enumerate(captions) for _ in texts]
        texts = [" ".join(text.split()) for texts in captions for text in texts]
        return RetrievalDataset(name, images["test"], texts, caption_image)
    labels = {split: values(split, label) for split in files}
    info = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {})
    names = info.get("features", {}).get(label, {}).get("names")
    if names is None:
        names = sorted({value for part in labels.values() for value in part})
        labels = {split: [names.index(value) for value in part] for split, part in labels.items()}
    splits = {split: LabelledSplit(images[split], part) for split, part in labels.items()}
    return ClassificationDataset(name, [str(value) for value in names], (), "top1", splits)


class TableImages(Images):
    """Embedded images of a column. One row group of a Parquet file is in memory at a time; Arrow files are mapped."""

    def __init__(self, paths: Sequence[Path], column: str) -> None:
        self._column = column
        groups = [(path, group, part.num_rows) for path in paths for group, part, _ in _groups(path, ())]
        self._groups = [(path, group) for path, group, _ in groups]
        self._ends = list(accumulate(count for _, _, count in groups))
        self._current: tuple[int, pyarrow.Table] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_current": None}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Image:
        try:
            return decode(self._read(index))
        except (BadSampleError, OSError) as error:
            path, _ = self._groups[bisect_right(self._ends, index)]
            raise ConfigError(f"{path}: row {index} cannot be decoded: {error}") from error

    def encoded(self, index: int) -> bytes:
        content = self._read(index)
        return content if content.startswith(tuple(SIGNATURES)) else png(self[index])

    def fingerprint(self) -> str:
        return version_of([path for path, _ in self._groups], self._column)

    def _read(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(index)
        position = bisect_right(self._ends, index)
        if self._current is None or self._current[0] != position:
            path, group = self._groups[position]
            self._current = position, next(_groups(path, [self._column], group))[1]
        table = self._current[1]
        value = table[self._column][index - (self._ends[position] - table.num_rows)].as_py()
        value = value.get("bytes") if isinstance(value, dict) else value
        if not value:
            raise BadSampleError("no_image_file", "the table has no bytes of the image")
        return value


def _groups(
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
                    yield group, file.read_row_group(group, columns), file.schema_arrow
        else:
            source = pyarrow.memory_map(str(path))
            try:
                table = ipc.open_stream(source).read_all()
            except pyarrow.ArrowInvalid:
                table = ipc.open_file(source).read_all()
            yield 0, table, table.schema
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is damaged: {error}; download it again") from error
