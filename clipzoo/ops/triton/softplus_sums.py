"""Sums of softplus of products on GPUs: as `softplus_sums_cpu`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from clipzoo.ops.triton import pair_kernels as kernels
from clipzoo.ops.triton.gradients import gradients
from clipzoo.ops.triton.tiles import narrow_tiles


def forward(left: Tensor, right: Tensor, first: int, tile: int, with_columns: bool) -> tuple[Tensor, Tensor]:
    """As `softplus_sums_cpu.forward`; `tile` is not used."""
    tiles = narrow_tiles()
    left, right = (side.to(tiles.dtype).contiguous() for side in (left, right))
    row_tiles, column_tiles = triton.cdiv(len(left), tiles.rows), triton.cdiv(len(right), tiles.columns)
    row_sums = torch.empty(column_tiles, len(left), device=left.device)
    column_sums = torch.zeros(row_tiles if with_columns else 1, len(right), device=left.device)
    kernels.softplus_sums[(row_tiles * column_tiles,)](
        left, right, row_sums, column_sums, len(left), len(right), first,
        WITH_COLUMNS=with_columns, **tiles.launch(width=left.shape[1]),
    )  # fmt: skip
    return row_sums.sum(dim=0), column_sums.sum(dim=0)


def backward(
    left: Tensor,
    right: Tensor,
    d_rows: Tensor,
    d_columns: Tensor,
    first: int,
    tile: int,
    with_columns: bool,
) -> tuple[Tensor, Tensor]:
    """As `softplus_sums_cpu.backward`."""
    tiles = narrow_tiles()
    operands = [side.to(tiles.dtype).contiguous() for side in (left, right)]
    d_rows, d_columns = d_rows.contiguous(), d_columns.contiguous()

    def launch(grid: tuple[int], part: slice, shares: Tensor) -> None:
        kernels.softplus_shares[grid](
            operands[0][part], operands[1], d_rows[part], d_columns, shares, len(shares), len(right),
            first + part.start, WITH_COLUMNS=with_columns, **tiles.launch(width=left.shape[1]),
        )  # fmt: skip

    return gradients(left, right, tiles, launch)
