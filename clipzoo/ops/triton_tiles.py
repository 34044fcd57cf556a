"""Tiles of the Triton kernels: sizes, the tile of a program, and products of vectors in a tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

ABSENT = tl.constexpr(-1e30)
"""Exponent of positions beyond the end: finite, so that products with 0 are 0 and differences are not NaN."""


@dataclass(frozen=True)
class Tiles:
    """Precision of products, size of a tile, and launch arguments.

    product: Triton's name of the precision. rows, columns: size of a tile. depth: width of the vectors per step.
    """

    dtype: torch.dtype
    product: str
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def launch(self, width: int) -> dict[str, object]:
        """Return the launch arguments that all kernels share; width: width of the vectors."""
        return {
            "WIDTH": width, "PRECISION": self.product, "UPCAST": triton.knobs.runtime.interpret, "GROUP": 8,
            "BLOCK_ROWS": self.rows, "BLOCK_COLUMNS": self.columns, "BLOCK_D": self.depth,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


TILES = {
    "medium": Tiles(torch.bfloat16, "ieee", 256, 128, 64, 8, 3),
    "high": Tiles(torch.float32, "tf32", 256, 128, 32, 8, 3),
    "highest": Tiles(torch.float32, "tf32x3", 128, 128, 32, 8, 2),
}
"""By `torch.get_float32_matmul_precision()`, like torch's own fp32 products on GPUs: bf16, tf32, three passes of tf32.

Accumulation, exponents and sums are always fp32. 256 x 128 in fp32 is half of a multiprocessor's registers.
"""


def current_tiles() -> Tiles:
    return TILES[torch.get_float32_matmul_precision()]


def narrow_tiles() -> Tiles:
    """Return tiles of at most 128 x 64, for kernels that hold several values of each pair in registers."""
    tiles = current_tiles()
    return replace(tiles, rows=min(tiles.rows, 128), columns=min(tiles.columns, 64))


def library_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in fp32, for operands of any precision."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


@triton.jit
def tile_scores(
    left_ptr, right_ptr, rows, columns, WIDTH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the row tile and column tile of this program, their rows and columns, and the products in the tile.

    See `products`. GROUP row tiles follow each other, so that operands stay in the cache. UPCAST is for Triton's
    interpreter, whose bf16 products are wrong.
    """
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_ROWS), tl.cdiv(columns, BLOCK_COLUMNS)
    group = program // (GROUP * column_tiles)
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = program % (GROUP * column_tiles)
    row_tile, column_tile = group * GROUP + within % size, within // size
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = products(
        left_ptr, right_ptr, row, column, rows, columns, WIDTH, PRECISION, UPCAST, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_D
    )
    return row_tile, column_tile, row, column, total


@triton.jit
def products(
    left_ptr, right_ptr, row, column, rows, columns, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """left[row] @ right[column].T, [BLOCK_ROWS, BLOCK_COLUMNS] in fp32; zero from `rows` and `columns` on."""
    depth = tl.arange(0, BLOCK_D)
    left_at = left_ptr + row.to(tl.int64)[:, None] * WIDTH + depth[None, :]
    right_at = right_ptr + column.to(tl.int64)[None, :] * WIDTH + depth[:, None]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for done in range(0, WIDTH, BLOCK_D):
        left_mask, right_mask = (row < rows)[:, None], (column < columns)[None, :]
        if WIDTH % BLOCK_D != 0:
            left_mask, right_mask = (
                left_mask & (depth < WIDTH - done)[None, :],
                right_mask & (depth < WIDTH - done)[:, None],
            )
        left = tl.load(left_at + done, mask=left_mask, other=0.0)
        right = tl.load(right_at + done, mask=right_mask, other=0.0)
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def negative(row, column, rows, columns, first, row_labels_ptr, column_labels_ptr, LABELED: tl.constexpr):
    """Mask of entries inside the matrix, without positives, or without pairs of equal labels if LABELED."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if LABELED:
        row_labels = tl.load(row_labels_ptr + row, mask=row < rows, other=0)
        column_labels = tl.load(column_labels_ptr + column, mask=column < columns, other=0)
        return inside & (column_labels[None, :] != row_labels[:, None])
    else:
        return inside & (column[None, :] != first + row[:, None])


@triton.jit
def store_tile(shares_ptr, tile, row_tile, row, column, rows, columns, BLOCK_ROWS: tl.constexpr):
    """Store a tile of a matrix [rows, columns] in the precision of the matrix."""
    place = tl.arange(0, BLOCK_ROWS)[:, None] * columns + column[None, :]
    tile_at = shares_ptr + (row_tile * BLOCK_ROWS).to(tl.int64) * columns
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(tile_at + place, tile.to(shares_ptr.dtype.element_ty), mask=mask)


CHUNK_BYTES = 1 << 28
"""Bound of the memory between the kernel that writes shares and the products that read them."""

Launch = Callable[[tuple[int], slice, Tensor], None]
"""Function of the launch grid, the slice of the rows, and shares [rows, N] to write."""


def gradients(left: Tensor, right: Tensor, tiles: Tiles, launch: Launch) -> tuple[Tensor, Tensor]:
    """Return the gradients of left [b, f] and right [N, f]. launch: writes that of a slice of rows of the products."""
    left_operand, right_operand = left.to(tiles.dtype), right.to(tiles.dtype)
    d_left, d_right = torch.empty_like(left), torch.zeros_like(right)
    size = max(1, CHUNK_BYTES // (len(right) * left_operand.element_size()))
    for start in range(0, len(left), size):
        part = slice(start, min(start + size, len(left)))
        shares = left_operand.new_empty(part.stop - start, len(right))
        grid = (triton.cdiv(len(shares), tiles.rows) * triton.cdiv(len(right), tiles.columns),)
        launch(grid, part, shares)
        d_left[part] = library_product(shares, right_operand)
        d_right += library_product(shares.mT, left_operand[part])
    return d_left, d_right
