"""Random crops, flips and RandAugment, all from one generator per sample and visit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

_ASPECT = (math.log(3 / 4), math.log(4 / 3))
_ATTEMPTS = 10
# RandAugment's levels run to 10; fill is mid-grey.
_LEVELS = 10
_FILL = [128.0, 128.0, 128.0]


@dataclass(frozen=True)
class Box:
    """A crop in pixels."""

    top: int
    left: int
    height: int
    width: int


def random_crop(height: int, width: int, scale: list[float], random: np.random.Generator) -> Box:
    """The box of a random resized crop (Szegedy et al. 2015, as torchvision has it): `scale` of the area, aspect 3/4 to
    4/3; the largest central crop within those aspects when ten attempts do not fit.

    Always takes the same count of random numbers, so that what follows does not depend on the image's size.
    """
    areas = random.uniform(scale[0], scale[1], _ATTEMPTS) * height * width
    ratios = np.exp(random.uniform(*_ASPECT, _ATTEMPTS))
    place = random.random(2)
    for area, ratio in zip(areas, ratios, strict=True):
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(place[0] * (height - crop_height + 1))
            left = int(place[1] * (width - crop_width + 1))
            return Box(top, left, crop_height, crop_width)
    crop_width = min(width, max(1, round(height * math.exp(_ASPECT[1]))))
    crop_height = min(height, max(1, round(width / math.exp(_ASPECT[0]))))
    return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)


def rand_augment(image: Tensor, operations: int, magnitude: int, random: np.random.Generator) -> Tensor:
    """[3, S, S] uint8 -> the same. RandAugment as vision-language codes since ALBEF use it: each of `operations` draws
    from ten kinds (with replacement), applied with probability 1/2 at `magnitude` of 10, to either side."""
    kinds = random.integers(len(_OPERATIONS), size=operations)
    applied = random.random(operations) < 0.5
    signs = np.where(random.random(operations) < 0.5, 1.0, -1.0)
    for kind, chosen, sign in zip(kinds, applied, signs, strict=True):
        if chosen:
            image = _OPERATIONS[kind](image, magnitude / _LEVELS, sign)
    return image


def _identity(image: Tensor, level: float, sign: float) -> Tensor:
    return image


def _autocontrast(image: Tensor, level: float, sign: float) -> Tensor:
    from torchvision.transforms.v2 import functional

    return functional.autocontrast(image)


def _equalize(image: Tensor, level: float, sign: float) -> Tensor:
    from torchvision.transforms.v2 import functional

    return functional.equalize(image)


def _brightness(image: Tensor, level: float, sign: float) -> Tensor:
    from torchvision.transforms.v2 import functional

    return functional.adjust_brightness(image, 0.1 + 1.8 * level)


def _sharpness(image: Tensor, level: float, sign: float) -> Tensor:
    from torchvision.transforms.v2 import functional

    return functional.adjust_sharpness(image, 0.1 + 1.8 * level)


def _affine(
    image: Tensor, *, degrees: float = 0, shift: tuple[float, float] = (0, 0), shear: tuple[float, float] = (0, 0)
) -> Tensor:
    from torchvision.transforms.v2 import functional
    from torchvision.transforms.v2.functional import InterpolationMode

    return functional.affine(
        image,
        angle=degrees,
        translate=list(shift),
        scale=1.0,
        shear=[math.degrees(math.atan(each)) for each in shear],
        interpolation=InterpolationMode.BILINEAR,
        fill=_FILL,
    )


_OPERATIONS: tuple[Callable[[Tensor, float, float], Tensor], ...] = (
    _identity,
    _autocontrast,
    _equalize,
    _brightness,
    _sharpness,
    lambda image, level, sign: _affine(image, shear=(sign * 0.3 * level, 0)),
    lambda image, level, sign: _affine(image, shear=(0, sign * 0.3 * level)),
    lambda image, level, sign: _affine(image, shift=(sign * 10 * level, 0)),
    lambda image, level, sign: _affine(image, shift=(0, sign * 10 * level)),
    lambda image, level, sign: _affine(image, degrees=sign * 30 * level),
)
