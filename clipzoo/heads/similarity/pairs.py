"""Sums over the products of two sets of vectors, in tiles, shared by the two directions of a similarity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, reduce

import torch
from torch import Tensor

from clipzoo.ops.log_sum_exps import log_sum_exps
from clipzoo.ops.negative_sums import Exponents, negative_sums
from clipzoo.ops.sigmoid_loss import sigmoid_loss
from clipzoo.types import World


class Pairs:
    """Factors of the local images [b, f] and of all ranks' texts [N, f], and sums that both directions use.

    one_direction: the columns are not summed; only results of the rows are used.
    """

    def __init__(self, left: Tensor, right: Tensor, tile: int, world: World, one_direction: bool = False) -> None:
        self.left, self.right, self.tile, self.world = left, right, tile, world
        self.first_positive = world.rank * len(left)
        self._both = not one_direction
        self._scaled: tuple[Callable[[Tensor], Tensor], Pairs] | None = None
        self._entropy: tuple[Tensor, Tensor, Tensor] | None = None
        self._sums: dict[bool, NegativeSums] = {}

    @property
    def own_right(self) -> Tensor:
        """Factors of the local texts, [b, f]."""
        return self.right[self.first_positive : self.first_positive + len(self.left)]

    @cached_property
    def positives(self) -> Tensor:
        """Scores of the positives, [b]."""
        return (self.left * self.own_right).sum(dim=1)

    @cached_property
    def excluded(self) -> tuple[Tensor, Tensor]:
        """Log-sum-exps without the positive: local images over all texts [b], and local texts over all images [b]."""
        rows, columns = log_sum_exps(self.left, self.right, self.first_positive, self.tile, self._both)
        return rows, reduce(torch.logaddexp, self.exchanged(columns))

    @cached_property
    def matrix(self) -> Tensor:
        """Scores of the local images with all texts, [b, N]."""
        return self.left @ self.right.mT

    def exchanged(self, columns: Tensor) -> Tensor:
        """[N], sums over the local images -> [ranks, b], sums of the local texts over each rank's images."""
        return self.world.exchange(columns.unflatten(0, (-1, len(self.left))))

    def scaled(self, scaling: Callable[[Tensor], Tensor]) -> Pairs:
        """Return the pairs with scaled scores; the second direction that asks gets the same ones."""
        if self._scaled is None or self._scaled[0] != scaling:
            self._scaled = scaling, Pairs(scaling(self.left), self.right, self.tile, self.world, not self._both)
        return self._scaled[1]

    def binary_cross_entropy(self, scale: Tensor, bias: Tensor) -> Tensor:
        """See `Scores.binary_cross_entropy`. Both directions have the same pairs, and this rank's part of their sum."""
        if self._entropy is None or self._entropy[0] is not scale or self._entropy[1] is not bias:
            loss = sigmoid_loss(self.left, self.right, scale, bias, self.first_positive, self.tile)
            self._entropy = scale, bias, loss / len(self.left)
        return self._entropy[2]

    def negative_sums(self, of_texts: bool, exponents: Exponents, pulls: bool = False) -> NegativeSums:
        """Return the sums that this side's exponents take part in; one pass serves a request of each side.

        pulls: sums of the pulls, which have no gradient, in a pass of their own.
        """
        sums = self._sums.get(pulls)
        if sums is None or not sums.add(of_texts, exponents):
            sums = self._sums[pulls] = NegativeSums(self, differentiable=not pulls)
            sums.add(of_texts, exponents)
        return sums


class NegativeSums:
    """Log-sum-exps over the negatives, and the mean scores under their softmax, computed when they are first used."""

    def __init__(self, pairs: Pairs, differentiable: bool) -> None:
        self._pairs = pairs
        self._differentiable = differentiable
        self._sides: dict[bool, Exponents] = {}

    def add(self, of_texts: bool, exponents: Exponents) -> bool:
        """Take part in the pass; False if it is too late or the side already does."""
        if "_results" in self.__dict__ or of_texts in self._sides:
            return False
        self._sides[of_texts] = exponents
        return True

    def of(self, of_texts: bool) -> tuple[Tensor, Tensor]:
        """Return the log-sum-exps, differentiable, and the means of one side, [b] each."""
        return self._results[of_texts]

    @cached_property
    def _results(self) -> Sequence[tuple[Tensor, Tensor]]:
        pairs = self._pairs
        left, right = (pairs.left, pairs.right) if self._differentiable else (pairs.left.detach(), pairs.right.detach())
        rows, row_means, columns, column_means = negative_sums(
            left, right, pairs.first_positive, pairs.tile, self._sides.get(False), self._sides.get(True)
        )
        if True not in self._sides:
            return ((rows, row_means),)
        parts, means = pairs.exchanged(columns), pairs.exchanged(column_means)
        sums = reduce(torch.logaddexp, parts)
        shares = (parts - sums.clamp(min=torch.finfo(sums.dtype).min)).exp().detach()
        return (rows, row_means), (sums, (shares * means).sum(dim=0))
