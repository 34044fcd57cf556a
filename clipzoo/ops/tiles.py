"""Shared parts of operations: choice of an implementation, fp32 products, tiles of torch operations and their size."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


@cache
def backend(operations: str, device: str, dtype: torch.dtype) -> ModuleType:
    """Return the module `triton_<operations>` for fp32 on a GPU, else `<operations>`, with a warning on a GPU.

    operations: "sums" or "kme". Where Triton interprets its kernels (TRITON_INTERPRET=1), a CPU counts as a GPU.
    """
    if device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        try:
            kernels = import_module(f"clipzoo.ops.triton_{operations}")
        except ImportError as error:
            reason = str(error)
        else:
            if dtype == torch.float32:
                return kernels
            reason = f"there are no kernels for {dtype}"
        _log.warning("%s runs in blocks of torch operations, slower than Triton's kernels: %s", operations, reason)
    return import_module(f"clipzoo.ops.{operations}")


# torch computes fp32 products on CPUs with MKL, whose AVX-512 kernels are for Intel's processors only; oneDNN was 2.2
# times as fast on a Zen 5. `torch.set_float32_matmul_precision("medium")` also selects oneDNN, but for the whole
# process, and on processors with bf16 products it is no longer fp32. Here no global state changes, and a test product
# shows once that the result is true fp32.


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """[m, k], [n, k] -> left @ right.mT [m, n] (+ bias [n]), without gradient; operands may have any layout."""
    if left.dtype == torch.float32 and left.device.type == "cpu" and left.numel() and right.numel() and _onednn_works():
        bias = None if bias is None else bias.contiguous()  # oneDNN ignores its stride
        return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return left @ right.mT if bias is None else torch.addmm(bias, left, right.mT)


@cache
def _onednn_works() -> bool:
    """Return True if this build of torch has oneDNN's product and it is true fp32, compared with a float64 product."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(48, 160, generator=generator), torch.randn(80, 160, generator=generator)
    try:
        result = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError) as error:
        _log.info("oneDNN's product is not available (%s): the blocked kernels use torch.matmul", error)
        return False
    exact = left.double() @ right.double().mT
    relative = float((result - exact).abs().max() / exact.abs().max())
    if relative > 2e-6:
        _log.info("oneDNN's product is not true fp32 here (%.0e): the blocked kernels use torch.matmul", relative)
        return False
    return True


Shares = Callable[[Tensor, slice, slice], Tensor]
"""Function of a tile and the slices of its rows and columns -> gradient of the loss with respect to the tile."""


def tiles(
    left: Tensor, right: Tensor, tile: int, scale: float = 1.0, bias: Tensor | None = None
) -> Iterator[tuple[Tensor, slice, slice]]:
    """Yield tiles of scale * left @ right.mT + bias [], and the slices of their rows and columns.

    A tile may be overwritten.
    """
    biases = None if bias is None else bias.to(left.dtype).expand(min(tile, len(right))).contiguous()
    for start in range(0, len(left), tile):
        rows = slice(start, min(start + tile, len(left)))
        scaled = left[rows] if scale == 1 else scale * left[rows]
        for begin in range(0, len(right), tile):
            columns = slice(begin, min(begin + tile, len(right)))
            shift = None if biases is None else biases[: columns.stop - begin]
            yield product(scaled, right[columns], shift), rows, columns


def positives(values: Tensor, rows: slice, columns: slice, first: int) -> Tensor:
    """Return a view of the positives in a tile: row i of the product has its positive in column first + i."""
    offset = first + rows.start - columns.start
    return values.diagonal(offset) if -values.shape[0] < offset < values.shape[1] else values[:0, 0]


LeftOut = int | tuple[Tensor, Tensor]
"""First positive, or labels of rows and columns: see `sums`."""


def leave_out(values: Tensor, rows: slice, columns: slice, left_out: LeftOut) -> None:
    """Overwrite the positives of a tile, or its pairs of equal labels, with -inf."""
    if isinstance(left_out, int):
        positives(values, rows, columns, left_out).fill_(-math.inf)
    else:
        values.masked_fill_(left_out[0][rows, None] == left_out[1][columns], -math.inf)


def gradients(
    left: Tensor, right: Tensor, tile: int, shares: Shares, scale: float = 1.0, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of left and right. shares: of the unscaled products."""
    d_left, d_right = torch.zeros_like(left), right.new_zeros(right.shape[::-1])
    transposed = left
    for scores, rows, columns in tiles(left, right, tile, scale, bias):
        if columns.start == 0:
            # Once for all tiles of the rows: a product with a transposed first factor takes a fifth longer.
            transposed = left[rows].mT.contiguous()
        share = shares(scores, rows, columns)
        d_left[rows].add_(product(share, right[columns].mT))
        d_right[:, columns].add_(product(transposed, share.mT))
    return d_left, d_right.mT


def tile_side(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the side of a square tile in fp32 that takes a fifth of the CPU's largest cache, 640 to 1280.

    The rest of the cache is for vectors and products of the tile. Between the bounds all sizes are within 5 % on a
    cache of 32 MiB; 320 takes 16 to 20 % longer. Where Linux reports no cache, 1280.
    """
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = []
    for file in caches.glob("index*/size"):
        with suppress(OSError):
            text = file.read_text().strip()
            if text[:-1].isdigit() and text[-1] in units:
                sizes.append(int(text[:-1]) * units[text[-1]])
    return min(max(math.isqrt(max(sizes) // (5 * 4)) // 64 * 64, 640), 1280) if sizes else 1280


# Point sets without padding, whose tiles are blocks of whole samples.


@dataclass(frozen=True)
class Layout:
    """Positions of the points of n samples in a packed array of P points.

    lengths: numbers of points of the samples. starts: n + 1 offsets. owner: [P] int64, the sample of each point.
    """

    lengths: list[int]
    starts: list[int]
    owner: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def blocks(self, points: int) -> Iterator[Block]:
        """Yield the fewest blocks of consecutive whole samples, evenly sized, of about `points` points."""
        total = self.starts[-1]
        count = -(-total // points)
        centre = [(start + end) / 2 for start, end in pairwise(self.starts)]
        for _, samples in groupby(range(len(self)), key=lambda sample: int(centre[sample] * count / max(total, 1))):
            indices = list(samples)
            if self.starts[indices[-1] + 1] > self.starts[indices[0]]:
                yield Block(self, indices[0], indices[-1] + 1)


class Block:
    """Samples `first` to `last` of a layout: slices of its samples and points, and where each sample's points are."""

    def __init__(self, layout: Layout, first: int, last: int) -> None:
        start = layout.starts[first]
        self.samples = slice(first, last)
        self.points = slice(start, layout.starts[last])
        self.owner = layout.owner[self.points] - first
        # [samples], the first point of each; for one without points any point of the block.
        starts = [min(first_point - start, len(self.owner) - 1) for first_point in layout.starts[first:last]]
        self.starts = torch.tensor(starts).to(self.owner, non_blocking=True)
        self.count = last - first
        lengths = layout.lengths[first:last]
        self.length = lengths[0] if min(lengths) == max(lengths) else None
        self.segments = [
            (index, slice(layout.starts[first + index] - start, layout.starts[first + index + 1] - start))
            for index in range(self.count)
            if lengths[index]
        ]


def without_padding(present: Tensor, lengths: list[int], *values: Tensor) -> tuple[Any, ...]:
    """Layout of the places of `present` [n, M], and values [n, M, ...] at those places [P, ...].

    lengths: numbers of those places of the samples, the sums of the rows of `present`.
    """
    owner = torch.arange(len(present), device=present.device).repeat_interleave(present.shape[1])
    packed = [owner, *(tensor.flatten(0, 1) for tensor in values)]
    if sum(lengths) < len(owner):
        index = present.flatten().nonzero().squeeze(1)
        packed = [tensor.index_select(0, index) for tensor in packed]
    return Layout(lengths, list(accumulate(lengths, initial=0)), packed[0]), *packed[1:]
