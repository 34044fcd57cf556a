"""Random resized crop."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_ASPECT = (math.log(3 / 4), math.log(4 / 3))
_ATTEMPTS = 10


@dataclass(frozen=True)
class Box:
    """A crop in pixels."""

    top: int
    left: int
    height: int
    width: int


def random_crop(height: int, width: int, scale: tuple[float, float], random: np.random.Generator) -> Box:
    """Return the box of a random resized crop: `scale` of the area, aspect ratio 3/4 to 4/3.

    If none of ten attempts fits, the box is the largest central crop within those aspect ratios. The number of random
    values drawn does not depend on the size of the image.

    Source: Szegedy et al. 2015, as implemented in torchvision.
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
