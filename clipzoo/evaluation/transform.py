"""A picture as evaluation shows it to a model."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor


class Transform:
    """PIL image -> uint8 [3, S, S]: the shorter side resized to `resize`, the central square of side S cut out."""

    def __init__(self, image_size: int, resize: int, interpolation: Literal["bicubic", "bilinear"]) -> None:
        from torchvision.transforms import InterpolationMode, v2  # a second to import

        mode = InterpolationMode(interpolation)
        self._steps = v2.Compose([v2.Resize(resize, mode), v2.CenterCrop(image_size), v2.PILToTensor()])

    def __call__(self, picture: Any) -> Tensor:
        return self._steps(picture.convert("RGB"))
