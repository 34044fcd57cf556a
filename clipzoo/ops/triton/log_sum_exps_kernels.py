"""Triton kernels of the log-sum-exps of products. Exponents in base 2, sums in fp32, no atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from clipzoo.ops.triton.tiles import ABSENT, negative, store_tile, tile_scores


@triton.jit
def tile_sums(
    left_ptr, right_ptr, row_sums_ptr, column_sums_ptr, rows, columns, first,
    WIDTH: tl.constexpr, WITH_COLUMNS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """log2 of each tile's sums of 2^(left . right), row_sums[column tile, row] and column_sums[row tile, column]."""
    row_tile, column_tile, row, column, exponents = tile_scores(
        left_ptr, right_ptr, rows, columns, WIDTH, PRECISION, UPCAST, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_D, GROUP
    )
    exponents = tl.where(negative(row, column, rows, columns, first), exponents, ABSENT)
    row_sums = _log2_sum_exp2(exponents, 1)
    tl.store(row_sums_ptr + column_tile.to(tl.int64) * rows + row, row_sums, mask=row < rows)
    if WITH_COLUMNS:
        column_sums = _log2_sum_exp2(exponents, 0)
        tl.store(column_sums_ptr + row_tile.to(tl.int64) * columns + column, column_sums, mask=column < columns)


@triton.jit
def shares(
    left_ptr, right_ptr, row_sums_ptr, column_sums_ptr, d_rows_ptr, d_columns_ptr, shares_ptr, rows, columns, first,
    WIDTH: tl.constexpr, WITH_COLUMNS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """2^(left . right - row's sum) times the row's gradient, plus the same of the column -> shares[row, column]."""
    row_tile, column_tile, row, column, exponents = tile_scores(
        left_ptr, right_ptr, rows, columns, WIDTH, PRECISION, UPCAST, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_D, GROUP
    )
    exponents = tl.where(negative(row, column, rows, columns, first), exponents, ABSENT)
    row_sums = tl.load(row_sums_ptr + row, mask=row < rows, other=0.0)
    d_rows = tl.load(d_rows_ptr + row, mask=row < rows, other=0.0)
    tile = tl.exp2(exponents - row_sums[:, None]) * d_rows[:, None]
    if WITH_COLUMNS:
        column_sums = tl.load(column_sums_ptr + column, mask=column < columns, other=0.0)
        d_columns = tl.load(d_columns_ptr + column, mask=column < columns, other=0.0)
        tile += tl.exp2(exponents - column_sums[None, :]) * d_columns[None, :]
    store_tile(shares_ptr, tile, row_tile, row, column, rows, columns, BLOCK_ROWS)


@triton.jit
def _log2_sum_exp2(exponents, AXIS: tl.constexpr):
    largest = tl.max(exponents, axis=AXIS)
    total = tl.sum(tl.exp2(exponents - tl.expand_dims(largest, AXIS)), axis=AXIS)
    # The maximum ignores NaN, the total does not: NaN must not count as an empty sum.
    empty = (largest <= 0.5 * ABSENT) & (total == total)
    return tl.where(empty, -float("inf"), largest + tl.log2(total))
