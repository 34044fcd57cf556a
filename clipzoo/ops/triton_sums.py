"""Sums over all pairs of two sets of vectors on GPUs: the operations of `sums`.

Triton's kernels compute the tiles, with exponents in base 2, sums in fp32 and no atomics; the libraries' products
compute the gradients. Their precision follows `torch.get_float32_matmul_precision()`: see `triton_tiles.TILES`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from clipzoo.ops.sums import Exponents, Pair
from clipzoo.ops.tiles import LeftOut
from clipzoo.ops.triton_tiles import (
    ABSENT,
    Tiles,
    current_tiles,
    gradients,
    narrow_tiles,
    negative,
    store_tile,
    tile_scores,
)

Flags = dict[str, object]
"""Constants of a launch."""


@triton.jit
def negative_sums_kernel(
    left_ptr, right_ptr, row_scale_ptr, row_bias_ptr, row_threshold_ptr,
    column_scale_ptr, column_bias_ptr, column_threshold_ptr,
    row_sums_ptr, row_means_ptr, column_sums_ptr, column_means_ptr, rows, columns,
    first, row_labels_ptr, column_labels_ptr, LABELED: tl.constexpr,
    WITH_ROWS: tl.constexpr, WITH_COLUMNS: tl.constexpr, SCALED: tl.constexpr, THRESHOLDS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """log2 of each tile's sums of 2^(scale (product + bias)), and the products' means under these weights.

    row_sums, row_means: [column tile, row]; column_sums, column_means: [row tile, column].
    """
    row_tile, column_tile, row, column, scores = tile_scores(
        left_ptr, right_ptr, rows, columns, WIDTH, PRECISION, UPCAST, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_D, GROUP
    )
    counted = negative(row, column, rows, columns, first, row_labels_ptr, column_labels_ptr, LABELED)
    if not SCALED:
        scores = tl.where(counted, scores, ABSENT)  # the exponents of both sides
    if WITH_ROWS:
        exponents = _exponents(
            scores, counted, row, column, rows, columns, row_scale_ptr, row_bias_ptr, row_threshold_ptr,
            SCALED, THRESHOLDS, 1,
        )  # fmt: skip
        sums, means = _sums_and_means(exponents, scores, 1)
        place = column_tile.to(tl.int64) * rows + row
        tl.store(row_sums_ptr + place, sums, mask=row < rows)
        if SCALED:
            tl.store(row_means_ptr + place, means, mask=row < rows)
    if WITH_COLUMNS:
        exponents = _exponents(
            scores, counted, column, row, columns, rows, column_scale_ptr, column_bias_ptr, column_threshold_ptr,
            SCALED, THRESHOLDS, 0,
        )  # fmt: skip
        sums, means = _sums_and_means(exponents, scores, 0)
        place = row_tile.to(tl.int64) * columns + column
        tl.store(column_sums_ptr + place, sums, mask=column < columns)
        if SCALED:
            tl.store(column_means_ptr + place, means, mask=column < columns)


@triton.jit
def negative_shares_kernel(
    left_ptr, right_ptr, row_scale_ptr, row_bias_ptr, row_threshold_ptr,
    column_scale_ptr, column_bias_ptr, column_threshold_ptr,
    row_sums_ptr, column_sums_ptr, d_rows_ptr, d_columns_ptr, shares_ptr, rows, columns,
    first, row_labels_ptr, column_labels_ptr, LABELED: tl.constexpr,
    WITH_ROWS: tl.constexpr, WITH_COLUMNS: tl.constexpr, SCALED: tl.constexpr, THRESHOLDS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The softmax of each side times d, of its anchors -> shares[row, column], the gradient of the products."""
    row_tile, column_tile, row, column, scores = tile_scores(
        left_ptr, right_ptr, rows, columns, WIDTH, PRECISION, UPCAST, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_D, GROUP
    )
    counted = negative(row, column, rows, columns, first, row_labels_ptr, column_labels_ptr, LABELED)
    if not SCALED:
        scores = tl.where(counted, scores, ABSENT)  # the exponents of both sides
    if WITH_ROWS:
        exponents = _exponents(
            scores, counted, row, column, rows, columns, row_scale_ptr, row_bias_ptr, row_threshold_ptr,
            SCALED, THRESHOLDS, 1,
        )  # fmt: skip
        sums = tl.load(row_sums_ptr + row, mask=row < rows, other=0.0)
        d_rows = tl.load(d_rows_ptr + row, mask=row < rows, other=0.0)
        tile = tl.exp2(exponents - sums[:, None]) * d_rows[:, None]
    if WITH_COLUMNS:
        exponents = _exponents(
            scores, counted, column, row, columns, rows, column_scale_ptr, column_bias_ptr, column_threshold_ptr,
            SCALED, THRESHOLDS, 0,
        )  # fmt: skip
        sums = tl.load(column_sums_ptr + column, mask=column < columns, other=0.0)
        d_columns = tl.load(d_columns_ptr + column, mask=column < columns, other=0.0)
        share = tl.exp2(exponents - sums[None, :]) * d_columns[None, :]
        tile = tile + share if WITH_ROWS else share
    store_tile(shares_ptr, tile, row_tile, row, column, rows, columns, BLOCK_ROWS)


@triton.jit
def sigmoid_loss_kernel(
    left_ptr, right_ptr, scale_ptr, bias_ptr, losses_ptr, sums_ptr, shares_ptr, rows, columns,
    first, row_labels_ptr, column_labels_ptr, LABELED: tl.constexpr,
    WITH_SHARES: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Each tile's sum of -log sigmoid(y logit) -> losses[program]; its gradient -> shares, summed -> sums[program]."""
    row_tile, column_tile, row, column, scores = tile_scores(
        left_ptr, right_ptr, rows, columns, WIDTH, PRECISION, UPCAST, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_D, GROUP
    )
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    counted = negative(row, column, rows, columns, first, row_labels_ptr, column_labels_ptr, LABELED)
    sign = tl.where(counted, 1.0, -1.0)
    if LABELED:
        inside = counted
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
def _exponents(
    scores, counted, anchor, contrast, anchors, contrasts, scale_ptr, bias_ptr, threshold_ptr,
    SCALED: tl.constexpr, THRESHOLDS: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """scale of the anchor * (score + bias of the contrast) if SCALED. AXIS: 1 if the anchors are rows, else 0."""
    exponents = scores
    if SCALED:
        scale = tl.load(scale_ptr + anchor, mask=anchor < anchors, other=0.0)
        bias = tl.load(bias_ptr + contrast, mask=contrast < contrasts, other=0.0)
        exponents = tl.where(counted, tl.expand_dims(scale, AXIS) * (scores + tl.expand_dims(bias, 1 - AXIS)), ABSENT)
    if THRESHOLDS:
        threshold = tl.load(threshold_ptr + anchor, mask=anchor < anchors, other=0.0)
        exponents = tl.where(scores > tl.expand_dims(threshold, AXIS), ABSENT, exponents)
    return exponents


@triton.jit
def _sums_and_means(exponents, scores, AXIS: tl.constexpr):
    largest = tl.max(exponents, axis=AXIS)
    weights = tl.exp2(exponents - tl.expand_dims(largest, AXIS))
    total = tl.sum(weights, axis=AXIS)
    means = tl.sum(weights * scores, axis=AXIS) / total
    # The maximum ignores NaN, the total does not: NaN must not count as an empty sum.
    empty = (largest <= 0.5 * ABSENT) & (total == total)
    return tl.where(empty, -float("inf"), largest + tl.log2(total)), tl.where(empty, 0.0, means)


def negative_sums_forward(
    left: Tensor, right: Tensor, rows: Exponents | None, columns: Exponents | None, left_out: LeftOut, tile: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `sums.negative_sums_forward`; `tile` is not used."""
    tiles, left, right, flags = _launch(left, right, rows, columns, left_out)
    row_tiles, column_tiles = triton.cdiv(len(left), tiles.rows), triton.cdiv(len(right), tiles.columns)
    row_sums, row_means = _partial(rows, column_tiles, left)
    column_sums, column_means = _partial(columns, row_tiles, right)
    negative_sums_kernel[(row_tiles * column_tiles,)](
        left, right, *_side(rows, left, right, flags), *_side(columns, right, left, flags),
        row_sums, row_means, column_sums, column_means, len(left), len(right), *_left_out(left_out, left), **flags,
    )  # fmt: skip
    return *_combined(row_sums, row_means, flags), *_combined(column_sums, column_means, flags)


def negative_sums_backward(
    left: Tensor, right: Tensor, sums: Pair, d_sums: Pair, rows: Exponents | None, columns: Exponents | None,
    left_out: LeftOut, tile: int,
) -> Pair:  # fmt: skip
    """As `sums.negative_sums_backward`."""
    tiles, anchors, contrasts, flags = _launch(left, right, rows, columns, left_out)
    row_scale, row_bias, row_threshold = _side(rows, anchors, contrasts, flags)
    column_scale, column_bias, column_threshold = _side(columns, contrasts, anchors, flags)
    d_rows, d_columns = d_sums
    if flags["SCALED"]:
        # The anchor's scale is a factor of the gradient; exponents are in base 2, and log2(e) is in the scale.
        d_rows, d_columns = d_rows * row_scale * math.log(2), d_columns * column_scale * math.log(2)
    d_rows, d_columns = d_rows.contiguous(), d_columns.contiguous()

    def launch(grid: tuple[int], part: slice, shares: Tensor) -> None:
        negative_shares_kernel[grid](
            anchors[part], contrasts, row_scale[part], row_bias, row_threshold[part],
            column_scale, column_bias[part], column_threshold,
            sums[0][part], sums[1], d_rows[part], d_columns, shares, len(shares), len(right),
            *_left_out(left_out, left, part.start), **flags,
        )  # fmt: skip

    return gradients(left, right, tiles, launch)


def _launch(
    left: Tensor, right: Tensor, rows: Exponents | None, columns: Exponents | None, left_out: LeftOut
) -> tuple[Tiles, Tensor, Tensor, Flags]:
    """Return the tiles, the operands in the precision of the products, and the constants of a launch."""
    sides = [side for side in (rows, columns) if side is not None]
    scaled = sides[0].scale is not None
    # Labels, scales and biases take registers.
    tiles = current_tiles() if isinstance(left_out, int) and not scaled else narrow_tiles()
    if not scaled:
        left = math.log2(math.e) * left
    flags = {
        "WITH_ROWS": rows is not None, "WITH_COLUMNS": columns is not None, "SCALED": scaled,
        "THRESHOLDS": any(side.threshold is not None for side in sides), **tiles.launch(width=left.shape[1]),
    }  # fmt: skip
    return tiles, left.to(tiles.dtype).contiguous(), right.to(tiles.dtype).contiguous(), flags


def _left_out(left_out: LeftOut, left: Tensor, first_row: int = 0) -> tuple[int, Tensor, Tensor, bool]:
    """Return the kernels' arguments for pairs that are left out; the launch begins at `first_row`."""
    if isinstance(left_out, int):
        return left_out + first_row, left, left, False
    return 0, left_out[0][first_row:].contiguous(), left_out[1].contiguous(), True


def _side(side: Exponents | None, anchors: Tensor, contrasts: Tensor, flags: Flags) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale, bias and threshold in fp32; zeros and infinity where there are none."""
    if not flags["SCALED"]:
        return anchors, contrasts, anchors  # not read
    side = side or Exponents()
    scale, bias, threshold = (
        torch.full((len(vectors),), absent, device=vectors.device) if values is None else values.float().contiguous()
        for values, vectors, absent in (
            (side.scale, anchors, 0.0), (side.bias, contrasts, 0.0), (side.threshold, anchors, math.inf),
        )
    )  # fmt: skip
    return scale, bias, threshold


def _partial(side: Exponents | None, tiles: int, of: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and means of each tile; of one tile without entries for a side that is left out."""
    shape = (1 if side is None else tiles, len(of))
    return torch.full(shape, -math.inf, device=of.device), torch.zeros(shape, device=of.device)


def _combined(sums: Tensor, means: Tensor, flags: Flags) -> tuple[Tensor, Tensor]:
    """[tiles, n] -> [n], and the means under the weights of the tiles."""
    total = (sums * math.log(2)).logsumexp(dim=0) / math.log(2)
    if not flags["SCALED"]:
        return total, means[0]
    shares = (sums - total.clamp(min=torch.finfo(total.dtype).min)).exp2()
    return total, (shares * means).sum(dim=0)


def sigmoid_loss_forward(
    left: Tensor, right: Tensor, scale: Tensor, bias: Tensor, left_out: LeftOut, tile: int, with_gradients: bool
) -> tuple[Tensor, ...]:
    """As `sums.sigmoid_loss_forward`; `tile` is not used."""
    tiles = narrow_tiles()
    operands = [side.to(tiles.dtype).contiguous() for side in (left, right)]
    scalars = [scalar.float().contiguous() for scalar in (scale, bias)]
    results = []

    def launch(grid: tuple[int], part: slice, shares: Tensor) -> None:
        results.append(torch.empty(2, *grid, device=left.device))
        sigmoid_loss_kernel[grid](
            operands[0][part], operands[1], *scalars, *results[-1], shares, part.stop - part.start, len(right),
            *_left_out(left_out, left, part.start), WITH_SHARES=with_gradients, **tiles.launch(width=left.shape[1]),
        )  # fmt: skip

    if with_gradients:
        d_left, d_right = gradients(left, right, tiles, launch)
        loss, sums = torch.cat(results, dim=1).sum(dim=1)
        return loss, d_left, d_right, sums
    grid = (triton.cdiv(len(left), tiles.rows) * triton.cdiv(len(right), tiles.columns),)
    launch(grid, slice(0, len(left)), left.new_empty(1))
    return (results[0][0].sum(),)
