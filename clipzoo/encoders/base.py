"""Interface of encoders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from clipzoo.types import Features


class Encoder(nn.Module):
    """Base class of encoders, which map each view to Features; projections belong to the head."""

    image_width: int
    text_width: int
    tokenizer: Callable[[list[str]], Tensor]
    image_size: int

    @abstractmethod
    def image(self, image: Tensor) -> Features:
        """[b, 3, H, W] -> Features of width `image_width`. Datasets of images give uint8; the encoder normalises."""

    @abstractmethod
    def text(self, text: Tensor) -> Features:
        """[b, L] token ids -> Features of width `text_width`; L may be any length up to the context."""
