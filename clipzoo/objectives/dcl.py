"""DCL, debiased contrastive learning: negatives corrected for the positives among them (Chuang et al. 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clipzoo.heads.base import Head, Paper
from clipzoo.objectives.base import Objective, plain_cosines, weighted_loss
from clipzoo.types import Batch, Decay, Loss, Progress, Scale, Scores, Similarity, Weight, checked


@checked
class DCL(Objective):
    """-log( p / (p + g) ), p = exp(s_ii / tau), averaged over anchors and weighted over the directions.

    g = max( (sum_{j != i} exp(s_ij / tau) - (N-1) tau_plus p) / (1 - tau_plus), (N-1) exp(-1 / tau) ).
    temperature: tau, fixed, on cosines. tau_plus: share of false negatives among the negatives.
    image_to_text, text_to_image: weights of the directions.
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

    relations = {"image_to_text + text_to_image > 0": "one of the weights must be above 0"}

    def __init__(self, temperature: Scale, tau_plus: Decay, image_to_text: Weight, text_to_image: Weight) -> None:
        super().__init__()
        self._temperature = temperature
        self._tau_plus = tau_plus
        self._weights = image_to_text, text_to_image

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        return weighted_loss(similarity, self._weights, self._debiased)

    def check(self, head: Head) -> list[str]:
        return plain_cosines(head, self.name)

    def _tempered(self, cosines: Tensor) -> Tensor:
        return cosines / self._temperature

    def _debiased(self, scores: Scores) -> Tensor:
        scaled = scores.scaled(self._tempered)
        positives = scaled.positives()
        negatives = scaled.log_sum_exp(exclude_positive=True)
        count = scores.columns - 1
        log_floor = math.log(count) - 1 / self._temperature
        if self._tau_plus == 0:
            corrected = negatives
        else:
            corrected = _log_difference(negatives, positives + math.log(count * self._tau_plus))
        # maximum, not clamp: below the floor the gradient passes through the positive alone.
        corrected = torch.maximum(corrected - math.log1p(-self._tau_plus), corrected.new_full((), log_floor))
        return (torch.logaddexp(positives, corrected) - positives).mean()


def _log_difference(larger: Tensor, smaller: Tensor) -> Tensor:
    """log(exp(larger) - exp(smaller)), -inf without gradient where the difference is not positive."""
    gap = smaller - larger
    positive = gap < 0
    # The branch that is not selected must stay finite, or its zero gradient becomes NaN.
    difference = larger + torch.log(-torch.expm1(torch.where(positive, gap, -1.0)))
    return torch.where(positive, difference, float("-inf"))
