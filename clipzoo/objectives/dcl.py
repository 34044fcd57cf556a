"""DCL, debiased contrastive learning: negatives corrected for the positives among them (Chuang et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from clipzoo.heads.base import Paper
from clipzoo.objectives.base import WeightedObjective, weighted_loss
from clipzoo.types import Batch, Decay, Loss, Progress, Scale, Scores, Similarity, Weight, checked


@checked
class DCL(WeightedObjective):
    """-log( p / (p + g) ), p = exp(s_ii / tau), averaged over anchors and weighted over the directions.

    g = max( (sum_{j != i} exp(s_ij / tau) - (N-1) tau_plus p) / (1 - tau_plus), (N-1) exp(-1 / tau) ).
    temperature: tau, fixed, on cosines. tau_plus: share of false negatives among the negatives.
    same_caption: with "ignore", N counts the pairs that are left. An anchor without negatives has no loss.
    """

    name = "dcl"
    citations = (
        Paper(
            "dcl",
            "Debiased Contrastive Learning",
            "Chuang, Ching-Yao and others",
            "Advances in Neural Information Processing Systems",
            2020,
        ),
    )
    loss_unit = "nats"
    own_temperature = True
    needs_negatives = True

    def __init__(
        self,
        temperature: Scale,
        tau_plus: Decay,
        image_to_text: Weight,
        text_to_image: Weight,
        same_caption: Literal["negative", "ignore"] = "negative",
    ) -> None:
        super().__init__(image_to_text, text_to_image, same_caption)
        self._temperature, self._tau_plus = temperature, tau_plus

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        def tempered(cosines: Tensor) -> Tensor:
            return cosines / self._temperature

        def debiased(scores: Scores) -> Tensor:
            scaled, count = scores.scaled(tempered), scores.negative_counts()
            positives, negatives = scaled.positives(), scaled.log_sum_exp(exclude_positive=True)
            log: Callable[[Any], Any] = math.log
            if isinstance(count, Tensor):
                count, log = count.to(negatives.dtype), torch.log
            if self._tau_plus > 0:
                # log(exp(negatives) - count tau_plus exp(positives)); -inf without gradient for a negative difference.
                gap = positives + log(count * self._tau_plus) - negatives
                # The branch that is not selected must stay finite, or its zero gradient becomes NaN.
                difference = negatives + torch.log(-torch.expm1(torch.where(gap < 0, gap, -1.0)))
                negatives = torch.where(gap < 0, difference, float("-inf"))
            # maximum, not clamp: below the floor only the positive has a gradient.
            log_floor = log(count) - 1 / self._temperature
            negatives = negatives - math.log1p(-self._tau_plus)
            floor = log_floor if isinstance(log_floor, Tensor) else negatives.new_full((), log_floor)
            negatives = torch.maximum(negatives, floor)
            return (torch.logaddexp(positives, negatives) - positives).mean()

        return weighted_loss(similarity, self.weights, debiased)
