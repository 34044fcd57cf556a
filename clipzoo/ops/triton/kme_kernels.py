"""Triton kernels of the KME score. Exponents in base 2, sums in fp32.

A tile is points of captions (rows) x points of images (columns), packed without gaps, so that samples may
end anywhere in it. Its columns are summed image by image (197 points an image: one or two images a tile); its rows are
stored, and a second, small kernel sums them caption by caption. Images lie along the columns because a thread holds few
rows of a tile but many columns: values per caption point take few registers, and sums over columns stay inside a
warp. There are no atomics: results are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from clipzoo.ops.triton.tiles import ABSENT, products, tile_of_program


@triton.jit
def partial_sums(
    x_ptr, y_ptr, x_logs_ptr, x_owner_ptr, x_starts_ptr, sums_ptr, alpha, images_points, captions_points,
    WIDTH: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """log2 sum_i w_i 2^(alpha x_i . y_j) over the points i of one image inside one tile -> sums[tile + image, j].

    tile + image is the index of a piece, the points of one image in one tile. SHIFTED subtracts the largest exponent of
    each sum; without it all exponents must be in the range of fp32.
    """
    row_tile, column_tile = tile_of_program(captions_points, images_points, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    exponents = products(
        y_ptr,
        x_ptr,
        row,
        column,
        captions_points,
        images_points,
        WIDTH,
        PRECISION,
        UPCAST,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        BLOCK_D,
    )
    logs = tl.load(x_logs_ptr + column, mask=column < images_points, other=ABSENT)
    exponents = alpha * exponents + logs[None, :]
    if not SHIFTED:
        exponents = tl.exp2(exponents)
    first = tl.load(x_owner_ptr + column_tile * BLOCK_COLUMNS)
    last = tl.load(x_owner_ptr + tl.minimum(column_tile * BLOCK_COLUMNS + BLOCK_COLUMNS, images_points) - 1)
    for image in range(first, last + 1):
        inside = _columns_of(image, column, x_starts_ptr)
        if SHIFTED:
            largest = tl.max(tl.where(inside, exponents, ABSENT), axis=1)
            total = tl.sum(tl.where(inside, tl.exp2(exponents - largest[:, None]), 0.0), axis=1)
            log_sum = largest + tl.log2(total)
        else:
            log_sum = tl.log2(tl.sum(tl.where(inside, exponents, 0.0), axis=1))
        piece = (column_tile + image).to(tl.int64)
        tl.store(sums_ptr + piece * captions_points + row, log_sum, mask=row < captions_points)


@triton.jit
def sample_sums(
    sums_ptr, y_logs_ptr, x_starts_ptr, y_starts_ptr, normaliser_ptr, captions_points, captions, longest,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Sum the pieces of one image over its tiles and over the points of each of BLOCK_C captions, in log2."""
    image = tl.program_id(0)
    caption = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.load(x_starts_ptr + image)
    end = tl.load(x_starts_ptr + image + 1)
    first = start // BLOCK_COLUMNS
    # An image without points owns no piece.
    last = tl.where(end > start, (end - 1) // BLOCK_COLUMNS, first - 1)
    begins = tl.load(y_starts_ptr + caption, mask=caption < captions, other=0)
    ends = tl.load(y_starts_ptr + caption + 1, mask=caption < captions, other=0)
    largest = tl.full([BLOCK_C], ABSENT, tl.float32)
    total = tl.zeros([BLOCK_C], tl.float32)
    for tile in range(first, last + 1):
        piece = sums_ptr + (tile + image).to(tl.int64) * captions_points
        for skipped in range(0, longest, BLOCK_M):
            point = begins[:, None] + skipped + tl.arange(0, BLOCK_M)[None, :]
            inside = point < ends[:, None]
            logs = tl.load(piece + point, mask=inside, other=ABSENT)
            logs += tl.load(y_logs_ptr + point, mask=inside, other=ABSENT)
            larger = tl.maximum(largest, tl.max(logs, axis=1))
            total = total * tl.exp2(largest - larger) + tl.sum(tl.exp2(logs - larger[:, None]), axis=1)
            largest = larger
    log_sum = tl.where((end > start) & (ends > begins), largest + tl.log2(total), -float("inf"))
    tl.store(normaliser_ptr + image.to(tl.int64) * captions + caption, log_sum, mask=caption < captions)


@triton.jit
def shares(
    x_ptr, y_ptr, x_logs_ptr, y_logs_ptr, x_owner_ptr, x_starts_ptr, y_owner_ptr, normaliser_ptr, gradient_ptr,
    shares_ptr, x_sums_ptr, y_sums_ptr, alpha, images_points, captions_points, captions, stride,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """P_ji = w_i w'_j 2^(alpha x_i . y_j - normaliser) times the gradient, of i's and j's samples -> shares[j, i].

    Rows of shares are `stride` apart, with zeros beyond the last image point. Also stores the sums of the tile over its
    rows and columns, in fp32 before P is rounded. A tile of fp32 fills half the registers: it is updated in place,
    because a second copy would spill.
    """
    row_tile, column_tile = tile_of_program(captions_points, images_points, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    tile = products(
        y_ptr,
        x_ptr,
        row,
        column,
        captions_points,
        images_points,
        WIDTH,
        PRECISION,
        UPCAST,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        BLOCK_D,
    )
    x_logs = tl.load(x_logs_ptr + column, mask=column < images_points, other=ABSENT)
    y_logs = tl.load(y_logs_ptr + row, mask=row < captions_points, other=ABSENT)
    y_owner = tl.load(y_owner_ptr + row, mask=row < captions_points, other=0)
    first = tl.load(x_owner_ptr + column_tile * BLOCK_COLUMNS)
    last = tl.load(x_owner_ptr + tl.minimum(column_tile * BLOCK_COLUMNS + BLOCK_COLUMNS, images_points) - 1)
    tile = alpha * tile + x_logs[None, :] + y_logs[:, None]
    for image in range(first, last + 1):
        inside = _columns_of(image, column, x_starts_ptr)
        pair = tl.full([BLOCK_ROWS], image, tl.int64) * captions + y_owner
        normaliser = tl.load(normaliser_ptr + pair, mask=row < captions_points, other=0.0)
        tile = tl.where(inside, tile - normaliser[:, None], tile)
    tile = tl.exp2(tile)
    for image in range(first, last + 1):
        inside = _columns_of(image, column, x_starts_ptr)
        pair = tl.full([BLOCK_ROWS], image, tl.int64) * captions + y_owner
        gradient = tl.load(gradient_ptr + pair, mask=row < captions_points, other=0.0)
        tile = tl.where(inside, tile * gradient[:, None], tile)
    y_sums_at = y_sums_ptr + column_tile.to(tl.int64) * captions_points
    tl.store(y_sums_at + row, tl.sum(tile, axis=1), mask=row < captions_points)
    x_sums_at = x_sums_ptr + row_tile.to(tl.int64) * images_points
    tl.store(x_sums_at + column, tl.sum(tile, axis=0), mask=column < images_points)
    place = tl.arange(0, BLOCK_ROWS)[:, None] * stride + column[None, :]
    stored = (row < captions_points)[:, None] & (column < stride)[None, :]
    tile_at = shares_ptr + (row_tile * BLOCK_ROWS).to(tl.int64) * stride
    tl.store(tile_at + place, tile.to(shares_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _columns_of(image, column, x_starts_ptr):
    """Which of a tile's columns are points of the image, [1, BLOCK_COLUMNS]."""
    return ((column >= tl.load(x_starts_ptr + image)) & (column < tl.load(x_starts_ptr + image + 1)))[None, :]
