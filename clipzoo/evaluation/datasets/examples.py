"""Labelled images as data sets distribute them: files, or arrays of pixels."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF")
"""JPEG, PNG, WebP: bytes that the tar layout takes as they are."""


@dataclass(frozen=True)
class RawSet:
    """class_names: the set's own, in the order of its labels. splits: train, perhaps val, test."""

    class_names: list[str]
    splits: Mapping[str, Examples]


class Examples(Dataset, ABC):
    """Item -> (RGB picture, label)."""

    labels: list[int]

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """A file that holds exactly these pixels: the original where it is JPEG, PNG or WebP."""


class Files(Examples):
    """A path and a label each."""

    def __init__(self, paths: Sequence[Path | str], labels: Sequence[int]) -> None:
        self.paths = [Path(path) for path in paths]
        self.labels = [int(label) for label in labels]

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        with Image.open(self.paths[index]) as picture:
            return picture.convert("RGB"), self.labels[index]

    def encoded(self, index: int) -> bytes:
        content = self.paths[index].read_bytes()
        return content if content.startswith(SIGNATURES) else _png(self[index][0])


class Arrays(Examples):
    """pixels [n, h, w, 3] uint8."""

    def __init__(self, pixels: np.ndarray, labels: Sequence[int]) -> None:
        self.pixels = pixels
        self.labels = [int(label) for label in labels]

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        return Image.fromarray(self.pixels[index]), self.labels[index]

    def encoded(self, index: int) -> bytes:
        return _png(self[index][0])


def _png(picture: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()
