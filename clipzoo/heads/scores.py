"""Scores of all pairs: a matrix [b, N] for any head, or tiles of it for vectors.

Tiles are recomputed for the gradient: objectives need memory for one tile instead of [b, N] several times over.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from clipzoo.errors import ConfigError
from clipzoo.heads.pairs import Pairing, log_add, log_sums, sums, text_anchors
from clipzoo.ops.sums import Exponents, log_sum_exps, negative_sums, sigmoid_loss
from clipzoo.types import Negatives, Scores, World

Combine = Callable[[Tensor, Tensor, int], Tensor]
"""`sums` or `log_sums`."""


class PairedScores(Scores):
    """Results of the positives of each row, which a pairing lists; without one there is one positive."""

    pairing: Pairing | None

    @abstractmethod
    def listed(self) -> Tensor:
        """Return the scores of the positives that this rank has, [P]; without a pairing, those of the rows, [r]."""

    @abstractmethod
    def over_rows(self, combine: Combine, values: Tensor) -> Tensor:
        """[P] values of the listed positives -> their sums or log-sum-exps over the rows, [r]."""

    @abstractmethod
    def of_listed(self, values: Tensor) -> Tensor:
        """[r] values of the rows -> those of the listed positives, [P]."""

    def positives(self) -> Tensor:
        listed = self.listed()
        return listed if self.pairing is None else self.over_rows(sums, listed) / self.pairing.positive_counts

    def positives_log_sum_exp(self) -> Tensor:
        listed = self.listed()
        return listed if self.pairing is None else self.over_rows(log_sums, listed)

    def each_alone(self) -> Tensor:
        if self.pairing is None:
            return self.log_sum_exp() - self.positives()
        listed, negatives = self.listed(), self.of_listed(self.log_sum_exp(exclude_positive=True))
        return self.over_rows(sums, torch.logaddexp(negatives, listed) - listed) / self.pairing.positive_counts

    def negative_counts(self) -> int | Tensor:
        return super().negative_counts() if self.pairing is None else self.pairing.negative_counts


class DenseScores(PairedScores):
    """Scores of a matrix [r, c]; without a pairing, row i has its positive in column `first_positive + i`."""

    def __init__(self, matrix: Tensor, first_positive: int = 0, pairing: Pairing | None = None) -> None:
        self._matrix, self.pairing = matrix, pairing
        self.first_positive, self.columns = first_positive, matrix.shape[1]

    def listed(self) -> Tensor:
        matrix, pairing = self._matrix, self.pairing
        return matrix.diagonal(self.first_positive) if pairing is None else matrix[pairing.positives]

    def over_rows(self, combine: Combine, values: Tensor) -> Tensor:
        assert self.pairing is not None
        return combine(values, self.pairing.positives[0], len(self._matrix))

    def of_listed(self, values: Tensor) -> Tensor:
        assert self.pairing is not None
        return values[self.pairing.positives[0]]

    def log_sum_exp(self, *, exclude_positive: bool = False) -> Tensor:
        matrix = self._matrix
        if self.pairing is not None:
            # A row may have no negatives.
            return log_add(matrix.masked_fill(self.pairing.absent(exclude_positive), float("-inf")), dim=1)
        # Masked with -inf: a subtraction from the sum would be inexact if the positive dominates it.
        return (self.negatives_only_(matrix.clone()) if exclude_positive else matrix).logsumexp(dim=1)

    def negatives_only_(self, matrix: Tensor) -> Tensor:
        """Set the entries of positives and left-out pairs to -inf, in place."""
        if self.pairing is not None:
            return matrix.masked_fill_(self.pairing.absent(exclude_positive=True), float("-inf"))
        matrix.diagonal(self.first_positive).fill_(float("-inf"))
        return matrix

    def expectation(self, other: Scores) -> Tensor:
        weights = other.dense().detach()
        if self.pairing is not None:
            weights = weights.masked_fill(self.pairing.absent(), float("-inf"))
        return (weights.softmax(dim=1) * self._matrix).sum(dim=1)

    def scaled(self, scaling: Callable[[Tensor], Tensor]) -> Scores:
        return DenseScores(scaling(self._matrix), self.first_positive, self.pairing)

    def minus(self, other: Scores) -> Scores:
        return DenseScores(self._matrix - other.dense(), self.first_positive, self.pairing)

    def binary_cross_entropy(self, scale: Tensor, bias: Tensor) -> Tensor:
        logits = scale * self._matrix + bias
        labels = torch.full_like(logits, -1.0)
        if self.pairing is not None:
            labels[self.pairing.positives] = 1.0
            losses = -functional.logsigmoid(labels * logits).masked_fill(self.pairing.absent(), 0.0)
            return losses.sum() / self.pairing.local_samples
        labels.diagonal(self.first_positive).fill_(1.0)
        return -functional.logsigmoid(labels * logits).sum(dim=1).mean()

    def squared_distance(self, other: Scores) -> Tensor:
        return (self._matrix - other.dense()).square().sum(dim=1)

    def negatives(self, *arguments: Any, **options: Any) -> Negatives:
        return DenseNegatives(self, *arguments, **options)

    def dense(self) -> Tensor:
        return self._matrix


class DenseNegatives(Negatives):
    """Terms of the negatives as a matrix [b, N]."""

    def __init__(
        self,
        scores: DenseScores,
        temperature: float | Tensor,
        log_factor: float,
        offset: Tensor | None = None,
        threshold: Tensor | None = None,
    ) -> None:
        local_rows = slice(scores.first_positive, scores.first_positive + len(scores.dense()))
        self._temperature = temperature[local_rows, None] if isinstance(temperature, Tensor) else temperature
        self._differences = scores.dense() - scores.positives()[:, None]
        differences = self._differences.detach()
        self._exponents = (differences if offset is None else differences - offset) / self._temperature
        self._log_terms = scores.negatives_only_(self._exponents + log_factor)
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


def tiled_scores(
    left: Tensor, right: Tensor, tile: int, world: World = World(), pairing: Pairing | None = None
) -> tuple[Scores, Scores]:
    """Factors of the local images [b, f] and of all ranks' texts [N, f] -> image_to_text and text_to_image.

    One pass over tiles of `tile` x `tile` scores computes both directions; ranks exchange only partial sums of the
    second.
    """
    pairs = Pairs(left, right, tile, world, pairing)
    return TiledScores(pairs, of_texts=False), TiledScores(pairs, of_texts=True)


def tiled_anchors(
    left: Tensor, right: Tensor, tile: int, world: World = World(), pairing: Pairing | None = None
) -> Scores:
    """Factors of the local anchors [b, f] and of all ranks' contrasts [N, f] -> scores of one direction."""
    return TiledScores(Pairs(left, right, tile, world, pairing, one_direction=True), of_texts=False)


@dataclass(eq=False)
class Pairs:
    """Factors of the local images [b, f] and of all ranks' texts [N, f], and results that both directions use.

    pairing: positives and left-out pairs; None: text i of this rank is the only positive of image i.
    one_direction: the columns are not summed; only results of the rows are used.
    """

    left: Tensor
    right: Tensor
    tile: int
    world: World
    pairing: Pairing | None = None
    one_direction: bool = False

    def __post_init__(self) -> None:
        self.first_positive = self.world.rank * len(self.left)
        texts = len(self.right) // self.world.size
        self.own = slice(self.world.rank * texts, (self.world.rank + 1) * texts)  # columns of the local texts
        self.left_out = self.first_positive if self.pairing is None else self.pairing.labels
        self._shared: dict[Any, Any] = {}
        self._sums: dict[bool, NegativeSums] = {}

    @cached_property
    def positives(self) -> Tensor:
        """Scores of the positives, [b], or [P] of a pairing."""
        if self.pairing is None:
            return (self.left * self.right[self.own]).sum(dim=1)
        rows, columns = self.pairing.positives
        return (self.left[rows] * self.right[columns]).sum(dim=1)

    @cached_property
    def excluded(self) -> tuple[Tensor, Tensor]:
        """Log-sum-exps without the positive: local images over all texts [b], and local texts over all images [b]."""
        rows, columns = log_sum_exps(self.left, self.right, self.left_out, self.tile, not self.one_direction)
        if self.one_direction:
            return rows, rows
        parts = self.exchanged(columns)
        return rows, reduce(torch.logaddexp, parts) if self.pairing is None else log_add(parts, dim=0)

    @cached_property
    def matrix(self) -> Tensor:
        """Scores of the local images with all texts, [b, N]."""
        return self.left @ self.right.mT

    @cached_property
    def anchors(self) -> Tensor | EllipsisType:
        """Places of the text anchors among the local texts."""
        return text_anchors(self.pairing, self.world)

    def exchanged(self, columns: Tensor) -> Tensor:
        """[N], sums over the local images -> [ranks, k], sums of the local text anchors over each rank's images."""
        return self.world.exchange(columns.unflatten(0, (self.world.size, -1)))[:, self.anchors]

    def scaled(self, scaling: Callable[[Tensor], Tensor]) -> Pairs:
        """Return the pairs with scaled scores; both directions share them."""
        if scaling not in self._shared:
            self._shared[scaling] = replace(self, left=scaling(self.left))
        return self._shared[scaling]

    def minus(self, other: Pairs) -> Pairs:
        """Return the pairs with the differences of the scores; both directions share them."""
        if other not in self._shared:
            left, right = torch.cat([self.left, -other.left], dim=1), torch.cat([self.right, other.right], dim=1)
            self._shared[other] = replace(self, left=left, right=right)
        return self._shared[other]

    def binary_cross_entropy(self, scale: Tensor, bias: Tensor, of_texts: bool) -> Tensor:
        """See `Scores.binary_cross_entropy`. This rank's part of the sum over all pairs is that of both directions.

        With hard captions, which are not anchors, the directions have different pairs.
        """
        pairing, right = self.pairing, self.right
        has_hard = of_texts and pairing is not None and len(pairing.transpose_rows) * self.world.size < len(right)
        key = scale, bias, has_hard
        if key in self._shared:
            return self._shared[key]
        if pairing is None:
            loss = sigmoid_loss(self.left, right, scale, bias, self.first_positive, self.tile) / len(self.left)
        else:
            rows, columns = pairing.labels
            if has_hard:
                captions = self.world.gather(pairing.transpose_rows)
                columns, right = columns[captions], right[captions]
            negatives = sigmoid_loss(self.left, right, scale, bias, (rows, columns), self.tile)
            loss = (negatives - functional.logsigmoid(scale * self.positives + bias).sum()) / pairing.local_samples
        self._shared[key] = loss
        return loss

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
            left, right, pairs.left_out, pairs.tile, self.sides.get(False), self.sides.get(True)
        )
        if True not in self.sides:
            return ((rows, row_means),)
        parts, means = pairs.exchanged(columns), pairs.exchanged(column_means)
        some_empty = pairs.pairing is not None or self.sides[True].threshold is not None
        sums = log_add(parts, dim=0) if some_empty else reduce(torch.logaddexp, parts)
        shares = (parts - sums.clamp(min=torch.finfo(sums.dtype).min)).exp().detach()
        return (rows, row_means), (sums, (shares * means).sum(dim=0))


class TiledScores(PairedScores):
    """Scores of image anchors (rows of the pairs) or of text anchors (their columns)."""

    def __init__(self, pairs: Pairs, of_texts: bool) -> None:
        self.pairs, self.of_texts = pairs, of_texts
        self.pairing = pairs.pairing.transposed if pairs.pairing is not None and of_texts else pairs.pairing
        self.first_positive = pairs.first_positive
        self.columns = len(pairs.left) * pairs.world.size if of_texts else len(pairs.right)

    def log_sum_exp(self, *, exclude_positive: bool = False) -> Tensor:
        excluded = self.pairs.excluded[self.of_texts]
        return excluded if exclude_positive else torch.logaddexp(excluded, self.positives_log_sum_exp())

    def listed(self) -> Tensor:
        return self.pairs.positives

    def over_rows(self, combine: Combine, values: Tensor) -> Tensor:
        assert self.pairs.pairing is not None
        rows, columns = self.pairs.pairing.positives
        if not self.of_texts:
            return combine(values, rows, len(self.pairs.left))
        # A rank has all positives of its images, also those with captions of other ranks.
        parts = self.pairs.exchanged(combine(values, columns, len(self.pairs.right)))
        return parts.sum(dim=0) if combine is sums else log_add(parts, dim=0)

    def of_listed(self, values: Tensor) -> Tensor:
        assert self.pairs.pairing is not None
        rows, columns = self.pairs.pairing.positives
        if not self.of_texts:
            return values[rows]
        of_texts = values.new_zeros(len(self.pairs.right) // self.pairs.world.size)
        of_texts[self.pairs.anchors] = values
        return self.pairs.world.gather(of_texts)[columns]

    def expectation(self, other: Scores) -> Tensor:
        if not isinstance(other, TiledScores):
            raise ConfigError("scores in tiles are compared with scores in tiles: use a teacher head with vectors")
        (anchors, contrasts), other_sides, tile = self.sides, other.sides, self.pairs.tile
        weights_left, weights_right = (side.detach() for side in other_sides)

        def of_rows(anchors: Tensor, contrasts: Tensor, rows: slice) -> Tensor:
            logits = weights_left[rows] @ weights_right.mT
            if self.pairing is not None:
                logits = logits.masked_fill(self.pairing.absent(rows=rows), float("-inf"))
            return (anchors * (logits.softmax(dim=1) @ contrasts)).sum(dim=1)

        # Recomputed in the backward pass: the memory is that of `tile` rows of the matrix.
        parts = [slice(start, start + tile) for start in range(0, len(anchors), tile)]
        return torch.cat([checkpoint(of_rows, anchors[rows], contrasts, rows, use_reentrant=False) for rows in parts])

    @cached_property
    def sides(self) -> tuple[Tensor, Tensor]:
        """Factors of the anchors, [b, f], and of all ranks' contrasts, [N, f]."""
        pairs = self.pairs
        if not self.of_texts:
            return pairs.left, pairs.right
        return pairs.right[pairs.own][pairs.anchors], pairs.world.gather(pairs.left)

    def scaled(self, scaling: Callable[[Tensor], Tensor]) -> Scores:
        return TiledScores(self.pairs.scaled(scaling), self.of_texts)

    def minus(self, other: Scores) -> Scores:
        if not isinstance(other, TiledScores):
            return DenseScores(self.dense() - other.dense(), self.first_positive, self.pairing)
        return TiledScores(self.pairs.minus(other.pairs), self.of_texts)

    def binary_cross_entropy(self, scale: Tensor, bias: Tensor) -> Tensor:
        return self.pairs.binary_cross_entropy(scale, bias, self.of_texts)

    def squared_distance(self, other: Scores) -> Tensor:
        if not isinstance(other, TiledScores):
            return self.minus(other).dense().square().sum(dim=1)
        # s - t is the product of (anchors of s, -anchors of t) with (contrasts of s, contrasts of t), and the sum of
        # squares over the contrasts a quadratic form. In float64: the terms cancel as the scores become equal.
        (anchors, contrasts), (other_anchors, other_contrasts) = self.sides, other.sides
        left = torch.cat([anchors, -other_anchors], dim=1).double()
        right = torch.cat([contrasts, other_contrasts], dim=1).double()
        return ((left @ (right.mT @ right)) * left).sum(dim=1).to(anchors.dtype)

    def negatives(self, *arguments: Any, **options: Any) -> Negatives:
        return TiledNegatives(self, *arguments, **options)

    def dense(self) -> Tensor:
        """[b, N]; for texts, this rank's rows of the transpose of the global matrix."""
        pairs = self.pairs
        return pairs.world.transpose(pairs.matrix)[pairs.anchors] if self.of_texts else pairs.matrix


class TiledNegatives(Negatives):
    """Terms of the negatives, summed in tiles."""

    def __init__(
        self,
        scores: TiledScores,
        temperature: float | Tensor,
        log_factor: float,
        offset: Tensor | None = None,
        threshold: Tensor | None = None,
    ) -> None:
        pairs, positives, of_texts = scores.pairs, scores.positives(), scores.of_texts
        self._pairs, self._positives, self._of_texts, self._log_factor = pairs, positives, of_texts, log_factor
        self._offset = None if offset is None else offset.to(positives.dtype)
        # Image anchors are this rank's rows, over all texts; text anchors are all columns, over this rank's images.
        images = slice(pairs.first_positive, pairs.first_positive + len(pairs.left))
        anchors, contrasts = (slice(None), images) if of_texts else (images, slice(None))
        temperatures = torch.as_tensor(temperature, dtype=positives.dtype, device=positives.device)
        self._temperatures = temperatures.expand(len(pairs.right) if of_texts else len(pairs.left) * pairs.world.size)
        self._tau = self._temperatures[pairs.own][pairs.anchors] if of_texts else self._temperatures[images]  # [b]
        bias = None if self._offset is None else -self._offset[contrasts]
        threshold = None if threshold is None else threshold.to(positives.dtype)[anchors]
        self._sums = pairs.negative_sums(of_texts, Exponents(1 / self._temperatures[anchors], bias, threshold))

    def log_sum(self) -> Tensor:
        sums, _ = self._sums.results[self._of_texts]
        return sums.detach() - self._positives.detach() / self._tau + self._log_factor

    def surrogate(self, log_denominator: Tensor) -> Tensor:
        weights = (self.log_sum() - log_denominator).exp()
        sums, means = self._sums.results[self._of_texts]
        # The gradient of tau * log-sum-exp is that of the scores under the softmax; the value is their mean.
        scores = self._tau * sums
        scores = means + (scores - scores.detach())
        return (weights * torch.where(sums.isfinite(), scores - self._positives, 0.0)).mean()

    def mean_difference(self, log_denominator: Tensor) -> Tensor:
        weights = (self.log_sum() - log_denominator).exp()
        return weights * (self._sums.results[self._of_texts][1] - self._positives.detach()) / self._tau

    def log_pull(self, log_denominator: Tensor, world: World) -> Callable[[], Tensor]:
        pairs = self._pairs
        # A sum over the anchors: exp((s_ij + bias_i) / tau), anchored on the contrasts j.
        bias = -self._positives.detach() - self._tau * log_denominator
        contrasts = pairs.own if self._of_texts else slice(None)
        exponents = Exponents(1 / self._temperatures[contrasts], world.gather(bias) if self._of_texts else bias)
        sums = pairs.negative_sums(not self._of_texts, exponents, pulls=True)
        offset = 0.0 if self._offset is None else self._offset[pairs.own] / self._tau

        def pulls() -> Tensor:
            of_negatives, _ = sums.results[not self._of_texts]
            return world.gather(torch.logaddexp(of_negatives, -log_denominator) - offset)

        return pulls
