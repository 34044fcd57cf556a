"""The score of two weighted point sets: log of the inner product of their kernel mean embeddings (KME-CLIP).

    S[b, c] = log sum_ij exp( log_weights[b, i] + log_weights'[c, j] - 2 gamma (1 - points[b, i] . points'[c, j]) )

At most two tiles of kernel values are in memory at a time, forward or backward; points with a log-weight of -inf are
skipped. The reference implementation is `kme_score_reference`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipzoo.ops.tiles import Block, Layout, backend, product, tile_side, without_padding


def kme_score_reference(
    points: Tensor, log_weights: Tensor, points2: Tensor, log_weights2: Tensor, gamma: Tensor
) -> Tensor:
    """[n, M, d], [n, M], [k, M', d], [k, M'] -> S [n, k], with all pairs of points in memory.

    log sum_ij w_i w'_j exp(-gamma |v_i - u_j|^2) (KME-CLIP, eq. 3) for unit vectors.
    """
    cosines = points.flatten(0, 1) @ points2.flatten(0, 1).mT  # [n M, k M']
    # |v - u|^2 = 2 (1 - v.u)
    exponents = 2 * gamma * (cosines - 1) + log_weights.flatten()[:, None] + log_weights2.flatten()
    return exponents.view(*log_weights.shape, *log_weights2.shape).logsumexp(dim=(1, 3))


def kme_score(
    image_points: Tensor, image_log_weights: Tensor, text_points: Tensor, text_log_weights: Tensor, gamma: Tensor
) -> Tensor:
    """Unit points [n, M, d] with log-weights [n, M], points [k, M', d] with [k, M'], gamma [] > 0 -> S [n, k].

    Differentiable in all arguments. A set without points scores -inf. Half-precision inputs are scored in fp32.
    """
    image_points, image_log_weights, text_points, text_log_weights, gamma = (
        tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
        for tensor in (image_points, image_log_weights, text_points, text_log_weights, gamma)
    )
    if torch.compiler.is_exporting():
        return kme_score_reference(image_points, image_log_weights, text_points, text_log_weights, gamma)
    left, right = pack(image_points, image_log_weights), pack(text_points, text_log_weights)
    tensors = left.points, left.log_weights, right.points, right.log_weights, gamma
    return _Score.apply(*tensors, left.layout, right.layout)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, left: Tensor, left_weights: Tensor, right: Tensor, right_weights: Tensor, gamma: Tensor,
        left_layout: Layout, right_layout: Layout,
    ) -> Tensor:  # fmt: skip
        kernels = backend("kme", left.device.type, left.dtype)
        sides = Packed(left, left_weights, left_layout), Packed(right, right_weights, right_layout)
        score, *saved = kernels.kme_forward(*sides, gamma)
        context.save_for_backward(left, left_weights, right, right_weights, gamma, *saved)
        context.kernels, context.layouts = kernels, (left_layout, right_layout)
        return score

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        left, left_weights, right, right_weights, gamma, normaliser, *tile = context.saved_tensors
        left_layout, right_layout = context.layouts
        sides = Packed(left, left_weights, left_layout), Packed(right, right_weights, right_layout)
        return *context.kernels.kme_backward(*sides, gamma, normaliser, gradient, *tile), None, None


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


# Scores in tiles of torch operations, on CPUs. Kernel values are recomputed for the gradient.
#
# Exponents are in base 2: torch's exp2 costs a fifth of its exp on CPUs. With alpha = 2 gamma log2(e) the kernel is
# k_ij = 2^(alpha (x_i . y_j - 1)). A tile is computed in one of two ways:
# - plain, alpha <= 60: 2^(alpha x . y) is in [2^-60, 2^60]; it and its quotients by a score stay in the range of fp32,
#   so weights (relative to each sample's largest) are applied by matrix-vector products outside the tile;
# - shifted, any alpha: weights join the exponent, and the largest exponent of each (sample, point) is subtracted.

_TILE = tile_side()
PLAIN_LIMIT = 60.0
"""Up to this alpha no exponent of relative weights leaves fp32's range."""
LOG2_E = math.log2(math.e)


def kme_forward(left: Packed, right: Packed, gamma: Tensor) -> tuple[Tensor, ...]:
    """n and k samples -> S [n, k], and tensors for `kme_backward`.

    These are log2 of the sums relative to the largest weights, in fp64 because they must agree with recomputed tiles to
    more digits than fp32 has for a large exponent, and the first tile of a plain pass, which saves its recomputation.
    """
    alpha = 2 * LOG2_E * float(gamma)
    (left_logs, left_largest), (right_logs, right_largest) = left.relative_logs(), right.relative_logs()
    normaliser = left.points.new_full((len(left.layout), len(right.layout)), float("-inf"), dtype=torch.float64)
    column_blocks = list(right.layout.blocks(_TILE))
    first_tile: tuple[Tensor, ...] = ()
    for rows in left.layout.blocks(_TILE):
        scaled = alpha * left.points[rows.points]
        for columns in column_blocks:
            # [p, q] -> log2 of the weighted sums [samples of rows, samples of columns].
            tile = product(scaled, right.points[columns.points])
            if alpha <= PLAIN_LIMIT:
                tile.exp2_()
                first_tile = first_tile or (tile,)
                weights = left_logs[rows.points].exp2()
                if rows.length:
                    parts = tile.view(rows.count, rows.length, -1)
                    over_rows = torch.bmm(weights.view(rows.count, 1, -1), parts).squeeze(1)
                else:
                    over_rows = tile.new_zeros(rows.count, tile.shape[1])
                    for sample, points in rows.segments:
                        over_rows[sample] = weights[points] @ tile[points]
                over_rows = over_rows * right_logs[columns.points].exp2()
                sums = tile.new_zeros(rows.count, columns.count).index_add_(1, columns.owner, over_rows)
                normaliser[rows.samples, columns.samples] = sums.double().log2_()
            else:
                tile += left_logs[rows.points, None]
                over_rows = tile.new_full((rows.count, tile.shape[1]), float("-inf"), dtype=torch.float64)
                for part, sample_sums in _sections(rows, tile, over_rows):
                    largest = part.amax(dim=-2, keepdim=True)
                    part.sub_(largest).exp2_()
                    sample_sums.copy_(part.sum(dim=-2, keepdim=True).log2_().double().add_(largest))
                over_rows += right_logs[columns.points]
                # The bound is for samples without points: -inf minus -inf would be NaN.
                largest = over_rows.new_full((rows.count, columns.count), torch.finfo(tile.dtype).min)
                largest.scatter_reduce_(1, columns.owner.expand(rows.count, -1), over_rows, "amax")
                over_rows = over_rows.sub_(largest.index_select(1, columns.owner)).exp2_()
                sums = torch.zeros_like(largest).index_add_(1, columns.owner, over_rows)
                normaliser[rows.samples, columns.samples] = sums.log2_().add_(largest)
    score = (normaliser - alpha) / LOG2_E + left_largest[:, None] + right_largest
    return score.to(left.points.dtype), normaliser, *first_tile


def kme_backward(
    left: Packed, right: Packed, gamma: Tensor, normaliser: Tensor, gradient: Tensor, first_tile: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of both sides' points and log-weights and of gamma, from S's normaliser and gradient, both [n, k].

    With pi_ij = exp(exponent_ij - S) times S's gradient: d log w_i = sum_j pi_ij, dx_i = 2 gamma sum_j pi_ij y_j, and
    d gamma = 2 sum_ij pi_ij (x_i . y_j - 1), whose first term is the inner product of x with its own gradient.
    """
    alpha = 2 * LOG2_E * float(gamma)
    (left_logs, _), (right_logs, _) = left.relative_logs(), right.relative_logs()
    plain = alpha <= PLAIN_LIMIT
    # P of plain tiles has no weights: they multiply the narrow factors here and the results below.
    left_outer, right_outer = (logs.exp2() if plain else torch.ones_like(logs) for logs in (left_logs, right_logs))
    right_factor = right_outer[:, None] * right.points if plain else right.points
    d_left, d_left_weights, d_right_weights = (
        torch.zeros_like(tensor) for tensor in (left.points, left.log_weights, right.log_weights)
    )
    d_right = right.points.new_zeros(right.points.shape[::-1])
    d_gamma = 0.0
    column_blocks = list(right.layout.blocks(_TILE))
    row_blocks = list(left.layout.blocks(_TILE))
    for rows in row_blocks:
        block, outer = left.points[rows.points], left_outer[rows.points]
        d_block, d_weights = d_left[rows.points], d_left_weights[rows.points]
        scaled, factor = alpha * block, (outer[:, None] * block if plain else block).mT.contiguous()
        for columns in column_blocks:
            if first_tile is not None and rows is row_blocks[0] and columns is column_blocks[0]:
                tile = first_tile.clone()  # backward may be called again
            else:
                tile = product(scaled, right.points[columns.points])
                if plain:
                    tile.exp2_()
            # The tile becomes P: the share of each pair of points in its score, times the score's gradient.
            pair_normaliser = normaliser[rows.samples, columns.samples]
            pair_gradient = gradient[rows.samples, columns.samples]
            if plain:
                coefficient = (pair_gradient * (-pair_normaliser).exp2()).to(tile.dtype)
                for part, sample_factors in _sections(rows, tile, coefficient.index_select(1, columns.owner)):
                    part *= sample_factors
            else:
                tile += left_logs[rows.points, None]
                # Subtracted in two steps: the rounded normaliser cancels large exponents exactly; then its remainder.
                rounded = pair_normaliser.to(tile.dtype)
                remainder = (pair_normaliser - rounded).to(tile.dtype).index_select(1, columns.owner)
                shifts = right_logs[columns.points] - remainder
                rounded, factors = (pairs.index_select(1, columns.owner) for pairs in (rounded, pair_gradient))
                for part, subtracted, shift, sample_factors in _sections(rows, tile, rounded, shifts, factors):
                    part.sub_(subtracted).add_(shift).exp2_().mul_(sample_factors)
            d_block.add_(product(tile, right_factor[columns.points].mT))
            d_right[:, columns.points].add_(product(factor, tile.mT))
            d_weights.addmv_(tile, right_outer[columns.points])
            d_right_weights[columns.points].addmv_(tile.mT, outer)
        d_block.mul_(outer[:, None])
        d_weights.mul_(outer)
        # fp64: the two terms of the sum nearly cancel if the points that dominate it are close.
        d_gamma += 2 * float((torch.linalg.vecdot(d_block, block) - d_weights).sum(dtype=torch.float64))
    d_left *= 2 * float(gamma)
    d_right *= 2 * float(gamma) * right_outer
    d_right_weights *= right_outer
    return d_left, d_left_weights, d_right.mT, d_right_weights, torch.full_like(gamma, d_gamma)


def _sections(rows: Block, tile: Tensor, *per_sample: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the rows of each sample in a tile [p, q] and the sample's rows of [samples, q], as broadcasting views.

    Samples of equal length are one section, [samples, length, q] and [samples, 1, q].
    """
    if rows.length:
        yield tile.view(rows.count, rows.length, -1), *(values[:, None] for values in per_sample)
    else:
        for sample, points in rows.segments:
            yield tile[points], *(values[sample, None] for values in per_sample)
