"""Model: encoder and head. Training updates it, evaluation measures it, `clipzoo.load` returns it."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from clipzoo.encoders.base import Encoder, encode_by_length
from clipzoo.heads.base import Head
from clipzoo.heads.pairs import Scope
from clipzoo.types import Batch, Embedding, Features, Similarity, World


class Model(nn.Module):
    """An encoder and a similarity head."""

    def __init__(self, encoder: Encoder, head: Head) -> None:
        super().__init__()
        self.encoder: Encoder = encoder
        self.head: Head = head
        self.frozen: tuple[nn.Module, ...] = ()
        """Modules that stay in evaluation mode: no dropout, and batch norm uses its running statistics."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for module in self.frozen:
            module.eval()
        return self

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the head's parameters, or of the encoder's if the head has none."""
        return next(iter((*self.head.parameters(), *self.encoder.parameters()))).dtype

    @property
    def pair_scale(self) -> float:
        """Factor of the scores in the logits of pairs: the scale of SigLIP's objective if it is known, or 1."""
        return 1.0

    @property
    def needs_padding(self) -> bool:
        """True if scores depend on the padding of captions; padding is then not trimmed."""
        return self.head.needs_padding or self.encoder.needs_padding

    def forward(self, batch: Batch, world: World = World(), tile: int | None = None) -> Similarity:
        """Similarities of the local batch to the global batch of all ranks. tile: see `Scope`."""
        text = encode_by_length(self.text_read_by_head, batch.texts, batch.text_lengths, self.head.needs_tokens)
        return self.compare(self.image_read_by_head(batch.images), text, Scope(world, tile, batch.views))

    def compare(self, image: Features, text: Features, scope: Scope = Scope()) -> Similarity:
        """Features -> Similarity, outside autocast, in the head's precision."""
        image, text = image.map(self._in_head_precision), text.map(self._in_head_precision)
        with torch.autocast(self.device.type, enabled=False):
            return self.head(image, text, scope)

    def image_features(self, image: Tensor) -> Features:
        """[b, 3, H, W] uint8 -> Features in the head's precision, only pooled ones for a head that reads no tokens."""
        return self.image_read_by_head(image.to(self.device)).map(self._in_head_precision)

    def image_read_by_head(self, image: Tensor) -> Features:
        """[b, 3, H, W] uint8 -> Features, only pooled ones for a head that reads no tokens."""
        return self.encoder.image(image) if self.head.needs_tokens else Features(self.encoder.pooled_image(image))

    def text_read_by_head(self, text: Tensor) -> Features:
        """[b, L] int64 -> Features, only pooled ones for a head that reads no tokens."""
        return self.encoder.text(text) if self.head.needs_tokens else Features(self.encoder.pooled_text(text))

    def text_features(self, text: Tensor, lengths: Tensor | None = None) -> Features:
        """[b, L] int64 -> Features in the head's precision. lengths: see `encode_by_length`."""
        features = encode_by_length(self.text_read_by_head, text.to(self.device), lengths, self.head.needs_tokens)
        return features.map(self._in_head_precision)

    def encode_image(self, image: Tensor) -> Embedding:
        """[b, 3, H, W] uint8 -> embeddings, one row per image: a tensor [b, d] or a PointSet, depending on the head."""
        features = self.image_features(image)
        with torch.autocast(self.device.type, enabled=False):
            return self.head.embed_image(features)

    def encode_text(self, text: Tensor) -> Embedding:
        """[b, L] int64 -> embeddings, one row per caption."""
        features = self.text_features(text)
        with torch.autocast(self.device.type, enabled=False):
            return self.head.embed_text(features)

    def similarity(self, image: Embedding, text: Embedding) -> Tensor:
        """n image and k text embeddings -> [n, k] logits."""
        with torch.autocast(self.device.type, enabled=False):
            return self.head.score(image, text)

    def _in_head_precision(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype)
