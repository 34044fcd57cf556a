"""Scores of all pairs: a matrix [b, N] for any head, or tiles of it for vectors.

Tiles are recomputed for the gradient: objectives need memory for one tile instead of [b, N] several times over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, reduce

import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.ops.sums import Exponents, log_sum_exps, negative_sums, sigmoid_loss
from clipzoo.types import Negatives, Scores, World


class DenseScores(Scores):
    """Scores of a matrix [b, N]; row i has its positive in column `first_positive + i`."""

    def __init__(self, matrix: Tensor, first_positive: int = 0) -> None:
        self._matrix = matrix
        self.first_positive, self.columns = first_positive, matrix.shape[1]

    def positives(self) -> Tensor:
        return self._matrix.diagonal(self.first_positive)

    def log_sum_exp(self, *, exclude_positive: bool = False) -> Tensor:
        matrix = self._matrix
        if exclude_positive:
            # Masked with -inf: a subtraction from the sum would be inexact if the positive dominates it.
            matrix = matrix.clone()
            matrix.diagonal(self.first_positive).fill_(float("-inf"))
        return matrix.logsumexp(dim=1)

    def scaled(self, scaling: Callable[[Tensor], Tensor]) -> Scores:
        return DenseScores(scaling(self._matrix), self.first_positive)

    def minus(self, other: Scores) -> Scores:
        return DenseScores(self._matrix - other.dense(), self.first_positive)

    def binary_cross_entropy(self, scale: Tensor, bias: Tensor) -> Tensor:
        logits = scale * self._matrix + bias
        labels = torch.full_like(logits, -1.0)
        labels.diagonal(self.first_positive).fill_(1.0)
        return -functional.logsigmoid(labels * logits).sum(dim=1).mean()

    def squared_distance(self, other: Scores) -> Tensor:
        return (self._matrix - other.dense()).square().sum(dim=1)

    def negatives(
        self,
        temperature: float | Tensor,
        log_factor: float,
        offset: Tensor | None = None,
        threshold: Tensor | None = None,
    ) -> Negatives:
        return DenseNegatives(self, temperature, log_factor, offset, threshold)

    def dense(self) -> Tensor:
        return self._matrix


class DenseNegatives(Negatives):
    """Terms of the negatives as a matrix [b, N]."""

    def __init__(
        self,
        scores: Scores,
        temperature: float | Tensor,
        log_factor: float,
        offset: Tensor | None,
        threshold: Tensor | None,
    ) -> None:
        self._differences = scores.dense() - scores.positives()[:, None]
        shifted = self._differences.detach() if offset is None else self._differences.detach() - offset
        local_rows = slice(scores.first_positive, scores.first_positive + len(shifted))
        if isinstance(temperature, Tensor):
            temperature = temperature[local_rows, None]
        self._temperature = temperature
        self._exponents = shifted / temperature
        self._log_terms = self._exponents + log_factor
        self._log_terms.diagonal(scores.first_positive).fill_(float("-inf"))
        if threshold is not None:
            self._log_terms.masked_fill_(scores.dense() > threshold[local_rows, None], float("-inf"))

    def log_sum(self) -> Tensor:
        return self._log_terms.logsumexp(dim=1)

    def surrogate(self, log_denominator: Tensor) -> Tensor:
        return (self._weights(log_denominator) * self._differences).sum(dim=1).mean()

    def mean_difference(self, log_denominator: Tensor) -> Tensor:
        return (self._weights(log_denominator) * (self._differences.detach() / self._temperature)).sum(dim=1)

    def log_pull(self, log_denominator: Tensor, world: World) -> Callable[[], Tensor]:
        def pulls() -> Tensor:
            local = (self._exponents - log_denominator[:, None]).logsumexp(dim=0)
            return world.gather(local[None]).logsumexp(dim=0)

        return pulls

    def _weights(self, log_denominator: Tensor) -> Tensor:
        return (self._log_terms - log_denominator[:, None]).exp()


TILED_FROM = 2**25
"""Entries of the local similarity matrix from which scores are computed in tiles, 128 MiB in fp32."""


def automatic_tile(local_batch: int, global_batch: int) -> int | None:
    """Return None for a local matrix [b, N] of less than TILED_FROM entries; otherwise the rows of a tile."""
    return 1024 if local_batch * global_batch >= TILED_FROM else None


def tiled_scores(left: Tensor, right: Tensor, tile: int, world: World = World()) -> tuple[Scores, Scores]:
    """Factors of the local images [b, f] and of all ranks' texts [N, f] -> image_to_text and text_to_image.

    One pass over tiles of `tile` x `tile` scores, local images by all texts, computes both directions; ranks exchange
    only partial sums of text_to_image.
    """
    pairs = Pairs(left, right, tile, world)
    return TiledScores(pairs, of_texts=False), TiledScores(pairs, of_texts=True)


def tiled_anchors(left: Tensor, right: Tensor, tile: int, world: World = World()) -> Scores:
    """Factors of the local anchors [b, f] and of all ranks' contrasts [N, f] -> scores of one direction."""
    return TiledScores(Pairs(left, right, tile, world, one_direction=True), of_texts=False)


class Pairs:
    """Factors of the local images [b, f] and of all ranks' texts [N, f], and results that both directions use.

    one_direction: the columns are not summed; only results of the rows are used.
    """

    def __init__(self, left: Tensor, right: Tensor, tile: int, world: World, one_direction: bool = False) -> None:
        self.left, self.right, self.tile, self.world = left, right, tile, world
        self.first_positive = world.rank * len(left)
        self.own = slice(self.first_positive, self.first_positive + len(left))  # columns of the local texts
        self._one_direction = one_direction
        self._scaled: dict[Callable[[Tensor], Tensor], Pairs] = {}
        self._differences: dict[Pairs, Pairs] = {}
        self._entropies: dict[tuple[Tensor, Tensor], Tensor] = {}
        self._sums: dict[bool, NegativeSums] = {}

    @cached_property
    def positives(self) -> Tensor:
        """Scores of the positives, [b]."""
        return (self.left * self.right[self.own]).sum(dim=1)

    @cached_property
    def excluded(self) -> tuple[Tensor, Tensor]:
        """Log-sum-exps without the positive: local images over all texts [b], and local texts over all images [b]."""
        rows, columns = log_sum_exps(self.left, self.right, self.first_positive, self.tile, not self._one_direction)
        return rows, reduce(torch.logaddexp, self.exchanged(columns))

    @cached_property
    def matrix(self) -> Tensor:
        """Scores of the local images with all texts, [b, N]."""
        return self.left @ self.right.mT

    def exchanged(self, columns: Tensor) -> Tensor:
        """[N], sums over the local images -> [ranks, b], sums of the local texts over each rank's images."""
        return self.world.exchange(columns.unflatten(0, (-1, len(self.left))))

    def scaled(self, scaling: Callable[[Tensor], Tensor]) -> Pairs:
        """Return the pairs with scaled scores; both directions share them."""
        if scaling not in self._scaled:
            self._scaled[scaling] = Pairs(scaling(self.left), self.right, self.tile, self.world, self._one_direction)
        return self._scaled[scaling]

    def minus(self, other: Pairs) -> Pairs:
        """Return the pairs with the differences of the scores; both directions share them."""
        if other not in self._differences:
            left, right = torch.cat([self.left, -other.left], dim=1), torch.cat([self.right, other.right], dim=1)
            self._differences[other] = Pairs(left, right, self.tile, self.world, self._one_direction)
        return self._differences[other]

    def binary_cross_entropy(self, scale: Tensor, bias: Tensor) -> Tensor:
        """See `Scores.binary_cross_entropy`. Both directions share the pairs, and so this rank's part of the sum."""
        if (scale, bias) not in self._entropies:
            loss = sigmoid_loss(self.left, self.right, scale, bias, self.first_positive, self.tile)
            self._entropies[scale, bias] = loss / len(self.left)
        return self._entropies[scale, bias]

    def negative_sums(self, of_texts: bool, exponents: Exponents, pulls: bool = False) -> NegativeSums:
        """Return the sums that include this side's exponents; one pass serves one request of each side.

        pulls: sums of the pulls, which have no gradient, in a separate pass.
        """
        sums = self._sums.get(pulls)
        if sums is None or of_texts in sums.sides or "results" in vars(sums):  # the side is in use, or the pass is over
            sums = self._sums[pulls] = NegativeSums(self, differentiable=not pulls)
        sums.sides[of_texts] = exponents
        return sums


class NegativeSums:
    """Log-sum-exps over the negatives, and the mean scores under their softmax, computed when they are first used.

    sides: exponents of the images (False) and of the texts (True) that take part in the pass.
    """

    def __init__(self, pairs: Pairs, differentiable: bool) -> None:
        self._pairs, self._differentiable = pairs, differentiable
        self.sides: dict[bool, Exponents] = {}

    @cached_property
    def results(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Log-sum-exps, differentiable, and means of the images and of the texts, [b] each."""
        pairs = self._pairs
        left, right = (pairs.left, pairs.right) if self._differentiable else (pairs.left.detach(), pairs.right.detach())
        rows, row_means, columns, column_means = negative_sums(
            left, right, pairs.first_positive, pairs.tile, self.sides.get(False), self.sides.get(True)
        )
        if True not in self.sides:
            return ((rows, row_means),)
        parts, means = pairs.exchanged(columns), pairs.exchanged(column_means)
        sums = reduce(torch.logaddexp, parts)
        shares = (parts - sums.clamp(min=torch.finfo(sums.dtype).min)).exp().detach()
        return (rows, row_means), (sums, (shares * means).sum(dim=0))


class TiledScores(Scores):
    """Scores of image anchors (rows of the pairs) or of text anchors (their columns)."""

    def __init__(self, pairs: Pairs, of_texts: bool) -> None:
        self.pairs, self.of_texts = pairs, of_texts
        self.first_positive, self.columns = pairs.first_positive, len(pairs.right)

    def positives(self) -> Tensor:
        return self.pairs.positives

    def log_sum_exp(self, *, exclude_positive: bool = False) -> Tensor:
        excluded = self.pairs.excluded[self.of_texts]
        return excluded if exclude_positive else torch.logaddexp(excluded, self.pairs.positives)

    def scaled(self, scaling: Callable[[Tensor], Tensor]) -> Scores:
        return TiledScores(self.pairs.scaled(scaling), self.of_texts)

    def minus(self, other: Scores) -> Scores:
        if not isinstance(other, TiledScores):
            return DenseScores(self.dense() - other.dense(), self.first_positive)
        return TiledScores(self.pairs.minus(other.pairs), self.of_texts)

    def binary_cross_entropy(self, scale: Tensor, bias: Tensor) -> Tensor:
        return self.pairs.binary_cross_entropy(scale, bias)

    def squared_distance(self, other: Scores) -> Tensor:
        if not isinstance(other, TiledScores):
            return (self.dense() - other.dense()).square().sum(dim=1)
        # s - t is the product of (anchors of s, -anchors of t) with (contrasts of s, contrasts of t), and the sum of
        # squares over the contrasts a quadratic form. In float64: the terms cancel as the scores become equal.
        (anchors, contrasts), (other_anchors, other_contrasts) = (
            (pairs.right[pairs.own], pairs.world.gather(pairs.left)) if of_texts else (pairs.left, pairs.right)
            for pairs, of_texts in ((self.pairs, self.of_texts), (other.pairs, other.of_texts))
        )
        left = torch.cat([anchors, -other_anchors], dim=1).double()
        right = torch.cat([contrasts, other_contrasts], dim=1).double()
        return ((left @ (right.mT @ right)) * left).sum(dim=1).to(anchors.dtype)

    def negatives(self, temperature: float | Tensor, log_factor: float, offset: Tensor | None = None) -> Negatives:
        return TiledNegatives(self, temperature, log_factor, offset)

    def dense(self) -> Tensor:
        """[b, N]; for texts, this rank's rows of the transpose of the global matrix."""
        return self.pairs.world.transpose(self.pairs.matrix) if self.of_texts else self.pairs.matrix


class TiledNegatives(Negatives):
    """Terms of the negatives, summed in tiles."""

    def __init__(
        self, scores: TiledScores, temperature: float | Tensor, log_factor: float, offset: Tensor | None
    ) -> None:
        pairs, positives = scores.pairs, scores.positives()
        self._pairs, self._of_texts, self._log_factor = pairs, scores.of_texts, log_factor
        self._offset = None if offset is None else offset.to(positives.dtype)
        temperatures = torch.as_tensor(temperature, dtype=positives.dtype, device=positives.device)
        self._temperatures = temperatures.expand(scores.columns)
        self._tau = self._temperatures[pairs.own]  # of the local anchors, [b]
        # Image anchors are this rank's rows, over all texts; text anchors are all columns, over this rank's images.
        anchors, contrasts = (slice(None), pairs.own) if self._of_texts else (pairs.own, slice(None))
        bias = None if self._offset is None else -self._offset[contrasts]
        self._sums = pairs.negative_sums(self._of_texts, Exponents(1 / self._temperatures[anchors], bias))

    def log_sum(self) -> Tensor:
        sums, _ = self._sums.results[self._of_texts]
        return sums.detach() - self._pairs.positives.detach() / self._tau + self._log_factor

    def surrogate(self, log_denominator: Tensor) -> Tensor:
        weights = (self.log_sum() - log_denominator).exp()
        sums, means = self._sums.results[self._of_texts]
        # The gradient of tau * log-sum-exp is that of the scores under the softmax; the value is their mean.
        scores = self._tau * sums
        scores = means + (scores - scores.detach())
        return (weights * torch.where(means.isfinite(), scores - self._pairs.positives, 0.0)).mean()

    def mean_difference(self, log_denominator: Tensor) -> Tensor:
        weights = (self.log_sum() - log_denominator).exp()
        return weights * (self._sums.results[self._of_texts][1] - self._pairs.positives.detach()) / self._tau

    def log_pull(self, log_denominator: Tensor, world: World) -> Callable[[], Tensor]:
        pairs = self._pairs
        # A sum over the anchors: exp((s_ij + bias_i) / tau), anchored on the contrasts j.
        bias = -pairs.positives.detach() - self._tau * log_denominator
        contrasts = pairs.own if self._of_texts else slice(None)
        exponents = Exponents(1 / self._temperatures[contrasts], world.gather(bias) if self._of_texts else bias)
        sums = pairs.negative_sums(not self._of_texts, exponents, pulls=True)
        offset = 0.0 if self._offset is None else self._offset[pairs.own] / self._tau

        def pulls() -> Tensor:
            of_negatives, _ = sums.results[not self._of_texts]
            return world.gather(torch.logaddexp(of_negatives, -log_denominator) - offset)

        return pulls
