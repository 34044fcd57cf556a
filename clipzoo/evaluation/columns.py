"""Columns of a dataset in files of a few thousand images: computed in one pass, resumed after the last whole file.

    <folder>/<split>.<size>/<key>.<first row>.safetensors     all columns of CHUNK images

Files do not depend on the number of ranks. All ranks read them, so the folder must be shared.
"""

from __future__ import annotations

import os
import time
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from clipzoo import io
from clipzoo.distributed.launch import say
from clipzoo.errors import number_of
from clipzoo.evaluation.datasets.dataset import EvaluationDataset
from clipzoo.evaluation.encoder import SECONDS_BETWEEN_LINES
from clipzoo.evaluation.task import Column, Evaluation, View
from clipzoo.io.weights import read_tensors
from clipzoo.types import Embedding, PointSet, concatenate, map_embedding

CHUNK = 8192
"""Images in a file, rounded down to whole batches."""
REMEDY = "its images are encoded again"


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
            left = (self.images - self.done) / rate
            say(
                f"evaluation: {place}; of all datasets {self.done} of {number_of(self.images, 'image')}, "
                f"{rate:.0f} images/s, {left:.0f} s remaining"
            )


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
    step, total = max(1, CHUNK // size) * size, len(images)
    files = {
        io.below(place, f"{key}.{first}.safetensors"): range(first, min(first + step, total))
        for first in range(0, total, step)
    }

    def missing() -> list[Path]:
        for path in set(place.glob("*")) - set(files):
            path.unlink()
        return [path for path, part in files.items() if not _is_intact(path, len(part), columns)]

    todo = world.run_on_first(missing)
    rows = list(chain.from_iterable(files[path] for path in todo))
    clock.images -= total - len(rows)
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
                whole = [concatenate(parts) for parts in zip(*pending, strict=True)]
                _write(path, {name: part[:cut] for name, part in zip(columns, whole, strict=True)})
                pending[:] = [[part[cut:] for part in whole]]

            world.run_on_first(write)
        clock.encoded(count, f"{dataset.name}, {view.split}")
    return StoredColumns(columns, files)


def _write(path: Path, columns: Mapping[str, Embedding]) -> None:
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    for name, values in columns.items():
        parts = vars(values) if isinstance(values, PointSet) else {"": values}
        tensors |= {f"{name}/{part}".rstrip("/"): tensor.contiguous() for part, tensor in parts.items()}
    with io.whole(path) as file:
        file.write(save(tensors))


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
    tensors: list[Tensor] = []
    for part in batch:
        tensors += vars(part).values() if isinstance(part, PointSet) else [part]
    path = io.below(place, "space.safetensors")
    io.make_folder(place)
    with io.explained(path):
        try:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, rows * sum(tensor[0].nbytes for tensor in tensors)))
        finally:
            path.unlink(missing_ok=True)
