"""Frozen features of a data set's splits, before and after the projection, kept on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipzoo.evaluation.encoding import Encoding
from clipzoo.evaluation.probe.penalty_search import Split
from clipzoo.io import write_whole
from clipzoo.model import Model
from clipzoo.types import Embedding, Features

WHERE = ("before", "after")


def write_features(
    model: Model, dataset: Any, name: str, split: str, encoding: Encoding, resize: int, folder: Path, key: str
) -> None:
    """Encode a split unless `folder` has its features under the same `key`; the first rank writes.

    Files: <split>.before.npy and <split>.after.npy [n, d], <split>.labels.npy [n], and last <split>.key.
    """
    mark = folder / f"{split}.key"
    if encoding.world.run_on_first(lambda: mark.exists() and mark.read_text() == key):
        return

    def answer(features: Features, labels: Tensor) -> list[Embedding]:
        return [*(model.head.probe(features, where).float() for where in WHERE), labels]

    files: list[Any] = []
    done = 0
    for parts in encoding.images(model, dataset, resize, answer, f"features of {name}, {split}"):
        if not encoding.world.is_first:
            continue
        arrays = [part.cpu().numpy() for part in parts if isinstance(part, Tensor)]
        if not files:
            folder.mkdir(parents=True, exist_ok=True)
            mark.unlink(missing_ok=True)
            files = [
                np.lib.format.open_memmap(path, "w+", array.dtype, (len(dataset), *array.shape[1:]))
                for path, array in zip(_paths(folder, split), arrays, strict=True)
            ]
        for file, array in zip(files, arrays, strict=True):
            file[done : done + len(array)] = array
        done += len(arrays[0])
    for file in files:
        file.flush()
    encoding.world.run_on_first(lambda: write_whole(mark, key))


def read_features(folder: Path, split: str, where: str) -> Split:
    paths = dict(zip((*WHERE, "labels"), _paths(folder, split), strict=True))
    return Split(torch.from_numpy(np.load(paths[where])), torch.from_numpy(np.load(paths["labels"])))


def _paths(folder: Path, split: str) -> list[Path]:
    return [folder / f"{split}.{part}.npy" for part in (*WHERE, "labels")]
