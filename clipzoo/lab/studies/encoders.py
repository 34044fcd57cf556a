"""Encoders of the studies, for views that are not pictures and captions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clipzoo.encoders.base import Encoder
from clipzoo.types import Features


class Views(Encoder):
    """One network per view, [b, ...] -> [b, width], or tokens [b, M, width], of which the first is the pooled one."""

    def __init__(self, image: nn.Module, text: nn.Module, image_width: int, text_width: int) -> None:
        super().__init__()
        self.image_width, self.text_width = image_width, text_width
        self.image_network, self.text_network = image, text

    def image(self, image: Tensor) -> Features:
        return self._features(self.image_network(image))

    def text(self, text: Tensor) -> Features:
        return self._features(self.text_network(text))

    def _features(self, outputs: Tensor) -> Features:
        return Features(outputs) if outputs.ndim == 2 else Features(outputs[:, 0], outputs)


def vectors(image_width: int, text_width: int) -> Views:
    """Identity on both views: the head's projections are then linear encoders."""
    return Views(nn.Identity(), nn.Identity(), image_width, text_width)


def lookup(items: int, points: int, width: int) -> Views:
    """Trainable token vectors for finitely many items; a view is an item number, [b] int64.

    items: number of items on each side. points: tokens per item. width: width of a token.
    """
    tables = (nn.Embedding(items, points * width) for _ in range(2))
    image, text = (nn.Sequential(table, nn.Unflatten(1, (points, width))) for table in tables)
    return Views(image, text, width, width)


def lenet(labels: int) -> Views:
    """LeNet-5 with ReLU on images [b, 1, 28, 28], and one-hot vectors of labels [b]. Both have `labels` features."""
    network = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, labels),
    )  # fmt: skip
    return Views(network, nn.Embedding.from_pretrained(torch.eye(labels)), labels, labels)


class TrajectoryNetwork(nn.Module):
    """A transformer over the positions of a tracer, [b, L, 2] -> [b, width], pooled at the last token."""

    def __init__(self, observations: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.lift = nn.Linear(2, width)
        self.positions = nn.Parameter(0.02 * torch.randn(observations, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        # Nested tensors speed up padded rows; these rows have no padding.
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, path: Tensor) -> Tensor:
        return self.blocks(self.lift(path) + self.positions)[:, -1]
