"""Frozen features of a dataset's splits, before and after the projection, in files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
import torch
from torch import Tensor

from clipzoo import io
from clipzoo.evaluation.datasets.dataset import LabelledImages
from clipzoo.evaluation.encoder import BatchEncoder
from clipzoo.model import Model
from clipzoo.types import Embedding, Features

PROJECTIONS = ("before", "after")
REMEDY = "the features are computed again"


@dataclass(frozen=True)
class LabelledFeatures:
    """features [n, d] and labels [n]."""

    features: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> LabelledFeatures:
        return LabelledFeatures(self.features.to(device), self.labels.to(device))

    def rows(self, chosen: Tensor) -> LabelledFeatures:
        return LabelledFeatures(self.features[chosen], self.labels[chosen])

    def join(self, other: LabelledFeatures) -> LabelledFeatures:
        return LabelledFeatures(torch.cat([self.features, other.features]), torch.cat([self.labels, other.labels]))


def write_features(
    model: Model,
    images: LabelledImages,
    name: str,
    split: str,
    encoder: BatchEncoder,
    resize: int,
    folder: Path,
    key: str,
) -> None:
    """Encode one split, unless `folder` has its features under the same key; the first rank writes. Collective.

    Files: <split>.before.npy and <split>.after.npy [n, d], <split>.labels.npy [n], and last <split>.key.

    name: of the dataset, for messages. resize: shorter side in pixels before the central crop. key: digest of all that
    the features depend on.
    """
    world = encoder.world
    key_file, paths = io.below(folder, f"{split}.key"), _paths(folder, split)
    if world.run_on_first(lambda: _is_written(folder, split, key, len(images))):
        return

    def compute(features: Features, labels: Tensor) -> list[Embedding]:
        return [*(model.head.probe(features, projection).float() for projection in PROJECTIONS), labels]

    files: list[IO[bytes]] = []
    for batch in encoder.images(model, images, resize, compute, f"features of {name}, {split}"):
        if not world.is_first:
            continue
        arrays = [part.cpu().numpy() for part in batch if isinstance(part, Tensor)]
        if not files:
            io.make_folder(folder)
            key_file.unlink(missing_ok=True)
            files = [_allocated(path, array, len(images)) for path, array in zip(paths, arrays, strict=True)]
        for path, file, array in zip(paths, files, arrays, strict=True):
            with io.explained(path):
                file.write(array.tobytes())
    for path, file in zip(paths, files, strict=False):
        with io.explained(path):
            file.flush()
            os.fsync(file.fileno())
            file.close()
    world.run_on_first(lambda: io.write_whole(key_file, key))


def read_features(folder: Path, split: str, projection: str) -> LabelledFeatures:
    """Read what `write_features` wrote. projection: "before" or "after". Raises DamagedFileError."""
    paths = dict(zip((*PROJECTIONS, "labels"), _paths(folder, split), strict=True))
    return LabelledFeatures(torch.from_numpy(_load(paths[projection])), torch.from_numpy(_load(paths["labels"])))


def _is_written(folder: Path, split: str, key: str, count: int) -> bool:
    """Return True if the files of a split are complete and belong to `key`; damaged ones are named in the log."""
    key_file = io.below(folder, f"{split}.key")
    if not key_file.exists():
        return False

    def is_written() -> bool:
        return io.read_text(key_file, io.MB, REMEDY) == key and all(
            len(_load(path, mmap_mode="r")) == count for path in _paths(folder, split)
        )

    return io.DamageLog().read(is_written, False)


def _load(path: Path, mmap_mode: Literal["r"] | None = None) -> np.ndarray:
    try:
        with io.readable(path, io.ANY_SIZE, REMEDY):
            # Mapped first: a header that states more than the file holds allocates nothing.
            array = np.load(path, "r")
            return array if mmap_mode else np.array(array)
    except io.DamagedFileError:
        raise
    except (OSError, ValueError, EOFError):
        raise io.DamagedFileError(path, "is not an intact .npy file", REMEDY) from None


def _allocated(path: Path, batch: np.ndarray, count: int) -> IO[bytes]:
    """Open an .npy file for `count` rows like those of `batch`, with all of its space reserved.

    A disk that is too small is an error now, not after the last image. Raises WriteError.
    """
    header = {"descr": np.lib.format.dtype_to_descr(batch.dtype), "fortran_order": False,
              "shape": (count, *batch.shape[1:])}  # fmt: skip
    with io.explained(path):
        file = path.open("wb")
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()
        os.posix_fallocate(file.fileno(), file.tell(), max(1, count * batch[0].nbytes))
    return file


def _paths(folder: Path, split: str) -> list[Path]:
    return [io.below(folder, f"{split}.{part}.npy") for part in (*PROJECTIONS, "labels")]
