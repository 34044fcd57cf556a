"""Scores of vectors in tiles, without the matrix; tiles are recomputed for the gradient.

Objectives that need only positives and log-sum-exps (InfoNCE, InfoLOOB, conditional, joint) then need memory for one
tile instead of [b, N] several times over.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property, reduce

import torch
from torch import Tensor

from clipzoo.ops.log_sum_exps import log_sum_exps
from clipzoo.types import Scores, World


def automatic_tile(local_batch: int, global_batch: int) -> int | None:
    """Return None (a matrix) if the local [b, N] takes less than 128 MiB in fp32; otherwise the rows of a tile."""
    return 1024 if local_batch * global_batch >= 2**25 else None


def tiled_scores(left: Tensor, right: Tensor, tile: int, world: World = World()) -> tuple[Scores, Scores]:
    """Factors of the local images [b, f] and of all ranks' texts [N, f] -> image_to_text and text_to_image.

    One pass over tiles of `tile` x `tile` scores, local images by all texts, computes both directions; ranks exchange
    only partial sums of text_to_image.
    """
    pairs = _Pairs(left, right, tile, world)
    return _ImageToText(pairs), _TextToImage(pairs)


def tiled_anchors(left: Tensor, right: Tensor, tile: int, world: World = World()) -> Scores:
    """Factors of the local anchors [b, f] and of all ranks' contrasts [N, f] -> scores of one direction."""
    return _ImageToText(_Pairs(left, right, tile, world, one_direction=True))


class _Pairs:
    """Statistics that both directions use, computed once."""

    def __init__(self, left: Tensor, right: Tensor, tile: int, world: World, one_direction: bool = False) -> None:
        self._left, self._right, self._tile, self._one_direction = left, right, tile, one_direction
        self._world = world
        self.first_positive = world.rank * len(left)
        self.columns = len(right)

    @cached_property
    def positives(self) -> Tensor:
        """Scores of the positives, [b]."""
        own = self._right[self.first_positive : self.first_positive + len(self._left)]
        return (self._left * own).sum(dim=1)

    @cached_property
    def excluded(self) -> tuple[Tensor, Tensor]:
        """Log-sum-exps without the positive: local images over all texts [b], and local texts over all images [b]."""
        rows, columns = log_sum_exps(self._left, self._right, self.first_positive, self._tile, not self._one_direction)
        # [N] over the local images -> [ranks, b] for the local texts over each rank's images.
        parts = self._world.exchange(columns.unflatten(0, (-1, len(self._left))))
        return rows, reduce(torch.logaddexp, parts)

    @cached_property
    def matrix(self) -> Tensor:
        """Scores of the local images with all texts, [b, N]."""
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
        """Log-sum-exps without the positive, [b]."""

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
