"""RandAugment with one generator per sample and epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import numpy as np
from torch import Tensor

_LEVELS = 10
_MID_GREY = [128.0, 128.0, 128.0]


def rand_augment(image: Tensor, operations: int, magnitude: int, random: np.random.Generator) -> Tensor:
    """Apply up to `operations` random operations to an image, uint8 [3, S, S] -> uint8 [3, S, S].

    Each operation is drawn from ten with replacement, applied with probability 1/2 at `magnitude` of 10, and has a
    random sign.

    Source: RandAugment as in ALBEF and the vision-language codes that follow it.
    """
    kinds = random.integers(len(_OPERATIONS), size=operations)
    applied = random.random(operations) < 0.5
    signs = np.where(random.random(operations) < 0.5, 1.0, -1.0)
    for kind, chosen, sign in zip(kinds, applied, signs, strict=True):
        if chosen:
            image = _OPERATIONS[kind](image, magnitude / _LEVELS, sign)
    return image


def _functional() -> ModuleType:
    from torchvision.transforms.v2 import functional

    return functional


def _affine(
    image: Tensor, *, degrees: float = 0, shift: tuple[float, float] = (0, 0), shear: tuple[float, float] = (0, 0)
) -> Tensor:
    from torchvision.transforms.v2.functional import InterpolationMode

    return _functional().affine(
        image,
        angle=degrees,
        translate=list(shift),
        scale=1.0,
        shear=[math.degrees(math.atan(slope)) for slope in shear],
        interpolation=InterpolationMode.BILINEAR,
        fill=_MID_GREY,
    )


_OPERATIONS: tuple[Callable[[Tensor, float, float], Tensor], ...] = (
    lambda image, level, sign: image,
    lambda image, level, sign: _functional().autocontrast(image),
    lambda image, level, sign: _functional().equalize(image),
    lambda image, level, sign: _functional().adjust_brightness(image, 0.1 + 1.8 * level),
    lambda image, level, sign: _functional().adjust_sharpness(image, 0.1 + 1.8 * level),
    lambda image, level, sign: _affine(image, shear=(sign * 0.3 * level, 0)),
    lambda image, level, sign: _affine(image, shear=(0, sign * 0.3 * level)),
    lambda image, level, sign: _affine(image, shift=(sign * 10 * level, 0)),
    lambda image, level, sign: _affine(image, shift=(0, sign * 10 * level)),
    lambda image, level, sign: _affine(image, degrees=sign * 30 * level),
)
