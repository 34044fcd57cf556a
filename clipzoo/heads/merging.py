"""Merge nearby points of a weighted set, an approximation that makes KME-CLIP's score cheaper.

A group of points of weights w_i becomes one of weight sum w_i at their weighted mean. By Jensen's inequality the score
is never higher than the exact one; it is lower by at most (gamma D)^2 / 2 for groups of diameter D (Hoeffding's lemma).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

from clipzoo.types import PointSet


def merged(points: PointSet, count: int) -> PointSet:
    """[b, M, d] -> [b, min(M, count), d]: in rounds, the even points nearest to an odd one join it.

    Differentiable in points and weights; the choice of the groups has no gradient. A round merges at most half of the
    points (bipartite matching as in ToMe, Bolya et al. 2023).
    """
    if points.points.shape[1] <= count:
        return points
    return PointSet(*_joined(points.points, points.log_weights, groups(points, count), count))


def groups(points: PointSet, count: int) -> Tensor:
    """Return the group of each point, [b, M], 0 to count - 1. There are more than `count` points, unit vectors."""
    exact = points.points.detach(), points.log_weights.detach()
    units, log_weights = exact
    owner = torch.arange(units.shape[1], device=units.device).expand_as(log_weights)
    while True:
        remaining = max(count, units.shape[1] - units.shape[1] // 2)
        owner = _groups(units, log_weights, units.shape[1] - remaining).gather(1, owner)
        if remaining == count:
            return owner
        means, log_weights = _joined(*exact, owner, remaining)
        units = normalize(means, dim=-1)


def _joined(vectors: Tensor, log_weights: Tensor, owner: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Points of the groups: weighted means and log total weights. owner: [b, M], the group of each point, none empty.

    Sums of weighted rows read each point once; a product with a matrix [count, M] per sample took twice as long.
    """
    samples, _, width = vectors.shape
    first = torch.arange(samples, device=owner.device)[:, None]
    group = (owner + count * first).flatten()
    ordered, members = group.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(samples * count, device=owner.device))
    logs = log_weights.flatten()
    # The bound is for groups without present points: -inf minus -inf would be NaN.
    largest = embedding_bag(members, logs.detach()[:, None], starts, mode="max").squeeze(1)
    largest = largest.clamp(min=torch.finfo(logs.dtype).min)
    weights = (logs - largest[group]).exp()
    totals = embedding_bag(members, weights[:, None], starts, mode="sum").squeeze(1)
    present = totals > 0
    totals = totals.where(present, 1.0)
    shares = (weights / totals[group])[members]
    means = embedding_bag(members, vectors.reshape(-1, width), starts, mode="sum", per_sample_weights=shares)
    joint = (totals.log() + largest).masked_fill(~present, -torch.inf)
    return means.view(samples, count, width), joint.view(samples, count)


def spread(points: PointSet) -> Tensor:
    """Weighted mean over all samples of 1 - |x|^2: of merged unit points, their mean squared distance from the mean."""
    weights = points.log_weights.softmax(dim=1)
    return (weights * (1 - points.points.square().sum(dim=2))).sum(dim=1).mean()


def _groups(units: Tensor, log_weights: Tensor, count: int) -> Tensor:
    """[b, M, d], [b, M] -> groups [b, M], 0 to M - count - 1: `count` even points join their nearest odd one."""
    cosines = units[:, ::2] @ units[:, 1::2].mT
    absent = log_weights == -torch.inf
    # Absent points join any other first: this changes nothing.
    best, partner = cosines.masked_fill(absent[:, 1::2].unsqueeze(1), -2.0).max(dim=2)
    order = best.masked_fill(absent[:, ::2], torch.inf).argsort(dim=1, descending=True)
    joining, kept = order[:, :count], order[:, count:]
    evens, odds = cosines.shape[1:]
    # Groups: the odd points, then the even points that stay.
    group = torch.empty_like(order).scatter_(1, joining, partner.gather(1, joining))
    group.scatter_(1, kept, torch.arange(odds, odds + evens - count, device=order.device).expand_as(kept))
    owner = torch.empty_like(absent, dtype=torch.int64)
    owner[:, ::2], owner[:, 1::2] = group, torch.arange(odds, device=order.device)
    return owner
