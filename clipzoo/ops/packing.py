"""Point sets packed without padding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

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


@dataclass(frozen=True)
class Packed:
    """The points of n samples without padding. points: [P, d]. log_weights: [P]. layout: their positions."""

    points: Tensor
    log_weights: Tensor
    layout: Layout

    def relative_logs(self) -> tuple[Tensor, Tensor]:
        """Log2 of the weights relative to each sample's largest [P], and the natural log of that largest [n]."""
        logs, owner = self.log_weights, self.layout.owner
        lowest = torch.finfo(logs.dtype).min
        largest = logs.new_full((len(self.layout),), lowest).scatter_reduce_(0, owner, logs, "amax")
        relative = (logs - largest.index_select(0, owner)) * math.log2(math.e)
        # A sample without points scores -inf for any finite value.
        return relative, largest.masked_fill_(largest == lowest, 0.0)


def pack(points: Tensor, log_weights: Tensor) -> Packed:
    """[n, M, d], [n, M] -> the points with a log-weight above -inf. Differentiable.

    Identical points of a sample become one with their total weight. NaN is not padding: it must appear in the score.
    """
    present = log_weights.detach() != float("-inf")
    # The points of each sample are ordered by a hash of the bits of their first coordinates: equal ones are adjacent.
    bits = points.detach()[:, :, :8].contiguous().view(torch.int32 if points.element_size() == 4 else torch.int64)
    factors = torch.arange(1, 2 * bits.shape[2], 2, device=bits.device) * 0x9E3779B97F4A7C1
    hashes, order = (bits * factors).sum(dim=2).sort(dim=1, stable=True)
    ordered_present = present.gather(1, order)
    # Where a point may equal its predecessor in this order.
    alike = torch.zeros_like(present)
    alike[:, 1:] = (hashes[:, 1:] == hashes[:, :-1]) & ordered_present[:, 1:] & ordered_present[:, :-1]
    # One synchronisation with the device, for the lengths and the number of points that may be identical.
    *lengths, repeated = torch.cat([present.sum(dim=1), alike.sum()[None]]).tolist()
    if repeated:
        points, log_weights = _without_duplicates(points, log_weights, order, alike)
        present = log_weights.detach() != float("-inf")
        lengths = present.sum(dim=1).tolist()
    layout, points, log_weights = without_padding(present, lengths, points, log_weights)
    return Packed(points, log_weights, layout)


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


def _without_duplicates(points: Tensor, log_weights: Tensor, order: Tensor, alike: Tensor) -> tuple[Tensor, Tensor]:
    """Give the first of identical points their total weight, and the others none."""
    samples, places = alike.nonzero(as_tuple=True)
    pairs = (points.detach()[samples, order[samples, places - shift]] for shift in (0, 1))
    same = alike.index_put((samples, places), torch.eq(*pairs).all(dim=1))
    place = torch.arange(same.shape[1], device=same.device).expand_as(order)
    leader = order.gather(1, place.masked_fill(same, 0).cummax(dim=1).values)
    leader = torch.empty_like(order).scatter_(1, order, leader)
    largest = torch.full_like(log_weights, -torch.inf).scatter_reduce(1, leader, log_weights.detach(), "amax")
    # Points without weight: -inf minus -inf would be NaN.
    largest = largest.clamp(min=torch.finfo(largest.dtype).min)
    weights = (log_weights - largest.gather(1, leader)).exp()
    totals = torch.zeros_like(weights).scatter_add(1, leader, weights)
    empty = totals == 0
    joint = (totals.masked_fill(empty, 1.0).log() + largest).masked_fill(empty, -torch.inf)
    # The gradient of a point is its share of the common point's gradient.
    shares = (weights / totals.gather(1, leader).clamp(min=torch.finfo(totals.dtype).tiny)).detach()
    place = leader[:, :, None].expand_as(points)
    return torch.zeros_like(points).scatter_add(1, place, shares[:, :, None] * points), joint
