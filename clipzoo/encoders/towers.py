"""Encoders of two separate towers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from clipzoo.encoders.base import Encoder, ImageTower, TextTower, Tower, no_tokenizer
from clipzoo.errors import ConfigError
from clipzoo.types import Count, Features, Probability, Scale, Side, checked


@checked
class TwoTowers(Encoder):
    """An image tower and a text tower, modules that map their input to Features.

    image_tower, text_tower: modules with an attribute `width`.
    image_width, text_width: widths of the features, for the head; must equal the towers' widths.
    image_size: side of the square images. context_length: maximum number of tokens L of a caption.
    tokenizer: captions -> ids. mean, std: normalisation of [0, 1] images, one number per channel.
    """

    _scale: Tensor
    _shift: Tensor

    relations = {
        "image_width == image_tower.width": "image_width must be the width of the tower",
        "text_width == text_tower.width": "text_width must be the width of the tower",
        "image_size == image_tower.image_size": "both must be the same",
        "tokenizer.context_length == context_length": "both must be the same",
        "context_length <= text_tower.context_length": "the tower must have a position for every token of a caption",
        "tokenizer.vocabulary <= text_tower.vocabulary": "the tower must have an embedding for every token",
        "tokenizer.end_token == text_tower.end_token": "both must be the same",
    }

    def __init__(
        self,
        image_tower: nn.Module,
        text_tower: nn.Module,
        image_width: Count,
        text_width: Count,
        image_size: Side,
        context_length: Count,
        tokenizer: Callable[[list[str]], Tensor],
        mean: tuple[Probability, Probability, Probability],
        std: tuple[Scale, Scale, Scale],
    ) -> None:
        nn.Module.__init__(self)
        self.image_tower, self.text_tower = image_tower, text_tower
        self.image_width, self.text_width, self.image_size = image_width, text_width, image_size
        self.context_length, self.tokenizer = context_length, tokenizer
        self._set_normalisation(mean, std)

    def _set_normalisation(self, mean: Sequence[float], std: Sequence[float]) -> None:
        # Scaled for uint8: one fused multiply-add normalises an image.
        self.register_buffer("_scale", 1 / (255 * torch.tensor(std).view(3, 1, 1)), persistent=False)
        self.register_buffer("_shift", (-torch.tensor(mean) / torch.tensor(std)).view(3, 1, 1), persistent=False)

    def image(self, image: Tensor) -> Features:
        return self.image_tower(self.normalised(image))

    def pooled_image(self, image: Tensor) -> Tensor:
        tower = self.image_tower
        return tower.pooled(self.normalised(image)) if isinstance(tower, Tower) else super().pooled_image(image)

    def text(self, text: Tensor) -> Features:
        return self.text_tower(text)

    def pooled_text(self, text: Tensor) -> Tensor:
        tower = self.text_tower
        return tower.pooled(text) if isinstance(tower, Tower) else super().pooled_text(text)

    def normalised(self, image: Tensor) -> Tensor:
        """[b, 3, H, W] uint8 -> the input of the image tower, in the precision of the encoder."""
        if image.dtype != torch.uint8:
            raise ConfigError(
                f"images are {image.dtype}, but the encoder normalises uint8 pixels, as model.transform returns them: "
                "pass (255 * image).round().to(torch.uint8) for floats in [0, 1]. Normalised images go to "
                "encoder.image_tower"
            )
        return torch.addcmul(self._shift, image.to(self._scale.dtype), self._scale)


@checked
class Towers(TwoTowers):
    """Any image tower and any text tower, with the sizes, the normalisation and the tokenizer that they are made for.

    image, text: the towers. name: name of the model of both towers, where their configurations refer to it.
    image_width, text_width: widths of the features; None for the towers' own, as for all other arguments.
    embed_width: width of the model's embeddings; only the default of head.embed_width.
    """

    relations = {"tokenizer.context_length == context_length": "both must be the same"}

    def __init__(
        self,
        image: ImageTower,
        text: TextTower,
        name: str | None = None,
        image_width: Count | None = None,
        text_width: Count | None = None,
        image_size: Side | None = None,
        context_length: Count | None = None,
        tokenizer: Callable[[list[str]], Tensor] | None = None,
        mean: tuple[Probability, Probability, Probability] | None = None,
        std: tuple[Scale, Scale, Scale] | None = None,
        interpolation: Literal["bicubic", "bilinear"] | None = None,
        resize_mode: Literal["shortest", "squash", "longest"] | None = None,
        embed_width: Count | None = None,
    ) -> None:
        nn.Module.__init__(self)
        sizes = {
            "image_width": (image_width, image.width), "text_width": (text_width, text.width),
            "image_size": (image_size, image.input_size), "context_length": (context_length, text.context_length),
        }  # fmt: skip
        for key, (chosen, value) in sizes.items():
            if chosen not in (None, value):
                raise ConfigError(f"encoder.{key}={chosen}, but that of the model is {value}: leave encoder.{key} out")
            setattr(self, key, value)
        self.image_tower, self.text_tower = image, text
        self.needs_padding = text.needs_padding
        self._given_tokenizer, self.tokenizer = tokenizer, tokenizer or no_tokenizer
        self.mean, self.std = tuple(mean or image.mean), tuple(std or image.std)
        self.interpolation, self.resize_mode = interpolation or image.interpolation, resize_mode or image.resize_mode
        self._set_normalisation(self.mean, self.std)

    def facts(self) -> Mapping[str, Any]:
        image, text = cast(ImageTower, self.image_tower), cast(TextTower, self.text_tower)
        return {
            "image_width": self.image_width, "text_width": self.text_width, "image_size": self.image_size,
            "context_length": self.context_length, "mean": list(self.mean), "std": list(self.std),
            "interpolation": self.interpolation, "resize_mode": self.resize_mode,
            "embed_width": image.embed_width or text.embed_width,
            "tokenizer": dict(text.tokenizer), "end_token": text.find_end_token(self._given_tokenizer),
        }  # fmt: skip

    def without_tokens(self) -> list[str]:
        towers: list[Tower] = [self.image_tower, self.text_tower]  # type: ignore[list-item]
        return [tower.description or type(tower).__name__ for tower in towers if not tower.gives_tokens()]
