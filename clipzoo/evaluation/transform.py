"""Image preprocessing of evaluation."""

from __future__ import annotations

from typing import Literal

from PIL.Image import Image
from torch import Tensor

from clipzoo.data.images.decoding import to_rgb

Interpolation = Literal["bicubic", "bilinear"]
ResizeMode = Literal["shortest", "squash"]


class Transform:
    """PIL image of any mode -> uint8 [3, S, S]: convert to RGB as training does, resize the shorter side to `resize`,
    then crop the central square of side S. The encoder normalises.

    resize_mode: "squash" resizes both sides instead, as Google prepares images for SigLIP.
    """

    def __init__(
        self, image_size: int, resize: int, interpolation: Interpolation, resize_mode: ResizeMode = "shortest"
    ) -> None:
        from torchvision.transforms import InterpolationMode, v2  # takes a second to import

        self.interpolation, self.resize_mode = interpolation, resize_mode
        mode = InterpolationMode(interpolation)
        sides = [resize, resize] if resize_mode == "squash" else resize
        self._steps = v2.Compose([v2.Resize(sides, mode), v2.CenterCrop(image_size), v2.PILToTensor()])

    def __call__(self, image: Image) -> Tensor:
        return self._steps(to_rgb(image))
