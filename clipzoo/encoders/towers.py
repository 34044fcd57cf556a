"""An encoder of two separate towers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clipzoo.encoders.base import Encoder
from clipzoo.errors import ConfigError
from clipzoo.types import Features


class TwoTowers(Encoder):
    """An image tower and a text tower, each a module from its input to Features.

    image_tower, text_tower: modules with an attribute `width`.
    image_width, text_width: widths of the features, for the head; must equal the towers' widths.
    image_size: side of the square images. context_length: maximum number of tokens L of a caption.
    tokenizer: captions -> ids. mean, std: normalisation of [0, 1] images, one number per channel.
    """

    _scale: Tensor
    _shift: Tensor

    def __init__(
        self,
        image_tower: nn.Module,
        text_tower: nn.Module,
        image_width: int,
        text_width: int,
        image_size: int,
        context_length: int,
        tokenizer: Callable[[list[str]], Tensor],
        mean: list[float],
        std: list[float],
    ) -> None:
        super().__init__()
        for key, stated, tower in (
            ("image_width", image_width, image_tower),
            ("text_width", text_width, text_tower),
        ):
            if stated != tower.width:
                raise ConfigError(f"encoder.{key} is {stated}, but the tower's width is {tower.width}: set it to that")
        self.image_tower = image_tower
        self.text_tower = text_tower
        self.image_width = image_width
        self.text_width = text_width
        self.image_size = image_size
        self.context_length = context_length
        self.tokenizer = tokenizer
        # Scaled for uint8: one fused multiply-add normalises an image.
        self.register_buffer("_scale", 1 / (255 * torch.tensor(std).view(3, 1, 1)), persistent=False)
        self.register_buffer("_shift", (-torch.tensor(mean) / torch.tensor(std)).view(3, 1, 1), persistent=False)

    def image(self, image: Tensor) -> Features:
        if image.dtype == torch.uint8:
            image = torch.addcmul(self._shift, image.to(self._scale.dtype), self._scale)
        return self.image_tower(image)

    def text(self, text: Tensor) -> Features:
        return self.text_tower(text)
