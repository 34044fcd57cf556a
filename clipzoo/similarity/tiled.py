"""Scores of vectors without their matrix: statistics of tiles, computed again for the gradient.

Objectives that need only positives and log-sum-exps (InfoNCE, InfoLOOB, conditional, joint) then need memory for one
tile instead of [b, N] several times over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipzoo import distributed
from clipzoo.ops.products import product
from clipzoo.types import Scores

_LOG2_E = math.log2(math.e)


def tiled_scores(left: Tensor, right: Tensor, tile: int) -> tuple[Scores, Scores]:
    """Factors [b, f] of the local images and texts, score = left . right -> image_to_text and text_to_image.

    One pass over tiles of `tile` x `tile` scores serves both directions. Each rank passes over its own images and all
    texts, and of text_to_image's sums only the ranks' parts travel.
    """
    pairs = _Pairs(left, right, tile)
    return _ImageToText(pairs), _TextToImage(pairs)


def tiled_anchors(left: Tensor, right: Tensor, tile: int) -> Scores:
    """Factors [b, f] of local anchors and local contrasts -> anchors against all ranks' contrasts, one direction."""
    return _ImageToText(_Pairs(left, right, tile, one_direction=True))


class _Pairs:
    """What the two directions share."""

    def __init__(self, left: Tensor, right: Tensor, tile: int, one_direction: bool = False) -> None:
        self._left, self._right, self._tile, self._one_direction = left, right, tile, one_direction
        self._all_right = distributed.gather(right)
        self.first_positive = distributed.rank() * len(left)
        self.columns = len(self._all_right)

    @cached_property
    def positives(self) -> Tensor:
        """[b]"""
        return (self._left * self._right).sum(dim=1)

    @cached_property
    def excluded(self) -> tuple[Tensor, Tensor]:
        """[b], [b]: log-sum-exps without the positive, of the local images over all texts and the other way round."""
        rows, columns = _LogSumExps.apply(
            self._left, self._all_right, self.first_positive, self._tile, not self._one_direction
        )
        # [N] over the local images -> [ranks, b] for the local texts over each rank's images.
        parts = distributed.exchange(columns.unflatten(0, (-1, len(self._left))))
        return rows, reduce(torch.logaddexp, parts)

    @cached_property
    def matrix(self) -> Tensor:
        """[b, N]"""
        return self._left @ self._all_right.mT


class _TiledScores(Scores):
    def __init__(self, pairs: _Pairs) -> None:
        self._pairs = pairs

    def positives(self) -> Tensor:
        return self._pairs.positives

    def log_sum_exp(self, *, exclude_positive: bool = False) -> Tensor:
        excluded = self._excluded()
        return excluded if exclude_positive else torch.logaddexp(excluded, self._pairs.positives)

    def _excluded(self) -> Tensor:
        raise NotImplementedError

    @property
    def first_positive(self) -> int:
        return self._pairs.first_positive

    @property
    def columns(self) -> int:
        return self._pairs.columns


class _ImageToText(_TiledScores):
    def _excluded(self) -> Tensor:
        return self._pairs.excluded[0]

    def dense(self) -> Tensor:
        return self._pairs.matrix


class _TextToImage(_TiledScores):
    def _excluded(self) -> Tensor:
        return self._pairs.excluded[1]

    def dense(self) -> Tensor:
        return distributed.transposed(self._pairs.matrix)


class _LogSumExps(torch.autograd.Function):
    """left [b, f], right [N, f] -> log-sum-exps over the rows [b] and over the columns [N] of left @ right.mT.

    Row i's positive, in column first + i, is left out of both. Exponents are in base 2, cheaper on CPUs.
    """

    @staticmethod
    def forward(
        context: Any, left: Tensor, right: Tensor, first: int, tile: int, with_columns: bool
    ) -> tuple[Tensor, Tensor]:
        rows, columns = left.new_full((len(left),), -math.inf), left.new_full((len(right),), -math.inf)
        for scores, part, other in _tiles(left, right, first, tile):
            rows[part] = torch.logaddexp2(rows[part], _log2_sum_exp2(scores, dim=1))
            if with_columns:
                columns[other] = torch.logaddexp2(columns[other], _log2_sum_exp2(scores, dim=0))
        context.save_for_backward(left, right, rows, columns)
        context.arguments = first, tile, with_columns
        return rows / _LOG2_E, columns / _LOG2_E

    @staticmethod
    @once_differentiable
    def backward(context: Any, d_rows: Tensor, d_columns: Tensor) -> tuple[Tensor | None, ...]:
        left, right, rows, columns = context.saved_tensors
        first, tile, with_columns = context.arguments
        # Nothing but the positive in a row: -inf less -inf would be NaN where the gradient is zero.
        rows, columns = (each.clamp(min=torch.finfo(each.dtype).min) for each in (rows, columns))
        d_left, d_right = torch.zeros_like(left), right.new_zeros(right.shape[::-1])
        for scores, part, other in _tiles(left, right, first, tile):
            shares = (scores - rows[part, None]).exp2_().mul_(d_rows[part, None])
            if with_columns:
                shares += scores.sub_(columns[other]).exp2_().mul_(d_columns[other])
            d_left[part] += product(shares, right[other].mT)
            d_right[:, other] += product(left[part].mT, shares.mT)
        return d_left, d_right.mT, None, None, None


def _tiles(left: Tensor, right: Tensor, first: int, tile: int) -> Iterator[tuple[Tensor, slice, slice]]:
    """log2(e) times each tile of left @ right.mT, positives -inf, with its rows and its columns."""
    for start in range(0, len(left), tile):
        rows = slice(start, min(start + tile, len(left)))
        scaled = _LOG2_E * left[rows]
        for begin in range(0, len(right), tile):
            columns = slice(begin, min(begin + tile, len(right)))
            scores = product(scaled, right[columns])
            # The tile's diagonal that holds positives, where it crosses the tile at all.
            offset = first + start - begin
            if -scores.shape[0] < offset < scores.shape[1]:
                scores.diagonal(offset).fill_(-math.inf)
            yield scores, rows, columns


def _log2_sum_exp2(exponents: Tensor, dim: int) -> Tensor:
    largest = exponents.amax(dim=dim, keepdim=True).clamp_(min=torch.finfo(exponents.dtype).min)
    return (exponents - largest).exp2_().sum(dim=dim).log2_().add_(largest.squeeze(dim))
