"""Triton kernels of the KME score. Exponents in base 2, sums in fp32.

A tile is points of captions (rows) x points of images (columns), packed without gaps, so that samples may
end anywhere in it. Its columns are summed image by image (197 points an image: one or two images a tile); its rows are
stored, and a second, small kernel sums them caption by caption. Images are along the columns because a thread holds few
rows of a tile but many columns: values per caption point take few registers, and sums over columns stay inside a
warp. There are no atomics: results are deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from clipzoo.ops.kme import LOG2_E, PLAIN_LIMIT, Packed
from clipzoo.ops.tiles import Block
from clipzoo.ops.triton_tiles import ABSENT, current_tiles, library_product, tile_scores


@triton.jit
def partial_sums_kernel(
    x_ptr, y_ptr, x_logs_ptr, x_owner_ptr, x_starts_ptr, sums_ptr, alpha, columns, rows,
    WIDTH: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """log2 sum_i w_i 2^(alpha x_i . y_j) over the points i of one image inside one tile -> sums[tile + image, j].

    tile + image is the index of a piece, the points of one image in one tile. SHIFTED subtracts the largest exponent of
    each sum; without it all exponents must be in the range of fp32.
    """
    row_tile, column_tile, row, column, exponents = tile_scores(
        y_ptr, x_ptr, rows, columns, WIDTH, PRECISION, UPCAST, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_D, GROUP
    )
    logs = tl.load(x_logs_ptr + column, mask=column < columns, other=ABSENT)
    exponents = alpha * exponents + logs[None, :]
    if not SHIFTED:
        exponents = tl.exp2(exponents)
    first = tl.load(x_owner_ptr + column_tile * BLOCK_COLUMNS)
    last = tl.load(x_owner_ptr + tl.minimum(column_tile * BLOCK_COLUMNS + BLOCK_COLUMNS, columns) - 1)
    for image in range(first, last + 1):
        inside = _columns_of(image, column, x_starts_ptr)
        if SHIFTED:
            largest = tl.max(tl.where(inside, exponents, ABSENT), axis=1)
            total = tl.sum(tl.where(inside, tl.exp2(exponents - largest[:, None]), 0.0), axis=1)
            log_sum = largest + tl.log2(total)
        else:
            log_sum = tl.log2(tl.sum(tl.where(inside, exponents, 0.0), axis=1))
        piece = (column_tile + image).to(tl.int64)
        tl.store(sums_ptr + piece * rows + row, log_sum, mask=row < rows)


@triton.jit
def sample_sums_kernel(
    sums_ptr, y_logs_ptr, x_starts_ptr, y_starts_ptr, normaliser_ptr, rows, captions, longest,
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
        piece = sums_ptr + (tile + image).to(tl.int64) * rows
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
def shares_kernel(
    x_ptr, y_ptr, x_logs_ptr, y_logs_ptr, x_owner_ptr, x_starts_ptr, y_owner_ptr, normaliser_ptr, gradient_ptr,
    shares_ptr, x_sums_ptr, y_sums_ptr, alpha, columns, rows, captions, stride,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """P_ji = w_i w'_j 2^(alpha x_i . y_j - normaliser) times the gradient, of i's and j's samples -> shares[j, i].

    Rows of shares are `stride` apart, with zeros beyond the last image point. Also stores the sums of the tile over its
    rows and columns, in fp32 before P is rounded. A tile of fp32 fills half the registers: it is updated in place,
    because a second copy would spill.
    """
    row_tile, column_tile, row, column, tile = tile_scores(
        y_ptr, x_ptr, rows, columns, WIDTH, PRECISION, UPCAST, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_D, GROUP
    )
    x_logs = tl.load(x_logs_ptr + column, mask=column < columns, other=ABSENT)
    y_logs = tl.load(y_logs_ptr + row, mask=row < rows, other=ABSENT)
    y_owner = tl.load(y_owner_ptr + row, mask=row < rows, other=0)
    first = tl.load(x_owner_ptr + column_tile * BLOCK_COLUMNS)
    last = tl.load(x_owner_ptr + tl.minimum(column_tile * BLOCK_COLUMNS + BLOCK_COLUMNS, columns) - 1)
    tile = alpha * tile + x_logs[None, :] + y_logs[:, None]
    for image in range(first, last + 1):
        inside = _columns_of(image, column, x_starts_ptr)
        pair = tl.full([BLOCK_ROWS], image, tl.int64) * captions + y_owner
        normaliser = tl.load(normaliser_ptr + pair, mask=row < rows, other=0.0)
        tile = tl.where(inside, tile - normaliser[:, None], tile)
    tile = tl.exp2(tile)
    for image in range(first, last + 1):
        inside = _columns_of(image, column, x_starts_ptr)
        pair = tl.full([BLOCK_ROWS], image, tl.int64) * captions + y_owner
        gradient = tl.load(gradient_ptr + pair, mask=row < rows, other=0.0)
        tile = tl.where(inside, tile * gradient[:, None], tile)
    y_sums_at = y_sums_ptr + column_tile.to(tl.int64) * rows
    tl.store(y_sums_at + row, tl.sum(tile, axis=1), mask=row < rows)
    x_sums_at = x_sums_ptr + row_tile.to(tl.int64) * columns
    tl.store(x_sums_at + column, tl.sum(tile, axis=0), mask=column < columns)
    place = tl.arange(0, BLOCK_ROWS)[:, None] * stride + column[None, :]
    stored = (row < rows)[:, None] & (column < stride)[None, :]
    tile_at = shares_ptr + (row_tile * BLOCK_ROWS).to(tl.int64) * stride
    tl.store(tile_at + place, tile.to(shares_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _columns_of(image, column, x_starts_ptr):
    """Which of a tile's columns are points of the image, [1, BLOCK_COLUMNS]."""
    return ((column >= tl.load(x_starts_ptr + image)) & (column < tl.load(x_starts_ptr + image + 1)))[None, :]


# Launches of the kernels. The precision of products follows `torch.get_float32_matmul_precision()`: see
# `triton_tiles.TILES`.


CHUNK_BYTES = 1 << 30
"""Bound of the memory between two kernels: partial sums forward, kernel values times gradients backward."""
ALIGNMENT = 16


def kme_forward(left: Packed, right: Packed, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """As `kme.kme_forward`: n and k samples -> S [n, k] and its normaliser for `kme_backward`."""
    problem, layout = _Problem(left, right, gamma), right.layout
    right_starts = _on_device(layout.starts, right.points.device)
    normaliser = left.points.new_full((len(left.layout), len(layout)), -math.inf)
    for images, starts, column_tiles in problem.parts(bytes_of_a_point=8 * len(right.points)):
        points, longest = images.points, max(layout.lengths)
        pieces = problem.left_logs.new_empty((column_tiles + images.count, len(right.points)))
        partial_sums_kernel[(problem.row_tiles * column_tiles,)](
            problem.left[points], problem.right, problem.left_logs[points], images.owner.int(), starts, pieces,
            problem.alpha, len(images.owner), len(right.points), SHIFTED=problem.alpha > PLAIN_LIMIT, **problem.launch,
        )  # fmt: skip
        sample_sums_kernel[(images.count, triton.cdiv(len(layout), 16))](
            pieces, problem.right_logs, starts, right_starts, normaliser[images.samples],
            len(right.points), len(layout), longest, BLOCK_COLUMNS=problem.tiles.columns,
            BLOCK_C=16, BLOCK_M=min(128, triton.next_power_of_2(longest)), num_warps=4,
        )  # fmt: skip
    score = (normaliser - problem.alpha) / LOG2_E + problem.left_largest[:, None] + problem.right_largest
    return score, normaliser


def kme_backward(
    left: Packed, right: Packed, gamma: Tensor, normaliser: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `kme.kme_backward`. P is written for a bounded run of images, then multiplied by the libraries."""
    problem = _Problem(left, right, gamma)
    d_left, d_left_weights = torch.zeros_like(left.points), torch.zeros_like(left.log_weights)
    d_right, d_right_weights = torch.zeros_like(right.points), torch.zeros_like(right.log_weights)
    pulls = left.points.new_zeros((), dtype=torch.float64)
    right_owner, captions_points = right.layout.owner.int(), len(right.points)
    for images, starts, column_tiles in problem.parts(problem.left.element_size() * captions_points):
        points, count = images.points, len(images.owner)
        stride = triton.cdiv(count, ALIGNMENT) * ALIGNMENT
        # P [Q, points of the run and zeros up to ALIGNMENT]; its sums over Q and over the points, in fp32, by tile.
        shares = problem.left.new_empty((captions_points, stride))
        left_sums = problem.left_logs.new_empty((problem.row_tiles, count))
        right_sums = problem.left_logs.new_empty((column_tiles, captions_points))
        shares_kernel[(problem.row_tiles * column_tiles,)](
            problem.left[points], problem.right, problem.left_logs[points], problem.right_logs,
            images.owner.int(), starts, right_owner, normaliser[images.samples].contiguous(),
            gradient[images.samples].float().contiguous(), shares, left_sums, right_sums,
            problem.alpha, count, captions_points, len(right.layout), stride, **problem.launch,
        )  # fmt: skip
        block, d_block_weights = problem.left[points], left_sums.sum(dim=0)
        d_block = library_product(shares.mT, problem.right)[:count]
        d_right += library_product(shares, problem.left[points.start :][:stride])
        d_left[points], d_left_weights[points] = d_block, d_block_weights
        d_right_weights += right_sums.sum(dim=0)
        # sum_ij P_ij (x_i . y_j - 1), its first term from the products of the same points as P's.
        pulls += (torch.linalg.vecdot(d_block, block.float()) - d_block_weights).sum(dtype=torch.float64)
    two_gamma = problem.alpha / LOG2_E
    return d_left.mul_(two_gamma), d_left_weights, d_right.mul_(two_gamma), d_right_weights, (2 * pulls).to(gamma)


class _Problem:
    """Points in the precision of the products, log2 weights relative to the largest of their sample, and tiles."""

    def __init__(self, left: Packed, right: Packed, gamma: Tensor) -> None:
        self.tiles = current_tiles()
        self.launch = self.tiles.launch(width=left.points.shape[1])
        self.row_tiles = triton.cdiv(len(right.points), self.tiles.rows)
        self.alpha = 2 * LOG2_E * float(gamma)
        # Padding, which is multiplied by zeros: rows of P end on an aligned boundary.
        self.left = functional.pad(left.points.to(self.tiles.dtype), (0, 0, 0, ALIGNMENT))
        self.right = right.points.to(self.tiles.dtype).contiguous()
        self.left_logs, self.left_largest = left.relative_logs()
        self.right_logs, self.right_largest = right.relative_logs()
        self._layout = left.layout

    def parts(self, bytes_of_a_point: int) -> Iterator[tuple[Block, Tensor, int]]:
        """Yield runs of images whose points, at `bytes_of_a_point` each, fit into CHUNK_BYTES.

        And the first point of each image with the end, and the number of tiles of the points.
        """
        if not len(self.right):
            return
        for images in self._layout.blocks(max(1, CHUNK_BYTES // bytes_of_a_point)):
            starts = self._layout.starts[images.samples.start : images.samples.stop + 1]
            local_starts = _on_device([start - starts[0] for start in starts], self.left.device)
            yield images, local_starts, triton.cdiv(len(images.owner), self.tiles.columns)


def _on_device(numbers: list[int], device: torch.device) -> Tensor:
    """Return int32 numbers on the device, without waiting for its queued work."""
    return torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)
