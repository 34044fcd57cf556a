"""Triton kernels of the KME score. Exponents in base 2, sums in fp32.

A tile is points of captions (rows) x points of images (columns), packed without gaps, so that samples may
end anywhere in it. Its columns are summed image by image (197 points an image: one or two images a tile); its rows are
stored, and a second, small kernel sums them caption by caption. Images lie along the columns because a thread holds few
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

from clipzoo.ops.packing import Packed
from clipzoo.ops.triton_tiles import ABSENT, current_tiles, library_product, tile_scores


@triton.jit
def partial_sums_kernel(
    x_ptr, y_ptr, x_logs_ptr, x_owner_ptr, x_starts_ptr, sums_ptr, alpha, images_points, captions_points,
    WIDTH: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """log2 sum_i w_i 2^(alpha x_i . y_j) over the points i of one image inside one tile -> sums[tile + image, j].

    tile + image is the index of a piece, the points of one image in one tile. SHIFTED subtracts the largest exponent of
    each sum; without it all exponents must be in the range of fp32.
    """
    row_tile, column_tile, row, column, exponents = tile_scores(
        y_ptr,
        x_ptr,
        captions_points,
        images_points,
        WIDTH,
        PRECISION,
        UPCAST,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        BLOCK_D,
        GROUP,
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
def sample_sums_kernel(
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
def shares_kernel(
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
    row_tile, column_tile, row, column, tile = tile_scores(
        y_ptr,
        x_ptr,
        captions_points,
        images_points,
        WIDTH,
        PRECISION,
        UPCAST,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        BLOCK_D,
        GROUP,
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


# Launches of the kernels. The precision of products follows `torch.get_float32_matmul_precision()`: see
# `triton_tiles.TILES`.


PLAIN_LIMIT = 60.0
"""Up to this alpha no exponent of relative weights leaves fp32's range, as in `kme_cpu`."""
CHUNK_BYTES = 1 << 30
"""Bound of the memory between two kernels: partial sums forward, kernel values times gradients backward."""
ALIGNMENT = 16
_LOG2_E = math.log2(math.e)


def kme_forward(left: Packed, right: Packed, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """As `kme_cpu.kme_forward`: n and k samples -> S [n, k] and its normaliser for `kme_backward`."""
    problem = _Problem(left, right, gamma)
    normaliser = left.points.new_full((len(left.layout), len(right.layout)), -math.inf)
    for part in problem.parts(bytes_of_a_point=8 * len(right.points)):
        part.sums(normaliser[part.samples])
    score = (normaliser - problem.alpha) / _LOG2_E + problem.left_largest[:, None] + problem.right_largest
    return score, normaliser


def kme_backward(
    left: Packed, right: Packed, gamma: Tensor, normaliser: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `kme_cpu.kme_backward`. P is written for a bounded run of images, then multiplied by the libraries."""
    problem = _Problem(left, right, gamma)
    d_left, d_left_weights = torch.zeros_like(left.points), torch.zeros_like(left.log_weights)
    d_right, d_right_weights = torch.zeros_like(right.points), torch.zeros_like(right.log_weights)
    pulls = left.points.new_zeros((), dtype=torch.float64)
    for part in problem.parts(bytes_of_a_point=problem.left.element_size() * len(right.points)):
        shares, left_sums, right_sums = part.shares(normaliser[part.samples], gradient[part.samples])
        block = problem.left[part.points]
        d_block = library_product(shares.mT, problem.right)[: len(block)]
        d_right += library_product(shares, problem.left[part.points.start :][: shares.shape[1]])
        d_left[part.points], d_left_weights[part.points] = d_block, left_sums
        d_right_weights += right_sums
        # sum_ij P_ij (x_i . y_j - 1), its first term from the products of the same points as P's.
        pulls += (torch.linalg.vecdot(d_block, block.float()) - left_sums).sum(dtype=torch.float64)
    two_gamma = problem.alpha / _LOG2_E
    return d_left.mul_(two_gamma), d_left_weights, d_right.mul_(two_gamma), d_right_weights, (2 * pulls).to(gamma)


class _Problem:
    """Points in the precision of the products, log2 weights relative to the largest of their sample, and layouts."""

    def __init__(self, left: Packed, right: Packed, gamma: Tensor) -> None:
        self.tiles = current_tiles()
        self.alpha = 2 * _LOG2_E * float(gamma)
        # Padding, which is multiplied by zeros: rows of P end on an aligned boundary.
        self.left = functional.pad(left.points.to(self.tiles.dtype), (0, 0, 0, ALIGNMENT))
        self.right = right.points.to(self.tiles.dtype).contiguous()
        self.left_logs, self.left_largest = left.relative_logs()
        self.right_logs, self.right_largest = right.relative_logs()
        self.left_layout, self.right_layout = left.layout, right.layout
        self.right_owner = right.layout.owner.int()
        self.right_starts = _on_device(right.layout.starts, right.points.device)

    def parts(self, bytes_of_a_point: int) -> Iterator[_Part]:
        """Yield runs of images whose points, at `bytes_of_a_point` each, fit into CHUNK_BYTES."""
        if len(self.right):
            for block in self.left_layout.blocks(max(1, CHUNK_BYTES // bytes_of_a_point)):
                yield _Part(self, block.samples, block.points)


class _Part:
    """A run of images and all captions."""

    def __init__(self, problem: _Problem, samples: slice, points: slice) -> None:
        self.samples, self.points, self._problem = samples, points, problem
        layout = problem.left_layout
        self._points = points.stop - points.start
        self._owner = (layout.owner[points] - samples.start).int()
        starts = [start - points.start for start in layout.starts[samples.start : samples.stop + 1]]
        self._starts = _on_device(starts, problem.left.device)
        self._row_tiles = triton.cdiv(len(problem.right), problem.tiles.rows)
        self._column_tiles = triton.cdiv(self._points, problem.tiles.columns)

    def sums(self, normaliser: Tensor) -> None:
        """Fills normaliser [images of this run, k]."""
        problem, images = self._problem, len(self._starts) - 1
        launch = problem.tiles.launch(width=problem.left.shape[1])
        pieces = problem.left_logs.new_empty((self._column_tiles + images, len(problem.right)))
        partial_sums_kernel[(self._row_tiles * self._column_tiles,)](
            problem.left[self.points], problem.right, problem.left_logs[self.points], self._owner, self._starts, pieces,
            problem.alpha, self._points, len(problem.right), SHIFTED=problem.alpha > PLAIN_LIMIT, **launch,
        )  # fmt: skip
        captions = len(problem.right_layout)
        longest = max(problem.right_layout.lengths)
        sample_sums_kernel[(images, triton.cdiv(captions, 16))](
            pieces, problem.right_logs, self._starts, problem.right_starts, normaliser,
            len(problem.right), captions, longest, BLOCK_COLUMNS=problem.tiles.columns,
            BLOCK_C=16, BLOCK_M=min(128, triton.next_power_of_2(longest)), num_warps=4,
        )  # fmt: skip

    def shares(self, normaliser: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> P [Q, points of this run and zeros up to ALIGNMENT], its sums over Q and over the points, in fp32."""
        problem, logs = self._problem, self._problem.left_logs
        launch = problem.tiles.launch(width=problem.left.shape[1])
        captions_points = len(problem.right)
        stride = triton.cdiv(self._points, ALIGNMENT) * ALIGNMENT
        shares = problem.left.new_empty((captions_points, stride))
        left_sums = logs.new_empty((self._row_tiles, self._points))
        right_sums = logs.new_empty((self._column_tiles, captions_points))
        shares_kernel[(self._row_tiles * self._column_tiles,)](
            problem.left[self.points], problem.right, logs[self.points], problem.right_logs,
            self._owner, self._starts, problem.right_owner, normaliser.contiguous(), gradient.float().contiguous(),
            shares, left_sums, right_sums,
            problem.alpha, self._points, captions_points, len(problem.right_layout), stride, **launch,
        )  # fmt: skip
        return shares, left_sums.sum(dim=0), right_sums.sum(dim=0)


def _on_device(numbers: list[int], device: torch.device) -> Tensor:
    """Return int32 numbers on the device, without waiting for its queued work."""
    return torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)
