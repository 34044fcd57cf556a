"""Point sets packed without padding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor


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
            run = list(samples)
            if self.starts[run[-1] + 1] > self.starts[run[0]]:
                yield Block(self, run[0], run[-1] + 1)


class Block:
    """Samples `first` to `last` of a layout: slices of its samples and points, and the segments of its samples."""

    def __init__(self, layout: Layout, first: int, last: int) -> None:
        start = layout.starts[first]
        self.samples = slice(first, last)
        self.points = slice(start, layout.starts[last])
        self.owner = layout.owner[self.points] - first
        self.count = last - first
        lengths = layout.lengths[first:last]
        self.length = lengths[0] if min(lengths) == max(lengths) else None
        self.segments = [
            (index, slice(layout.starts[first + index] - start, layout.starts[first + index + 1] - start))
            for index in range(self.count)
            if lengths[index]
        ]


def pack(points: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor, Layout]:
    """[n, M, d], [n, M] -> the points with a log-weight above -inf, [P, d] and [P], differentiable, and their layout.

    NaN is not padding: it must appear in the score.
    """
    samples, count, width = points.shape
    present = log_weights.detach() != float("-inf")
    lengths = present.sum(dim=1).tolist()
    owner = torch.arange(samples, device=points.device).repeat_interleave(count)
    points, log_weights = points.reshape(-1, width), log_weights.reshape(-1)
    if sum(lengths) < samples * count:
        index = present.reshape(-1).nonzero().squeeze(1)
        owner, points, log_weights = (tensor.index_select(0, index) for tensor in (owner, points, log_weights))
    return points, log_weights, Layout(lengths, list(accumulate(lengths, initial=0)), owner)


def relative_logs(log_weights: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Log-weights [P] -> their log2 relative to each sample's largest [P], and the natural log of that largest [n]."""
    lowest = torch.finfo(log_weights.dtype).min
    largest = log_weights.new_full((len(layout),), lowest).scatter_reduce_(0, layout.owner, log_weights, "amax")
    relative = (log_weights - largest.index_select(0, layout.owner)) * math.log2(math.e)
    # A sample without points scores -inf for any finite value.
    return relative, largest.masked_fill_(largest == lowest, 0.0)
