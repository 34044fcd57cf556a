"""Where an answer stands among all answers, ties included.

The order is by score, the highest first; equal scores stand in the order of their columns, as argmax and a stable sort
have them. A model that gives every answer the same score is then right by chance, not always.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from clipzoo.errors import ConfigError
from clipzoo.model import Model
from clipzoo.types import Embedding, PointSet, map_embedding

BLOCK_POINT_PAIRS = 1 << 28
"""Pairs of points whose similarity is asked for at once; heads cut this further as they need."""


def places(scores: Tensor, column: Tensor) -> Tensor:
    """scores [n, k], one column a row [n] -> [n] int64, how many answers stand before it. 0 is the first place."""
    own = scores.gather(1, column[:, None])
    indices = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > own) | ((scores == own) & (indices < column[:, None]))
    return before.sum(dim=1)


@torch.no_grad()
def score_blocks(model: Model, image: Embedding, text: Embedding) -> Iterator[tuple[int, Tensor]]:
    """Rows of the [n, k] similarities, a block at a time, with the index of each block's first row.

    In the head's own precision: bf16 and TF32 products move answers (54 of 1000 in a trial of bf16).
    """
    rows = max(1, BLOCK_POINT_PAIRS // (_points(image) * _points(text) * len(text)))
    for start in range(0, len(image), rows):
        block = map_embedding(lambda tensor, start=start: tensor[start : start + rows], image)  # type: ignore[misc]
        with exact_products():
            scores = model.similarity(block, text)
        if scores.isnan().any():
            raise ConfigError(
                "the model's similarities are not numbers (NaN): its weights are broken, evaluate another checkpoint"
            )
        yield start, scores


@contextmanager
def exact_products() -> Iterator[None]:
    """Matrix products of float32 in float32, whatever training has chosen."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


def _points(embedding: Embedding) -> int:
    return embedding.points.shape[1] if isinstance(embedding, PointSet) else 1
