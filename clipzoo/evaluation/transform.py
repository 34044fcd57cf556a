"""Image preprocessing of evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from PIL.Image import Image, open as open_image
from torch import Tensor

from clipzoo.data.images.decoding import LARGEST_FILE, to_rgb
from clipzoo.errors import ConfigError, one_message
from clipzoo.io import readable

Interpolation = Literal["bicubic", "bilinear"]
ResizeMode = Literal["shortest", "squash", "longest"]


class Transform:
    """PIL image of any mode, or the path of one -> uint8 [3, S, S]: convert to RGB as training does, resize to `size`,
    then crop the central square of side S. The encoder normalises.

    resize_mode: as in open_clip. "shortest" resizes the shorter side to `size`; "squash" both sides, which changes
    the aspect ratio; "longest" the longer side, with black borders beside the image.
    """

    def __init__(
        self, image_size: int, size: int, interpolation: Interpolation, resize_mode: ResizeMode = "shortest"
    ) -> None:
        from torchvision.transforms import InterpolationMode, v2  # takes a second to import

        self.interpolation, self.resize_mode = interpolation, resize_mode
        mode = InterpolationMode(interpolation)
        if resize_mode == "longest":
            from open_clip.transform import CenterCropOrPad, ResizeKeepRatio

            steps: list[Any] = [ResizeKeepRatio(size, longest=1, interpolation=mode), CenterCropOrPad(image_size)]
        else:
            steps = [v2.Resize(size if resize_mode == "shortest" else (size, size), mode), v2.CenterCrop(image_size)]
        self._steps = v2.Compose([*steps, v2.PILToTensor()])

    def __call__(self, image: Image | str | Path) -> Tensor:
        if isinstance(image, str | Path):
            with (
                readable(Path(image), LARGEST_FILE) as file,
                one_message(f"{image} cannot be decoded as an image"),
                open_image(file) as opened,
            ):
                return self(opened)
        if not isinstance(image, Image):
            raise ConfigError(f"transform takes a PIL image or the path of one, not {type(image).__name__}")
        return self._steps(to_rgb(image))
