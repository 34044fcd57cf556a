"""Gradients of vectors from those of their products: Triton writes them for some rows, the libraries multiply."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from clipzoo.ops.triton.tiles import Tiles, library_product

CHUNK_BYTES = 1 << 28
"""Bound of the memory between the kernel that writes shares and the products that read them."""

Launch = Callable[[tuple[int], slice, Tensor], None]
"""Function of the launch grid, the slice of the rows, and shares [rows, N] to write."""


def gradients(left: Tensor, right: Tensor, tiles: Tiles, launch: Launch) -> tuple[Tensor, Tensor]:
    """Return the gradients of left [b, f] and right [N, f]. launch: writes that of some rows of the products."""
    own, other = left.to(tiles.dtype), right.to(tiles.dtype)
    d_left, d_right = torch.empty_like(left), torch.zeros_like(right)
    size = max(1, CHUNK_BYTES // (len(right) * own.element_size()))
    for start in range(0, len(left), size):
        part = slice(start, min(start + size, len(left)))
        shares = own.new_empty(part.stop - start, len(right))
        grid = (triton.cdiv(len(shares), tiles.rows) * triton.cdiv(len(right), tiles.columns),)
        launch(grid, part, shares)
        d_left[part] = library_product(shares, other)
        d_right += library_product(shares.mT, own[part])
    return d_left, d_right
