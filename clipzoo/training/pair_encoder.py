"""The encoder as one module with one forward pass, which ranks can share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from clipzoo.distributed.world import step_part
from clipzoo.encoders.base import Tower, encode_by_length, longest_list
from clipzoo.model import Model
from clipzoo.types import Batch, Features

View = Literal["image", "text"]
VIEWS: tuple[View, View] = ("image", "text")
FeatureTensors = tuple[Tensor, Tensor | None, Tensor | None]
"""The fields of Features: DDP and FSDP look for tensors in tuples and lists."""


class PairEncoder(nn.Module):
    """The encoder as one module with one forward, batch -> features of the views.

    Returns only the features that the head reads, and always the pooled ones, which cost less without the tokens.

    autocast: precision of the encoders; None for that of their parameters.
    compile: run the encoders through torch.compile; evaluation runs them without it.
    """

    def __init__(self, model: Model, autocast: torch.dtype | None, compile: bool) -> None:
        super().__init__()
        self.encoder = model.encoder
        self._autocast, self._needs_tokens = autocast, model.head.needs_tokens
        image, text = model.image_read_by_head, model.text_read_by_head
        self._image, self._text = (torch.compile(image), torch.compile(text)) if compile else (image, text)

    def forward(self, batch: Batch, views: Sequence[View] = VIEWS) -> list[FeatureTensors]:
        with torch.autocast(batch.image.device.type, self._autocast, enabled=self._autocast is not None):
            return [self._read_by_head(self._encode(batch, view)) for view in views]

    def blocks(self) -> list[nn.Module]:
        """Return the blocks of both towers, or of an encoder without towers: its longest list of modules."""
        names = [name for name in ("image_tower", "text_tower") if hasattr(self.encoder, name)]
        towers = [getattr(self.encoder, name) for name in names] or [self.encoder]
        blocks = [tower.layers() if isinstance(tower, Tower) else longest_list(tower) for tower in towers]
        return list(dict.fromkeys(block for tower_blocks in blocks for block in tower_blocks))

    def _encode(self, batch: Batch, view: View) -> Features:
        with step_part(f"{view} tower"):
            if view == "image":
                return self._image(batch.image)
            return encode_by_length(self._text, batch.text, batch.text_length, self._needs_tokens)

    def _read_by_head(self, features: Features) -> FeatureTensors:
        return (
            (features.pooled, features.tokens, features.mask) if self._needs_tokens else (features.pooled, None, None)
        )
