"""Cost of a head in a training step: floating-point operations, bytes that ranks exchange, memory of scores."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT = 4
TILED_FROM = 2**25
"""Entries of the local similarity matrix from which `trainer.tile=auto` uses tiles."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a step: local batch, ranks, widths, points per image and caption, random features of WPSE."""

    local: int
    ranks: int
    image_width: int = 768
    text_width: int = 512
    width: int = 512
    features: int = 1024
    image_points: int = 197
    text_points: int = 77

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


def cost_of_vectors(shape: Shape, width: int, flops: float, points: float = 0.0) -> Cost:
    """Cost of scores that are inner products: text vectors and their gradients, a matrix or tiles computed twice.

    A matrix is transposed for the captions, and its gradient back; of tiles only sums travel. flops, points: those of
    the projections.
    """
    product = 2 * shape.local * shape.batch * width
    points += 2 * shape.batch * width * FLOAT
    if shape.tiled:
        sums = 4 * (shape.ranks - 1) * shape.local * 2
        return Cost(flops + 4 * product, width, sums, 1024 * 1024 * FLOAT, points)
    return Cost(flops + 3 * product, width, transposed(shape), 3 * shape.local * shape.batch * FLOAT, points)


def projections(shape: Shape) -> float:
    """FLOPs of the projections of the pooled features of both modalities."""
    return 6 * shape.local * (shape.image_width + shape.text_width) * shape.width


def transposed(shape: Shape) -> float:
    """Bytes received when a matrix [b, N] is transposed, and its gradient back."""
    return 2 * (shape.ranks - 1) * shape.local * shape.local * FLOAT
