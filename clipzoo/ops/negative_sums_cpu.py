"""Scaled and biased log-sum-exps of products, and means, in tiles of torch operations. Exponents in base 2."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clipzoo.ops.tiles_cpu import gradients, positives, tiles

Side = tuple[Tensor, Tensor | None]
"""Scale of the anchors, times log2(e), and bias of the contrasts."""


def forward(
    left: Tensor, right: Tensor, rows: Side | None, columns: Side | None, first: int, tile: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log2 of the sums over rows, means over rows, and both over columns."""
    row_sums, column_sums = (left.new_full((len(side),), -math.inf) for side in (left, right))
    row_means, column_means = (left.new_zeros(len(side)) for side in (left, right))
    for scores, part, other in tiles(left, right, tile):
        if rows is not None:
            exponents = _exponents(scores, rows, part, other, first)
            row_sums[part], row_means[part] = _combined(row_sums[part], row_means[part], exponents, scores)
        if columns is not None:
            exponents = _exponents(scores.mT, columns, other, part, -first)
            column_sums[other], column_means[other] = _combined(
                column_sums[other], column_means[other], exponents, scores.mT
            )
    return row_sums, row_means, column_sums, column_means


def backward(
    left: Tensor,
    right: Tensor,
    row_sums: Tensor,
    column_sums: Tensor,
    d_rows: Tensor,
    d_columns: Tensor,
    rows: Side | None,
    columns: Side | None,
    first: int,
    tile: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of left and right from the sums and their gradients."""

    def shares(scores: Tensor, part: slice, other: slice) -> Tensor:
        result = (
            torch.zeros_like(scores) if rows is None else _share(scores, rows, part, other, first, row_sums, d_rows)
        )
        if columns is not None:
            result += _share(scores.mT, columns, other, part, -first, column_sums, d_columns).mT
        return result

    return gradients(left, right, tile, shares)


def _exponents(scores: Tensor, side: Side, part: slice, other: slice, first: int) -> Tensor:
    scale, bias = side
    shifted = scores if bias is None else scores + bias[other]
    exponents = shifted * scale[part, None]
    positives(exponents, part, other, first).fill_(-math.inf)
    return exponents


def _combined(sums: Tensor, means: Tensor, exponents: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums and means of the tiles so far and of one more."""
    largest = exponents.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(exponents.dtype).min)
    weights = exponents.sub_(largest).exp2_()
    totals = weights.sum(dim=1)
    own = totals.log2().add_(largest.squeeze(1))
    together = torch.logaddexp2(sums, own)
    finite = together.clamp(min=torch.finfo(together.dtype).min)
    scaled = (weights * scores).sum(dim=1) / totals.clamp(min=torch.finfo(totals.dtype).tiny)
    return together, means * (sums - finite).exp2() + scaled * (own - finite).exp2()


def _share(scores: Tensor, side: Side, part: slice, other: slice, first: int, sums: Tensor, gradient: Tensor) -> Tensor:
    """Gradient with respect to the scores: the anchor's gradient and scale times the softmax."""
    exponents = _exponents(scores, side, part, other, first)
    anchors = gradient[part] * side[0][part] * math.log(2)
    return exponents.sub_(sums[part, None]).exp2_().mul_(anchors[:, None])
