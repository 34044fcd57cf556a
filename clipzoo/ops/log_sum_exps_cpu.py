"""Log-sum-exps of products in tiles of torch operations. Exponents in base 2, cheaper on CPUs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clipzoo.ops.tiles_cpu import gradients, log2_sum_exp2, positives, tiles

_LOG2_E = math.log2(math.e)


def forward(left: Tensor, right: Tensor, first: int, tile: int, with_columns: bool) -> tuple[Tensor, Tensor]:
    """Return log2 of the sums over the rows [b] and over the columns [N], without positives."""
    rows, columns = left.new_full((len(left),), -math.inf), left.new_full((len(right),), -math.inf)
    for scores, part, other in tiles(left, right, tile, _LOG2_E):
        positives(scores, part, other, first).fill_(-math.inf)
        rows[part] = torch.logaddexp2(rows[part], log2_sum_exp2(scores, dim=1))
        if with_columns:
            columns[other] = torch.logaddexp2(columns[other], log2_sum_exp2(scores, dim=0))
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

    def shares(scores: Tensor, part: slice, other: slice) -> Tensor:
        positives(scores, part, other, first).fill_(-math.inf)
        result = (scores - rows[part, None]).exp2_().mul_(d_rows[part, None])
        if with_columns:
            result += scores.sub_(columns[other]).exp2_().mul_(d_columns[other])
        return result

    return gradients(left, right, tile, shares, _LOG2_E)
