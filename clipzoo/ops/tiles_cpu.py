"""Products of vectors in tiles of torch operations, one tile in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from clipzoo.ops.products import product

Shares = Callable[[Tensor, slice, slice], Tensor]
"""Function of a tile and the slices of its rows and columns -> gradient of the loss with respect to the tile."""


def tiles(left: Tensor, right: Tensor, tile: int, scale: float = 1.0) -> Iterator[tuple[Tensor, slice, slice]]:
    """Yield tiles of scale * left @ right.mT, and the slices of their rows and columns. A tile may be overwritten."""
    for start in range(0, len(left), tile):
        rows = slice(start, min(start + tile, len(left)))
        scaled = left[rows] if scale == 1 else scale * left[rows]
        for begin in range(0, len(right), tile):
            columns = slice(begin, min(begin + tile, len(right)))
            yield product(scaled, right[columns]), rows, columns


def fill_positives(values: Tensor, rows: slice, columns: slice, first: int, value: float) -> None:
    """Overwrite the positives in a tile: row i of the product has its positive in column first + i."""
    offset = first + rows.start - columns.start
    if -values.shape[0] < offset < values.shape[1]:
        values.diagonal(offset).fill_(value)


def gradients(left: Tensor, right: Tensor, tile: int, shares: Shares, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the gradients of left and right. shares: of the unscaled products."""
    d_left, d_right = torch.zeros_like(left), right.new_zeros(right.shape[::-1])
    for scores, rows, columns in tiles(left, right, tile, scale):
        share = shares(scores, rows, columns)
        d_left[rows].add_(product(share, right[columns].mT))
        d_right[:, columns].add_(product(left[rows].mT, share.mT))
    return d_left, d_right.mT


def log2_sum_exp2(exponents: Tensor, dim: int) -> Tensor:
    largest = exponents.amax(dim=dim, keepdim=True).clamp_(min=torch.finfo(exponents.dtype).min)
    return (exponents - largest).exp2_().sum(dim=dim).log2_().add_(largest.squeeze(dim))
