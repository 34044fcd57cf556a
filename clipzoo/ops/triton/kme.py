"""KME scores on GPUs: Triton's tiles of kernel values, the libraries' products for the gradient.

The precision of products follows `torch.get_float32_matmul_precision()`: see `tiles.TILES`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton
from torch import Tensor
from torch.nn import functional

from clipzoo.ops.packing import Layout, relative_logs
from clipzoo.ops.triton import kme_kernels as kernels
from clipzoo.ops.triton.tiles import current_tiles, library_product

PLAIN_LIMIT = 60.0
"""Up to this alpha no exponent of relative weights leaves fp32's range, as in `kme_cpu`."""
CHUNK_BYTES = 1 << 30
"""Bound of the memory between two kernels: partial sums forward, kernel values times gradients backward."""
ALIGNMENT = 16
_LOG2_E = math.log2(math.e)


def forward(
    left: Tensor,
    left_weights: Tensor,
    right: Tensor,
    right_weights: Tensor,
    gamma: Tensor,
    left_layout: Layout,
    right_layout: Layout,
) -> tuple[Tensor, Tensor]:
    """As `kme_cpu.forward`: packed points and log-weights -> S [n, k] and its normaliser for `backward`."""
    problem = _Problem(left, left_weights, right, right_weights, gamma, left_layout, right_layout)
    normaliser = left.new_full((len(left_layout), len(right_layout)), -math.inf)
    for part in problem.parts(bytes_of_a_point=8 * len(right)):
        part.sums(normaliser[part.samples])
    score = (normaliser - problem.alpha) / _LOG2_E + problem.left_largest[:, None] + problem.right_largest
    return score, normaliser


def backward(
    left: Tensor,
    left_weights: Tensor,
    right: Tensor,
    right_weights: Tensor,
    gamma: Tensor,
    left_layout: Layout,
    right_layout: Layout,
    normaliser: Tensor,
    gradient: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `kme_cpu.backward`. P is written for a bounded run of images at a time, then multiplied by the libraries."""
    problem = _Problem(left, left_weights, right, right_weights, gamma, left_layout, right_layout)
    d_left, d_left_weights = torch.zeros_like(left), torch.zeros_like(left_weights)
    d_right, d_right_weights = torch.zeros_like(right), torch.zeros_like(right_weights)
    pulls = left.new_zeros((), dtype=torch.float64)
    for part in problem.parts(bytes_of_a_point=problem.left.element_size() * len(right)):
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

    def __init__(
        self,
        left: Tensor,
        left_weights: Tensor,
        right: Tensor,
        right_weights: Tensor,
        gamma: Tensor,
        left_layout: Layout,
        right_layout: Layout,
    ) -> None:
        self.tiles = current_tiles()
        self.alpha = 2 * _LOG2_E * float(gamma)
        # Padding, which is multiplied by zeros: rows of P end on an aligned boundary.
        self.left = functional.pad(left.to(self.tiles.dtype), (0, 0, 0, ALIGNMENT))
        self.right = right.to(self.tiles.dtype).contiguous()
        self.left_logs, self.left_largest = relative_logs(left_weights, left_layout)
        self.right_logs, self.right_largest = relative_logs(right_weights, right_layout)
        self.left_layout, self.right_layout = left_layout, right_layout
        self.right_owner = right_layout.owner.int()
        self.right_starts = _on_device(right_layout.starts, right.device)

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
        kernels.partial_sums[(self._row_tiles * self._column_tiles,)](
            problem.left[self.points], problem.right, problem.left_logs[self.points], self._owner, self._starts, pieces,
            problem.alpha, self._points, len(problem.right), SHIFTED=problem.alpha > PLAIN_LIMIT, **launch,
        )  # fmt: skip
        captions = len(problem.right_layout)
        longest = max(problem.right_layout.lengths)
        kernels.sample_sums[(images, triton.cdiv(captions, 16))](
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
        kernels.shares[(self._row_tiles * self._column_tiles,)](
            problem.left[self.points], problem.right, logs[self.points], problem.right_logs,
            self._owner, self._starts, problem.right_owner, normaliser.contiguous(), gradient.float().contiguous(),
            shares, left_sums, right_sums,
            problem.alpha, self._points, captions_points, len(problem.right_layout), stride, **launch,
        )  # fmt: skip
        return shares, left_sums.sum(dim=0), right_sums.sum(dim=0)


def _on_device(numbers: list[int], device: torch.device) -> Tensor:
    """Return int32 numbers on the device, without waiting for its queued work."""
    return torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)
