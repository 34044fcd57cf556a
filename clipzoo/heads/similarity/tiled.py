"""Scores of vectors in tiles, without the matrix; tiles are recomputed for the gradient.

Objectives then need memory for one tile instead of [b, N] several times over.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from clipzoo.heads.similarity.pairs import Pairs
from clipzoo.ops.negative_sums import Exponents
from clipzoo.types import Negatives, Scores, World


def automatic_tile(local_batch: int, global_batch: int) -> int | None:
    """Return None (a matrix) if the local [b, N] takes less than 128 MiB in fp32; otherwise the rows of a tile."""
    return 1024 if local_batch * global_batch >= 2**25 else None


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


class TiledScores(Scores):
    """Scores of image anchors (rows of the pairs) or of text anchors (their columns)."""

    def __init__(self, pairs: Pairs, of_texts: bool) -> None:
        self.pairs, self.of_texts = pairs, of_texts

    def positives(self) -> Tensor:
        return self.pairs.positives

    def log_sum_exp(self, *, exclude_positive: bool = False) -> Tensor:
        excluded = self.pairs.excluded[self.of_texts]
        return excluded if exclude_positive else torch.logaddexp(excluded, self.pairs.positives)

    def scaled(self, scaling: Callable[[Tensor], Tensor]) -> Scores:
        return TiledScores(self.pairs.scaled(scaling), self.of_texts)

    def binary_cross_entropy(self, scale: Tensor, bias: Tensor) -> Tensor:
        return self.pairs.binary_cross_entropy(scale, bias)

    def squared_distance(self, other: Scores) -> Tensor:
        if not isinstance(other, TiledScores):
            return (self.dense() - other.dense()).square().sum(dim=1)
        # s - t is the product of (anchors of s, -anchors of t) with (contrasts of s, contrasts of t), and the sum of
        # squares over the contrasts a quadratic form. In float64: the terms cancel as the scores become alike.
        (anchors, contrasts), (other_anchors, other_contrasts) = self._factors(), other._factors()
        left = torch.cat([anchors, -other_anchors], dim=1).double()
        right = torch.cat([contrasts, other_contrasts], dim=1).double()
        return ((left @ (right.mT @ right)) * left).sum(dim=1).to(anchors.dtype)

    def negatives(self, temperature: float | Tensor, log_factor: float, offset: Tensor | None = None) -> Negatives:
        return TiledNegatives(self, temperature, log_factor, offset)

    def dense(self) -> Tensor:
        """[b, N]; of the texts, this rank's rows of the transpose of the global matrix."""
        return self.pairs.world.transpose(self.pairs.matrix) if self.of_texts else self.pairs.matrix

    @property
    def first_positive(self) -> int:
        return self.pairs.first_positive

    @property
    def columns(self) -> int:
        return len(self.pairs.right)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Factors of the local anchors [b, f] and of all ranks' contrasts [N, f]."""
        pairs = self.pairs
        return (pairs.own_right, pairs.world.gather(pairs.left)) if self.of_texts else (pairs.left, pairs.right)


class TiledNegatives(Negatives):
    """Terms of the negatives that are summed in tiles."""

    def __init__(
        self, scores: TiledScores, temperature: float | Tensor, log_factor: float, offset: Tensor | None
    ) -> None:
        self._pairs, self._of_texts, self._log_factor, self._offset = scores.pairs, scores.of_texts, log_factor, offset
        positives = scores.positives()
        self._own = slice(scores.first_positive, scores.first_positive + len(positives))
        self._temperatures = torch.as_tensor(temperature, dtype=positives.dtype, device=positives.device).expand(
            scores.columns
        )
        # Image anchors are rows: this rank's, over all texts. Text anchors are columns: all of them, over this rank's.
        anchors, contrasts = (slice(None), self._own) if self._of_texts else (self._own, slice(None))
        exponents = Exponents(
            1 / self._temperatures[anchors], None if offset is None else -offset.to(positives.dtype)[contrasts]
        )
        self._sums = self._pairs.negative_sums(self._of_texts, exponents)

    def log_sum(self) -> Tensor:
        positives = self._pairs.positives.detach()
        return self._sums.of(self._of_texts)[0].detach() - positives / self._tau + self._log_factor

    def surrogate(self, log_denominator: Tensor) -> Tensor:
        weights = (self.log_sum() - log_denominator).exp()
        sums, means = self._sums.of(self._of_texts)
        positives = self._pairs.positives
        # The gradient of tau * log-sum-exp is that of the scores under the softmax; the value is their mean.
        scores = self._tau * sums
        scores = means + (scores - scores.detach())
        return (weights * torch.where(means.isfinite(), scores - positives, 0.0)).mean()

    def mean_difference(self, log_denominator: Tensor) -> Tensor:
        weights = (self.log_sum() - log_denominator).exp()
        return weights * (self._sums.of(self._of_texts)[1] - self._pairs.positives.detach()) / self._tau

    def log_pull(self, log_denominator: Tensor, world: World) -> Callable[[], Tensor]:
        pairs, own_tau = self._pairs, self._tau
        # A sum over the anchors: exp((s_ij + bias_i) / tau), anchored on the contrasts j.
        bias = -pairs.positives.detach() - own_tau * log_denominator
        contrasts = self._own if self._of_texts else slice(None)
        exponents = Exponents(1 / self._temperatures[contrasts], world.gather(bias) if self._of_texts else bias)
        sums = pairs.negative_sums(not self._of_texts, exponents, pulls=True)
        offset = 0.0 if self._offset is None else self._offset.to(bias.dtype)[self._own] / own_tau

        def pulls() -> Tensor:
            of_negatives = sums.of(not self._of_texts)[0]
            return world.gather(torch.logaddexp(of_negatives, -log_denominator) - offset)

        return pulls

    @property
    def _tau(self) -> Tensor:
        """Temperatures of the local anchors, [b]."""
        return self._temperatures[self._own]
