"""Scaled and biased log-sum-exps of products, and means, on GPUs: as `negative_sums_cpu`."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from clipzoo.ops.negative_sums_cpu import Side
from clipzoo.ops.triton import pair_kernels as kernels
from clipzoo.ops.triton.gradients import gradients
from clipzoo.ops.triton.tiles import narrow_tiles


def forward(
    left: Tensor, right: Tensor, rows: Side | None, columns: Side | None, first: int, tile: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `negative_sums_cpu.forward`; `tile` is not used."""
    tiles = narrow_tiles()
    left, right = (side.to(tiles.dtype).contiguous() for side in (left, right))
    row_tiles, column_tiles = triton.cdiv(len(left), tiles.rows), triton.cdiv(len(right), tiles.columns)
    row_sums, row_means = _partial(rows, column_tiles, left)
    column_sums, column_means = _partial(columns, row_tiles, right)
    kernels.negative_sums[(row_tiles * column_tiles,)](
        left, right, *_operands(rows, left, right), *_operands(columns, right, left),
        row_sums, row_means, column_sums, column_means, len(left), len(right), first,
        WITH_ROWS=rows is not None, WITH_COLUMNS=columns is not None, **tiles.launch(width=left.shape[1]),
    )  # fmt: skip
    return *_combined(row_sums, row_means), *_combined(column_sums, column_means)


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
    """As `negative_sums_cpu.backward`."""
    tiles = narrow_tiles()
    operands = [side.to(tiles.dtype).contiguous() for side in (left, right)]
    row_scale, row_bias = _operands(rows, *operands)
    column_scale, column_bias = _operands(columns, *operands[::-1])
    # The anchor's scale is a factor of the gradient; exponents are in base 2, and log2(e) is in the scale.
    d_rows, d_columns = (
        (gradient * scale * math.log(2)).contiguous()
        for gradient, scale in ((d_rows, row_scale), (d_columns, column_scale))
    )

    def launch(grid: tuple[int], part: slice, shares: Tensor) -> None:
        kernels.negative_shares[grid](
            operands[0][part], operands[1], row_scale[part], row_bias, column_scale, column_bias[part],
            row_sums[part], column_sums, d_rows[part], d_columns, shares, len(shares), len(right), first + part.start,
            WITH_ROWS=rows is not None, WITH_COLUMNS=columns is not None, **tiles.launch(width=left.shape[1]),
        )  # fmt: skip

    return gradients(left, right, tiles, launch)


def _operands(side: Side | None, anchors: Tensor, contrasts: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and bias in fp32, zeros where there are none."""
    scale, bias = side or (None, None)
    return tuple(
        torch.zeros(len(of), device=of.device) if values is None else values.float().contiguous()
        for values, of in ((scale, anchors), (bias, contrasts))
    )  # type: ignore[return-value]


def _partial(side: Side | None, tiles: int, of: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and means of each tile; of one tile without entries for a side that is left out."""
    shape = (1 if side is None else tiles, len(of))
    return torch.full(shape, -math.inf, device=of.device), torch.zeros(shape, device=of.device)


def _combined(sums: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """[tiles, n] -> [n], and the means under the weights of the tiles."""
    total = (sums * math.log(2)).logsumexp(dim=0) / math.log(2)
    shares = (sums - total.clamp(min=torch.finfo(total.dtype).min)).exp2()
    return total, (shares * means).sum(dim=0)
