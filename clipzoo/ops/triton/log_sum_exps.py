"""Log-sum-exps of products on GPUs: Triton's tiles, the libraries' products for the gradient.

The precision of products follows `torch.get_float32_matmul_precision()`: see `tiles.TILES`.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from clipzoo.ops.triton import log_sum_exps_kernels as kernels
from clipzoo.ops.triton.gradients import gradients
from clipzoo.ops.triton.tiles import current_tiles


def forward(left: Tensor, right: Tensor, first: int, tile: int, with_columns: bool) -> tuple[Tensor, Tensor]:
    """As `log_sum_exps_cpu.forward`; `tile` is not used."""
    tiles, (left, right) = current_tiles(), _operands(left, right)
    rows, columns = len(left), len(right)
    row_tiles, column_tiles = triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)
    row_sums = torch.empty(column_tiles, rows, device=left.device)
    column_sums = torch.full((row_tiles if with_columns else 1, columns), -math.inf, device=left.device)
    kernels.tile_sums[(row_tiles * column_tiles,)](
        left, right, row_sums, column_sums, rows, columns, first,
        WITH_COLUMNS=with_columns, **tiles.launch(width=left.shape[1]),
    )  # fmt: skip
    return _log2_sum_exp2(row_sums), _log2_sum_exp2(column_sums)


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
    """As `log_sum_exps_cpu.backward`."""
    tiles, (scaled, other) = current_tiles(), _operands(left, right)
    d_rows, d_columns = d_rows.contiguous(), d_columns.contiguous()

    def launch(grid: tuple[int], part: slice, shares: Tensor) -> None:
        kernels.shares[grid](
            scaled[part], other, rows[part], columns, d_rows[part], d_columns, shares,
            len(shares), len(right), first + part.start, WITH_COLUMNS=with_columns, **tiles.launch(width=left.shape[1]),
        )  # fmt: skip

    return gradients(left, right, tiles, launch)


def _operands(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the operands in the precision of the products; left is scaled for exponents in base 2."""
    dtype = current_tiles().dtype
    return (math.log2(math.e) * left).to(dtype).contiguous(), right.to(dtype).contiguous()


def _log2_sum_exp2(sums: Tensor) -> Tensor:
    """[tiles, n] -> [n]"""
    return (sums * math.log(2)).logsumexp(dim=0) / math.log(2)
