"""Datasets in Parquet files, or in Arrow files as the package `datasets` saves them, with embedded images."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipzoo.data.tables.formats import arrow
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import (
    ClassificationDataset,
    EncodedImages,
    EvaluationDataset,
    LabelledSplit,
    RetrievalDataset,
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
        path for form in ("*.parquet", "*.arrow") for path in [*folder.glob(form), *folder.glob(f"*/{form}")]
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
    values: dict[str, list[Any]] = {split: [] for split in files}
    for split, path in ((split, path) for split, paths in files.items() for path in paths):
        for _, part, _ in row_groups(path, [label or caption]):
            values[split] += part[0].to_pylist()
    if not label:
        captions = [[texts] if isinstance(texts, str) else texts for texts in values["test"]]
        tidy = [[" ".join(text.split()) for text in texts] for texts in captions]
        return RetrievalDataset.of_images(name, images["test"], tidy)
    # The package `datasets` stores the names of the classes with the schema, and writes labels as numbers.
    features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    names = features.get(label, {}).get("names")
    labels = range(len(names)) if names else sorted({value for part in values.values() for value in part})
    number = {value: index for index, value in enumerate(labels)}
    if unknown := [value for part in values.values() for value in part if value not in number]:
        raise ConfigError(f"{folder} has the {label} {unknown[0]}, but {len(number)} classes")
    splits = {split: LabelledSplit(images[split], [number[value] for value in part]) for split, part in values.items()}
    return ClassificationDataset(name, [str(value) for value in names or labels], (), "top1", splits)


class TableImages(EncodedImages):
    """Embedded images of a column. Row groups of a Parquet file are read on access; Arrow files are mapped."""

    def __init__(self, paths: Sequence[Path], column: str) -> None:
        groups = [(path, group, part.num_rows) for path in paths for group, part, _ in row_groups(path, ())]
        self._groups = [(path, column, group) for path, group, _ in groups]
        self._ends = list(accumulate(count for _, _, count in groups))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def place(self, index: int) -> str:
        return f"{self._groups[bisect_right(self._ends, index)][0]}: row {index}"

    def fingerprint(self) -> str:
        return version_of([path for path, _, _ in self._groups], [self._groups[0][1]])

    def read(self, index: int) -> bytes:
        position = bisect_right(self._ends, index)
        column = _column(*self._groups[position])
        value = column[index - (self._ends[position] - len(column))].as_py()
        return (value.get("bytes") if isinstance(value, dict) else value) or b""


# The examples of a choice dataset take their images from two columns in turn.
@lru_cache(maxsize=2)
def _column(path: Path, column: str, group: int) -> pyarrow.ChunkedArray:
    return next(row_groups(path, [column], group))[1][0]


def row_groups(
    path: Path, columns: Sequence[str], only: int | None = None
) -> Iterator[tuple[int, pyarrow.Table, pyarrow.Schema]]:
    """Yield number, columns and the file's schema for each row group; an Arrow file is one."""
    pyarrow = arrow()
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            with parquet.ParquetFile(path) as file:
                for group in range(file.num_row_groups) if only is None else [only]:
                    yield group, file.read_row_group(group, list(columns)), file.schema_arrow
        else:
            source = pyarrow.memory_map(str(path))
            # A file of the format for random access begins with its name.
            open_table = pyarrow.ipc.open_file if source.read(6) == b"ARROW1" else pyarrow.ipc.open_stream
            source.seek(0)
            table = open_table(source).read_all()
            yield 0, table.select(list(columns)), table.schema
    except (pyarrow.ArrowException, OSError, KeyError) as error:
        raise ConfigError(f"{path} is damaged: {error}; download it again") from error
