"""Encoders of the studies, for views that are not pictures and captions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.encoders.base import Encoder
from clipzoo.types import Features


class Vectors(Encoder):
    """Identity on both views: the head's projections are then linear encoders."""

    def __init__(self, image_width: int, text_width: int) -> None:
        super().__init__()
        self.image_width, self.text_width = image_width, text_width

    def image(self, image: Tensor) -> Features:
        return Features(image)

    def text(self, text: Tensor) -> Features:
        return Features(text)


class Lookup(Encoder):
    """Free token vectors for finitely many items; a view is an item number, [b] int64.

    images, texts: number of items. points: tokens per item. width: width of a token.
    """

    def __init__(self, images: int, texts: int, points: int, width: int) -> None:
        super().__init__()
        self.image_width = self.text_width = width
        self._shape = points, width
        self.image_table = nn.Embedding(images, points * width)
        self.text_table = nn.Embedding(texts, points * width)

    def image(self, image: Tensor) -> Features:
        return self._features(self.image_table(image))

    def text(self, text: Tensor) -> Features:
        return self._features(self.text_table(text))

    def _features(self, rows: Tensor) -> Features:
        tokens = rows.view(len(rows), *self._shape)
        return Features(tokens[:, 0], tokens)


class Perceptrons(Encoder):
    """One ReLU network per view.

    inputs: width of a view. hidden: widths of the hidden layers. width: width of the features.
    """

    def __init__(self, inputs: int, hidden: list[int], width: int) -> None:
        super().__init__()
        self.image_width = self.text_width = width
        self.image_network = _perceptron([inputs, *hidden, width])
        self.text_network = _perceptron([inputs, *hidden, width])

    def image(self, image: Tensor) -> Features:
        return Features(self.image_network(image))

    def text(self, text: Tensor) -> Features:
        return Features(self.text_network(text))


def _perceptron(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers += [nn.ReLU()] if layers else []
        layers.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*layers)


class LeNet(Encoder):
    """LeNet-5 with ReLU on images [b, 1, 28, 28], and one-hot vectors of labels [b]. Both have `labels` features."""

    def __init__(self, labels: int) -> None:
        super().__init__()
        self.image_width = self.text_width = labels
        self.network = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, labels),
        )  # fmt: skip

    def image(self, image: Tensor) -> Features:
        return Features(self.network(image))

    def text(self, text: Tensor) -> Features:
        return Features(functional.one_hot(text, self.text_width).float())


class Trajectories(Encoder):
    """A transformer over the positions of a tracer, [b, L, 2], pooled at the last token; identity on the other view.

    coefficients: width of the other view. observations: L. width, layers, heads: size of the transformer.
    """

    def __init__(self, coefficients: int, observations: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.image_width, self.text_width = coefficients, width
        self.lift = nn.Linear(2, width)
        self.positions = nn.Parameter(0.02 * torch.randn(observations, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        # Nested tensors speed up padded rows; these rows have no padding.
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def image(self, image: Tensor) -> Features:
        return Features(image)

    def text(self, text: Tensor) -> Features:
        return Features(self.blocks(self.lift(text) + self.positions)[:, -1])
