"""Images of evaluation datasets: files, members of tar archives, or arrays of pixels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from clipzoo.data.faults import BadSampleError
from clipzoo.data.images.decoding import LARGEST_FILE, decode
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import Images
from clipzoo.io import ANY_SIZE, DamagedFileError, readable

EXTENSIONS = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp"}
"""First bytes of the encodings that the tar layout stores unchanged -> file extension."""


class ImageFile(NamedTuple):
    """An encoded image: a whole file, or a member of a tar archive. key: name of the sample in messages."""

    path: Path
    offset: int = 0
    size: int = -1
    key: str = ""


class EncodedImages(Images, Protocol):
    """RGB images that can also be written unchanged to a tar archive."""

    def encoded(self, index: int) -> bytes:
        """JPEG, PNG or WebP file with exactly these pixels; the original file where it is one of these."""


class ImageFiles:
    """Decode images from files on access. Safe to use in forked or spawned worker processes."""

    def __init__(self, files: Sequence[ImageFile]) -> None:
        # Arrays, not objects: worker processes share their memory.
        self._paths = sorted({file.path for file in files})
        numbers = {path: number for number, path in enumerate(self._paths)}
        self._keys = np.array([file.key for file in files])
        members = [(numbers[path], offset, size) for path, offset, size, _ in files]
        self._members = np.array(members, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: int) -> Image.Image:
        if not 0 <= index < len(self):
            raise IndexError(index)
        try:
            return decode(self._read(index))
        except (BadSampleError, OSError) as error:
            key = self._keys[index]
            raise ConfigError(f"{self.path(index)}:{key and ' '}{key} cannot be decoded: {error}") from error

    def path(self, index: int) -> Path:
        """File that holds the image."""
        return self._paths[self._members[index, 0]]

    def encoded(self, index: int) -> bytes:
        content = self._read(index)
        return content if content.startswith(tuple(EXTENSIONS)) else _png(self[index])

    def _read(self, index: int) -> bytes:
        _, offset, size = self._members[index].tolist()
        return read_range(self.path(index), offset, size)


class PixelArrays:
    """Images in memory: uint8 pixels [n, H, W, 3]."""

    def __init__(self, pixels: np.ndarray) -> None:
        self._pixels = pixels

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, index: int) -> Image.Image:
        return Image.fromarray(self._pixels[index])

    def encoded(self, index: int) -> bytes:
        return _png(self[index])


class LabelledSplit:
    """One split of a classification dataset: index -> (RGB image, label)."""

    def __init__(self, images: EncodedImages, labels: Sequence[int]) -> None:
        self.images = images
        self.labels = [int(label) for label in labels]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.images[index], self.labels[index]


def read_range(path: Path, offset: int, size: int) -> bytes:
    """Read `size` bytes from `offset`; -1 reads a whole file. At most LARGEST_FILE bytes. Raises DamagedFileError."""
    with readable(path, ANY_SIZE if size >= 0 else LARGEST_FILE) as file:
        if size > LARGEST_FILE:
            raise DamagedFileError(path, f"has a member of {size:,} bytes, more than {LARGEST_FILE:,}")
        file.seek(offset)
        return file.read(size)


def _png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
