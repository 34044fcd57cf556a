"""Triton kernel of FILIP's maxima.

A program compares the tokens of one image, a chunk at a time, with a block of whole captions. Rows are tokens of
captions, whose running maxima stay in registers; a chunk's maxima over the tokens of each caption are stored at once.
There are no atomics: results are deterministic.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from clipzoo.ops import filip
from clipzoo.ops.tiles import Layout
from clipzoo.ops.triton_tiles import ABSENT, narrow_tiles, products

LONGEST_CAPTION = 512
"""Tokens of the longest caption that fits into a tile."""


@triton.jit
def largest_kernel(
    x_ptr, y_ptr, x_starts_ptr, y_starts_ptr, block_starts_ptr,
    to_text_ptr, to_image_ptr, best_text_ptr, best_image_ptr, blocks, captions, tokens,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, CAPTIONS: tl.constexpr,
):  # fmt: skip
    """Sums of maxima over the tokens of an image and of each caption of a block, and the positions of the maxima.

    block_starts: the first caption of each block, at most CAPTIONS with BLOCK_ROWS tokens, and the end.
    """
    image, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    first, last = tl.load(block_starts_ptr + block), tl.load(block_starts_ptr + block + 1)
    begin, end = tl.load(y_starts_ptr + first), tl.load(y_starts_ptr + last)
    start, stop = tl.load(x_starts_ptr + image), tl.load(x_starts_ptr + image + 1)
    row, slot = begin + tl.arange(0, BLOCK_ROWS), tl.arange(0, CAPTIONS)
    largest = tl.full([BLOCK_ROWS], ABSENT, tl.float32)
    position = tl.zeros([BLOCK_ROWS], tl.int32)
    sums = tl.zeros([CAPTIONS], tl.float32)
    for chunk in range(start, stop, BLOCK_COLUMNS):
        column = chunk + tl.arange(0, BLOCK_COLUMNS)
        inside = column < stop
        tile = products(
            y_ptr, x_ptr, row, column, end, stop, WIDTH, PRECISION, UPCAST, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_D
        )
        of_image = tl.where(inside[None, :], tile, ABSENT)
        best = tl.max(of_image, axis=1)
        position = tl.where(best > largest, chunk - start + tl.argmax(of_image, axis=1), position)
        largest = tl.maximum(best, largest)
        for caption in range(first, last):
            low, high = tl.load(y_starts_ptr + caption), tl.load(y_starts_ptr + caption + 1)
            of_caption = tl.where(((row >= low) & (row < high))[:, None], tile, ABSENT)
            total = tl.sum(tl.where(inside, tl.max(of_caption, axis=0), 0.0))
            sums = tl.where(slot == caption - first, sums + total, sums)
            place = tl.argmax(of_caption, axis=0) + begin - low
            at = best_text_ptr + column.to(tl.int64) * captions + caption
            tl.store(at, place.to(best_text_ptr.dtype.element_ty), mask=inside)
    stored = first + slot < last
    tl.store(to_text_ptr + image * captions + first + slot, sums, mask=stored)
    at = best_image_ptr + image * tokens + row
    tl.store(at, position.to(best_image_ptr.dtype.element_ty), mask=row < end)
    for caption in range(first, last):
        low, high = tl.load(y_starts_ptr + caption), tl.load(y_starts_ptr + caption + 1)
        total = tl.sum(tl.where((row >= low) & (row < high), largest, 0.0))
        sums = tl.where(slot == caption - first, total, sums)
    tl.store(to_image_ptr + image * captions + first + slot, sums, mask=stored)


def filip_forward(left: Tensor, right: Tensor, of_images: Layout, of_texts: Layout, *results: Tensor) -> None:
    """As `filip.filip_forward`; products follow `torch.get_float32_matmul_precision()`."""
    longest = max(of_texts.lengths, default=0)
    if longest > LONGEST_CAPTION:
        filip.filip_forward(left, right, of_images, of_texts, *results)
        return
    tiles = narrow_tiles()
    tiles = replace(tiles, rows=max(tiles.rows, triton.next_power_of_2(longest)))
    block_starts, filled = [0], 0
    for caption, length in enumerate(of_texts.lengths):
        if filled + length > tiles.rows:
            block_starts.append(caption)
            filled = 0
        filled += length
    block_starts.append(len(of_texts))
    captions = max(stop - start for start, stop in zip(block_starts[:-1], block_starts[1:], strict=True))
    starts = (
        torch.tensor(numbers, dtype=torch.int32).to(left.device, non_blocking=True)
        for numbers in (of_images.starts, of_texts.starts, block_starts)
    )
    blocks = len(block_starts) - 1
    # A maximum ignores NaN; a sample with NaN gets it from its own sum.
    broken = [
        left.new_zeros(len(layout)).index_add_(0, layout.owner, 0.0 * points.sum(dim=1))
        for points, layout in ((left, of_images), (right, of_texts))
    ]
    largest_kernel[(len(of_images) * blocks,)](
        left.to(tiles.dtype).contiguous(), right.to(tiles.dtype).contiguous(), *starts, *results,
        blocks, len(of_texts), len(right),
        CAPTIONS=triton.next_power_of_2(captions), **tiles.launch(width=left.shape[1]),
    )  # fmt: skip
    for sums in results[:2]:
        sums += broken[0][:, None] + broken[1]
