"""Training transform: encoded image to augmented crop."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.data.images.crops import Box, random_crop
from clipzoo.data.images.decoding import EncodedImage, read_header
from clipzoo.data.images.rand_augment import rand_augment

_REDUCTIONS = (8, 4, 2)


@dataclass(frozen=True)
class EncodedCrop:
    """A crop of an image of which only the header has been read."""

    encoded: bytes
    image: EncodedImage
    box: Box

    def digest(self) -> int:
        """Return 64 bits, never 0, that stand for the encoded image and the place of the crop."""
        hashed = hashlib.blake2b(self.encoded, digest_size=8, key=repr(self.box).encode()).digest()
        return int.from_bytes(hashed, "little", signed=True) or 1


@dataclass(frozen=True)
class ImageTransform:
    """Decode, crop, resize, flip and augment an image: bytes -> uint8 [3, S, S]. Arguments as in ShardDataset."""

    image_size: int
    crop_scale: tuple[float, float]
    interpolation: Literal["bicubic", "bilinear"]
    flip: float
    rand_augment: tuple[int, int] | None
    decode: Literal["exact", "fast"]
    max_pixels: int

    def __call__(self, encoded: bytes, random: np.random.Generator) -> tuple[Tensor, list[str]]:
        """Return the crop and the kinds of conversion that the image needed. Raises BadSampleError."""
        crop = self.choose(encoded, random)
        return self.decode_crop(crop, random), crop.image.conversions

    def choose(self, encoded: bytes, random: np.random.Generator) -> EncodedCrop:
        """Read the header and choose the crop. Raises BadSampleError."""
        image = read_header(encoded, self.max_pixels)
        return EncodedCrop(encoded, image, random_crop(image.height, image.width, self.crop_scale, random))

    def decode_crop(self, crop: EncodedCrop, random: np.random.Generator) -> Tensor:
        """Return the pixels of a crop, with the generator that has chosen it. Raises BadSampleError."""
        box = crop.box
        reduction = self.reduction(box) if crop.image.scalable else 1
        pixels = crop.image.decode(reduction)
        # The crop starts on the grid of the reduced pixels; off the grid it would differ several times more from the
        # exactly decoded one.
        top, left, height, width = (edge // reduction for edge in (box.top, box.left, box.height, box.width))
        resized = functional.interpolate(
            torch.from_numpy(pixels[top : top + height, left : left + width]).permute(2, 0, 1)[None],
            (self.image_size, self.image_size),
            mode=self.interpolation,
            antialias=True,
            align_corners=False,
        )[0]
        if random.random() < self.flip:
            resized = resized.flip(-1)
        if self.rand_augment is not None:
            resized = rand_augment(resized, self.rand_augment[0], self.rand_augment[1], random)
        return resized

    def reduction(self, box: Box) -> int:
        """Return the factor by which the decoder may scale down so that the crop keeps at least S pixels a side."""
        if self.decode == "exact":
            return 1
        shortest = min(box.height, box.width)
        return next((factor for factor in _REDUCTIONS if shortest >= factor * self.image_size), 1)
