"""Scores of images with texts, and positions in the order of the scores.

Answers are in the order of descending scores; equal scores are in the order of their columns, as with argmax and a
stable sort. A model that gives all answers the same score is then right by chance, not always.
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
"""Pairs of points whose similarity is computed at a time; heads divide this further as they need."""


def positions(scores: Tensor, column: Tensor) -> Tensor:
    """scores [n, k], one answer's column per row [n] -> [n] int64, the number of answers before it; 0 for the best."""
    own = scores.gather(1, column[:, None])
    columns = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > own) | ((scores == own) & (columns < column[:, None]))
    return before.sum(dim=1)


@torch.no_grad()
def score_blocks(model: Model, image: Embedding, text: Embedding) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks of rows of the similarity matrix [n, k], with the index of each block's first row.

    Scores are in the head's own precision: bf16 and TF32 products change predictions (54 of 1000 in a trial of bf16).
    Raises ConfigError if a score is NaN.
    """
    rows = max(1, BLOCK_POINT_PAIRS // (_points(image) * _points(text) * len(text)))
    for start in range(0, len(image), rows):
        block = map_embedding(lambda tensor, start=start: tensor[start : start + rows], image)  # type: ignore[misc]
        with exact_products():
            scores = model.similarity(block, text)
        if scores.isnan().any():
            raise ConfigError("the model's similarities are NaN: its weights are broken; evaluate another checkpoint")
        yield start, scores


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 matrices in float32, whatever precision training has set."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _points(embedding: Embedding) -> int:
    return embedding.points.shape[1] if isinstance(embedding, PointSet) else 1
