"""Encoded images to augmented crops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.data.images.augmentation import Box, rand_augment, random_crop
from clipzoo.data.images.decoding import read_header

_REDUCTIONS = (8, 4, 2)


@dataclass(frozen=True)
class ImageReader:
    """Bytes -> [3, S, S] uint8: decoded, cropped, resized, flipped, augmented. Arguments as in ShardData."""

    image_size: int
    crop_scale: list[float]
    interpolation: Literal["bicubic", "bilinear"]
    flip: float
    rand_augment: list[int] | None
    decode: Literal["exact", "fast"]
    max_pixels: int

    def __call__(self, encoded: bytes, random: np.random.Generator) -> tuple[Tensor, list[str]]:
        """The crop, and what made the image other than plain (kinds for the counters). Raises BadSampleError."""
        image = read_header(encoded, self.max_pixels)
        box = random_crop(image.height, image.width, self.crop_scale, random)
        reduction = self.reduction(box) if image.scalable else 1
        pixels = image.decode(reduction)
        # A crop off the grid of the reduced pixels made most of the difference from a full decoding.
        top, left, height, width = (edge // reduction for edge in (box.top, box.left, box.height, box.width))
        crop = functional.interpolate(
            torch.from_numpy(pixels[top : top + height, left : left + width]).permute(2, 0, 1)[None],
            (self.image_size, self.image_size),
            mode=self.interpolation,
            antialias=True,
            align_corners=False,
        )[0]
        if random.random() < self.flip:
            crop = crop.flip(-1)
        if self.rand_augment is not None:
            crop = rand_augment(crop, self.rand_augment[0], self.rand_augment[1], random)
        return crop, image.notes

    def reduction(self, box: Box) -> int:
        """By how much a decoder may scale down, so that the crop keeps S pixels a side."""
        if self.decode == "exact":
            return 1
        return next((each for each in _REDUCTIONS if min(box.height, box.width) >= each * self.image_size), 1)
