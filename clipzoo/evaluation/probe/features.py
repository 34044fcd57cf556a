"""Frozen features of a dataset's splits, before and after the projection, in files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clipzoo.evaluation.datasets.dataset import LabelledImages
from clipzoo.evaluation.encoder import BatchEncoder
from clipzoo.io import write_whole
from clipzoo.model import Model
from clipzoo.types import Embedding, Features

PROJECTIONS = ("before", "after")


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
    key_file = folder / f"{split}.key"
    if world.run_on_first(lambda: key_file.exists() and key_file.read_text() == key):
        return

    def compute(features: Features, labels: Tensor) -> list[Embedding]:
        return [*(model.head.probe(features, projection).float() for projection in PROJECTIONS), labels]

    files: list[np.ndarray] = []
    done = 0
    for batch in encoder.images(model, images, resize, compute, f"features of {name}, {split}"):
        if not world.is_first:
            continue
        arrays = [part.cpu().numpy() for part in batch if isinstance(part, Tensor)]
        if not files:
            folder.mkdir(parents=True, exist_ok=True)
            key_file.unlink(missing_ok=True)
            files = [
                np.lib.format.open_memmap(path, "w+", array.dtype, (len(images), *array.shape[1:]))
                for path, array in zip(_paths(folder, split), arrays, strict=True)
            ]
        for file, array in zip(files, arrays, strict=True):
            file[done : done + len(array)] = array
        done += len(arrays[0])
    for file in files:
        file.flush()  # type: ignore[attr-defined]
    world.run_on_first(lambda: write_whole(key_file, key))


def read_features(folder: Path, split: str, projection: str) -> LabelledFeatures:
    """Read what `write_features` wrote. projection: "before" or "after"."""
    paths = dict(zip((*PROJECTIONS, "labels"), _paths(folder, split), strict=True))
    return LabelledFeatures(torch.from_numpy(np.load(paths[projection])), torch.from_numpy(np.load(paths["labels"])))


def _paths(folder: Path, split: str) -> list[Path]:
    return [folder / f"{split}.{part}.npy" for part in (*PROJECTIONS, "labels")]
