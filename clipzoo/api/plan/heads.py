"""Cost of heads: FLOPs, embeddings that ranks exchange, memory of scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FLOAT = 4
TILED_FROM = 2**25
"""Entries of the local similarity matrix from which `trainer.tile=auto` uses tiles."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a step: local batch size, ranks, widths of towers and embeddings, points per image and per caption.

    features: random features of WPSE. caption_points: mean number of tokens of a caption without padding.
    """

    local: int
    ranks: int
    image_width: int = 768
    text_width: int = 512
    width: int = 512
    features: int = 1024
    image_points: int = 197
    text_points: int = 77
    caption_points: int = 12

    @property
    def batch(self) -> int:
        return self.local * self.ranks

    @property
    def tiled(self) -> bool:
        return self.local * self.batch >= TILED_FROM


@dataclass(frozen=True)
class Cost:
    """Cost of a step for one rank, forward and backward.

    flops: floating-point operations. gathered: numbers of a sample that all ranks receive, and whose gradient returns.
    exchanged: bytes that are sent to other ranks and not gathered. scores: bytes of scores held at once. points: bytes
    of projected points and their gradients.
    """

    flops: float
    gathered: float
    exchanged: float
    scores: float
    points: float = 0.0

    def received(self, shape: Shape) -> float:
        """Bytes that a rank receives through the gathers and their gradients, and the exchanges."""
        return 2 * (shape.ranks - 1) * shape.local * self.gathered * FLOAT + self.exchanged


def clip(shape: Shape) -> Cost:
    """Cost of CLIP, inner product and distance: one product [b, d] [d, N]."""
    project = 6 * shape.local * (shape.image_width + shape.text_width) * shape.width
    return _vectors(shape, shape.width, project)


def wpse(shape: Shape) -> Cost:
    """Cost of WPSE: token projections, random features (forward, recomputed, gradient), then CLIP at width d + D."""
    tokens = shape.image_points * shape.image_width + shape.text_points * shape.text_width
    points = shape.image_points + shape.text_points
    project = 6 * shape.local * tokens * shape.width
    waves = 6 * shape.local * points * shape.width * shape.features
    held = 2 * shape.local * points * shape.width * FLOAT
    return _vectors(shape, shape.width + shape.features, project + waves, held)


def kme(shape: Shape, text_points: int) -> Cost:
    """Cost of KME-CLIP: four products of all image points with all text points of the global batch.

    The products are the forward pass, its recomputation and two gradients. A CPU recomputes one tile less. Ranks
    gather captions with their padding; the points of text_points alone are multiplied.
    """
    tokens = shape.image_points * shape.image_width + text_points * shape.text_width
    project = 6 * shape.local * tokens * shape.width
    meet = 4 * 2 * shape.local * shape.image_points * shape.batch * text_points * shape.width
    gathered = text_points * (shape.width + 1)
    matrix = shape.local * shape.batch * FLOAT
    images = 2 * shape.local * shape.image_points * shape.width * FLOAT
    return Cost(project + meet, gathered, _transposed(shape), 3 * matrix, images + 2 * shape.batch * gathered * FLOAT)


def cloob(shape: Shape) -> Cost:
    """Cost of CLOOB: four retrievals from N patterns by memory-efficient attention, then two one-way products."""
    project = 6 * shape.local * (shape.image_width + shape.text_width) * shape.width
    retrieve = 4 * (4 + 10) * shape.local * shape.batch * shape.width
    way = _vectors(shape, shape.width, 0.0)
    exchanged = way.exchanged if shape.tiled else 0.0
    points = 4 * shape.batch * shape.width * FLOAT
    return Cost(project + retrieve + 2 * way.flops, 4 * shape.width, exchanged, way.scores, points)


def _vectors(shape: Shape, width: int, flops: float, points: float = 0.0) -> Cost:
    """Cost of scores that are inner products: text vectors and their gradients, a matrix or tiles computed twice.

    A matrix is transposed for the captions, and its gradient back; of tiles only sums travel.
    """
    product = 2 * shape.local * shape.batch * width
    points += 2 * shape.batch * width * FLOAT
    if shape.tiled:
        sums = 4 * (shape.ranks - 1) * shape.local * 2
        return Cost(flops + 4 * product, width, sums, 1024 * 1024 * FLOAT, points)
    return Cost(flops + 3 * product, width, _transposed(shape), 3 * shape.local * shape.batch * FLOAT, points)


def _transposed(shape: Shape) -> float:
    """Bytes received when a matrix [b, N] is transposed, and its gradient back."""
    return 2 * (shape.ranks - 1) * shape.local * shape.local * FLOAT


COSTS: Mapping[str, Callable[[Shape], Cost]] = {
    "clipzoo.heads.wpse.WpseHead": wpse,
    "clipzoo.heads.kme.KmeHead": lambda shape: kme(shape, shape.text_points),
    "clipzoo.heads.cloob.CloobHead": cloob,
}
"""Class of a head -> its cost. Others cost what CLIP does, at the width of their embeddings."""


def cost_of(head: Mapping[str, Any], shape: Shape) -> Cost:
    """Cost of the head that a `_target_` node describes."""
    return COSTS.get(head["_target_"], clip)(shape)
