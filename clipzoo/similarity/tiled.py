"""Scores of vectors without their matrix: statistics of tiles, computed again for the gradient.

Objectives that need only positives and log-sum-exps (InfoNCE, InfoLOOB, conditional, joint) then need memory for one
tile instead of [b, N] several times over.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property, reduce

import torch
from torch import Tensor

from clipzoo.distributed.world import World
from clipzoo.ops.log_sum_exps import log_sum_exps
from clipzoo.types import Scores


def automatic_tile(local_batch: int, global_batch: int) -> int | None:
    """None, a matrix, as long as the local [b, N] takes less than 128 MiB in fp32; beyond, the tile."""
    return 1024 if local_batch * global_batch >= 2**25 else None


def tiled_scores(left: Tensor, right: Tensor, tile: int, world: World = World()) -> tuple[Scores, Scores]:
    """Factors of the local images [b, f] and of all ranks' texts [N, f] -> image_to_text and text_to_image.

    One pass over tiles of `tile` x `tile` scores serves both directions. Each rank passes over its own images and all
    texts, and of text_to_image's sums only the ranks' parts travel.
    """
    pairs = _Pairs(left, right, tile, world)
    return _ImageToText(pairs), _TextToImage(pairs)


def tiled_anchors(left: Tensor, right: Tensor, tile: int, world: World = World()) -> Scores:
    """Factors of the local anchors [b, f] and of all ranks' contrasts [N, f] -> one direction."""
    return _ImageToText(_Pairs(left, right, tile, world, one_direction=True))


class _Pairs:
    """What the two directions share."""

    def __init__(self, left: Tensor, right: Tensor, tile: int, world: World, one_direction: bool = False) -> None:
        self._left, self._right, self._tile, self._one_direction = left, right, tile, one_direction
        self._world = world
        self.first_positive = world.rank * len(left)
        self.columns = len(right)

    @cached_property
    def positives(self) -> Tensor:
        """[b]"""
        own = self._right[self.first_positive : self.first_positive + len(self._left)]
        return (self._left * own).sum(dim=1)

    @cached_property
    def excluded(self) -> tuple[Tensor, Tensor]:
        """[b], [b]: log-sum-exps without the positive, of the local images over all texts and the other way round."""
        rows, columns = log_sum_exps(self._left, self._right, self.first_positive, self._tile, not self._one_direction)
        # [N] over the local images -> [ranks, b] for the local texts over each rank's images.
        parts = self._world.exchange(columns.unflatten(0, (-1, len(self._left))))
        return rows, reduce(torch.logaddexp, parts)

    @cached_property
    def matrix(self) -> Tensor:
        """[b, N]"""
        return self._left @ self._right.mT

    def transposed(self) -> Tensor:
        """[b, N], this rank's rows of the transpose of the global matrix."""
        return self._world.transpose(self.matrix)


class _TiledScores(Scores):
    def __init__(self, pairs: _Pairs) -> None:
        self._pairs = pairs

    def positives(self) -> Tensor:
        return self._pairs.positives

    def log_sum_exp(self, *, exclude_positive: bool = False) -> Tensor:
        excluded = self._excluded()
        return excluded if exclude_positive else torch.logaddexp(excluded, self._pairs.positives)

    @abstractmethod
    def _excluded(self) -> Tensor:
        """[b], log-sum-exps without the positive."""

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
        return self._pairs.transposed()
