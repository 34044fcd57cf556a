"""A training of a few milliseconds: two layers on pairs of random vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clipzoo
from clipzoo.encoders.base import Encoder
from clipzoo.heads.vector import ClipHead
from clipzoo.model import Model
from clipzoo.types import Features


class PairEncoder(Encoder):
    """A layer for each view; the batch norm has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.image_layer = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.text_layer = nn.Linear(3, 6)

    def image(self, image: Tensor) -> Features:
        return Features(self.image_layer(image))

    def text(self, text: Tensor) -> Features:
        return Features(self.text_layer(text))


class UnboundedHead(ClipHead):
    """CLIP's head without the normalisation of texts, so that huge captions have huge scores."""

    def embed_text(self, text: Features) -> Tensor:
        return text.pooled @ self.text_projection


def pair_model() -> Model:
    torch.manual_seed(0)
    head = UnboundedHead(6, 6, 4, temperature=1.0, max_scale=100.0, learnable_temperature=False)
    return Model(PairEncoder(), head)


def pairs(count: int = 40) -> tuple[Tensor, Tensor]:
    """Images [n, 4] and texts [n, 3]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 4, generator=generator), torch.randn(count, 3, generator=generator)


def pair_dataset() -> clipzoo.InMemoryDataset:
    return clipzoo.InMemoryDataset(*pairs())
