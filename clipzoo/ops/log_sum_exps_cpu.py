"""Log-sum-exps of products in tiles of torch operations. Exponents in base 2, cheaper on CPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from clipzoo.ops.products import product

_LOG2_E = math.log2(math.e)


def forward(left: Tensor, right: Tensor, first: int, tile: int, with_columns: bool) -> tuple[Tensor, Tensor]:
    """Return log2 of the sums over the rows [b] and over the columns [N], without positives."""
    rows, columns = left.new_full((len(left),), -math.inf), left.new_full((len(right),), -math.inf)
    for scores, part, other in _tiles(left, right, first, tile):
        rows[part] = torch.logaddexp2(rows[part], _log2_sum_exp2(scores, dim=1))
        if with_columns:
            columns[other] = torch.logaddexp2(columns[other], _log2_sum_exp2(scores, dim=0))
    return rows, columns


def backward(
    left: Tensor,
    right: Tensor,
    rows: Tensor,
    columns: Tensor,
    d_rows: Tensor,
    d_columns: Tensor,
    first: int,
    tile: int,
    with_columns: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of left and right from the sums and their gradients."""
    d_left, d_right = torch.zeros_like(left), right.new_zeros(right.shape[::-1])
    for scores, part, other in _tiles(left, right, first, tile):
        shares = (scores - rows[part, None]).exp2_().mul_(d_rows[part, None])
        if with_columns:
            shares += scores.sub_(columns[other]).exp2_().mul_(d_columns[other])
        d_left[part].add_(product(shares, right[other].mT))
        d_right[:, other].add_(product(left[part].mT, shares.mT))
    return d_left, d_right.mT


def _tiles(left: Tensor, right: Tensor, first: int, tile: int) -> Iterator[tuple[Tensor, slice, slice]]:
    """Yield tiles of log2(e) left @ right.mT with positives at -inf, and the slices of their rows and columns."""
    for start in range(0, len(left), tile):
        rows = slice(start, min(start + tile, len(left)))
        scaled = _LOG2_E * left[rows]
        for begin in range(0, len(right), tile):
            columns = slice(begin, min(begin + tile, len(right)))
            scores = product(scaled, right[columns])
            # The diagonal of the positives, if it crosses the tile.
            offset = first + start - begin
            if -scores.shape[0] < offset < scores.shape[1]:
                scores.diagonal(offset).fill_(-math.inf)
            yield scores, rows, columns


def _log2_sum_exp2(exponents: Tensor, dim: int) -> Tensor:
    largest = exponents.amax(dim=dim, keepdim=True).clamp_(min=torch.finfo(exponents.dtype).min)
    return (exponents - largest).exp2_().sum(dim=dim).log2_().add_(largest.squeeze(dim))
