"""Triton kernels of sums over pairs: scaled log-sum-exps with means, and sigmoid loss. Sums in fp32, no atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from clipzoo.ops.triton.tiles import ABSENT, negative, store_tile, tile_scores


@triton.jit
def negative_sums(
    left_ptr, right_ptr, row_scale_ptr, row_bias_ptr, column_scale_ptr, column_bias_ptr,
    row_sums_ptr, row_means_ptr, column_sums_ptr, column_means_ptr, rows, columns, first,
    WITH_ROWS: tl.constexpr, WITH_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """log2 of each tile's sums of 2^(scale (product + bias)), and the products' means under these weights.

    row_sums, row_means: [column tile, row]; column_sums, column_means: [row tile, column].
    """
    row_tile, column_tile, row, column, scores = tile_scores(
        left_ptr, right_ptr, rows, columns, WIDTH, PRECISION, UPCAST, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_D, GROUP
    )
    counted = negative(row, column, rows, columns, first)
    if WITH_ROWS:
        exponents = _row_exponents(scores, counted, row, column, rows, columns, row_scale_ptr, row_bias_ptr)
        sums, means = _sums_and_means(exponents, scores, 1)
        place = column_tile.to(tl.int64) * rows + row
        tl.store(row_sums_ptr + place, sums, mask=row < rows)
        tl.store(row_means_ptr + place, means, mask=row < rows)
    if WITH_COLUMNS:
        exponents = _column_exponents(scores, counted, row, column, rows, columns, column_scale_ptr, column_bias_ptr)
        sums, means = _sums_and_means(exponents, scores, 0)
        place = row_tile.to(tl.int64) * columns + column
        tl.store(column_sums_ptr + place, sums, mask=column < columns)
        tl.store(column_means_ptr + place, means, mask=column < columns)


@triton.jit
def negative_shares(
    left_ptr, right_ptr, row_scale_ptr, row_bias_ptr, column_scale_ptr, column_bias_ptr,
    row_sums_ptr, column_sums_ptr, d_rows_ptr, d_columns_ptr, shares_ptr, rows, columns, first,
    WITH_ROWS: tl.constexpr, WITH_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The softmax of each side times d, of its anchors -> shares[row, column], the gradient of the products."""
    row_tile, column_tile, row, column, scores = tile_scores(
        left_ptr, right_ptr, rows, columns, WIDTH, PRECISION, UPCAST, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_D, GROUP
    )
    counted = negative(row, column, rows, columns, first)
    tile = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    if WITH_ROWS:
        exponents = _row_exponents(scores, counted, row, column, rows, columns, row_scale_ptr, row_bias_ptr)
        sums = tl.load(row_sums_ptr + row, mask=row < rows, other=0.0)
        d_rows = tl.load(d_rows_ptr + row, mask=row < rows, other=0.0)
        tile += tl.exp2(exponents - sums[:, None]) * d_rows[:, None]
    if WITH_COLUMNS:
        exponents = _column_exponents(scores, counted, row, column, rows, columns, column_scale_ptr, column_bias_ptr)
        sums = tl.load(column_sums_ptr + column, mask=column < columns, other=0.0)
        d_columns = tl.load(d_columns_ptr + column, mask=column < columns, other=0.0)
        tile += tl.exp2(exponents - sums[None, :]) * d_columns[None, :]
    store_tile(shares_ptr, tile, row_tile, row, column, rows, columns, BLOCK_ROWS)


@triton.jit
def sigmoid_loss(
    left_ptr, right_ptr, scale_ptr, bias_ptr, losses_ptr, sums_ptr, shares_ptr, rows, columns, first,
    WITH_SHARES: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Each tile's sum of -log sigmoid(y logit) -> losses[program]; its gradient -> shares, summed -> sums[program]."""
    row_tile, column_tile, row, column, scores = tile_scores(
        left_ptr, right_ptr, rows, columns, WIDTH, PRECISION, UPCAST, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_D, GROUP
    )
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    sign = tl.where(negative(row, column, rows, columns, first), 1.0, -1.0)
    logits = sign * (tl.load(scale_ptr) * scores + tl.load(bias_ptr))
    # log(1 + v) of a small v: the rounding of 1 + v divides out of v / ((1 + v) - 1).
    small = tl.exp(-tl.abs(logits))
    above = 1.0 + small
    ratio = tl.where(above > 1.0, small / tl.where(above > 1.0, above - 1.0, 1.0), 1.0)
    logarithm = tl.where(above > 1.0, tl.log(above) * ratio, small)
    losses = tl.where(inside, tl.maximum(logits, 0.0) + logarithm, 0.0)
    tl.store(losses_ptr + tl.program_id(0), tl.sum(tl.sum(losses, axis=1), axis=0))
    if WITH_SHARES:
        sigmoid = tl.where(logits >= 0, 1.0, small) / (1.0 + small)
        tile = tl.where(inside, sign * sigmoid, 0.0)
        tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.sum(tile, axis=1), axis=0))
        store_tile(shares_ptr, tile, row_tile, row, column, rows, columns, BLOCK_ROWS)


@triton.jit
def _row_exponents(scores, counted, row, column, rows, columns, scale_ptr, bias_ptr):
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0)
    return tl.where(counted, scale[:, None] * (scores + bias[None, :]), ABSENT)


@triton.jit
def _column_exponents(scores, counted, row, column, rows, columns, scale_ptr, bias_ptr):
    scale = tl.load(scale_ptr + column, mask=column < columns, other=0.0)
    bias = tl.load(bias_ptr + row, mask=row < rows, other=0.0)
    return tl.where(counted, scale[None, :] * (scores + bias[:, None]), ABSENT)


@triton.jit
def _sums_and_means(exponents, scores, AXIS: tl.constexpr):
    largest = tl.max(exponents, axis=AXIS)
    weights = tl.exp2(exponents - tl.expand_dims(largest, AXIS))
    total = tl.sum(weights, axis=AXIS)
    means = tl.sum(weights * scores, axis=AXIS) / total
    # The maximum ignores NaN, the total does not: NaN must not count as an empty sum.
    empty = (largest <= 0.5 * ABSENT) & (total == total)
    return tl.where(empty, -float("inf"), largest + tl.log2(total)), tl.where(empty, 0.0, means)
