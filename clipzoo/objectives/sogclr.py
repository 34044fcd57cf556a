"""SogCLR, the global contrastive loss by moving averages (Yuan et al. 2022)."""

from __future__ import annotations

import math

import torch

from clipzoo.heads.base import Paper
from clipzoo.objectives.per_sample import MovingAverageObjective, sum_over_anchors
from clipzoo.types import Batch, Loss, Progress, Scale, Share, Similarity, checked


@checked
class SogCLR(MovingAverageObjective):
    """tau/n sum_i log( [1 +] sum_{j != i} exp((s_ij - s_ii) / tau) ) over all n samples, both directions added.

    temperature: tau, fixed, on cosines. gamma: weight of the new value in the moving average.
    positive_in_denominator: whether the 1 above is added. NUCLR's paper has it, SogCLR's released code does not.
    """

    name = "sogclr"
    citations = (
        Paper(
            "sogclr",
            "Provable Stochastic Optimization for Global Contrastive Learning: Small Batch Does Not Harm Performance",
            "Yuan, Zhuoning and others",
            "International Conference on Machine Learning",
            2022,
        ),
    )

    def __init__(self, temperature: Scale, gamma: Share, positive_in_denominator: bool) -> None:
        super().__init__(gamma)
        self._temperature, self._positive_in_denominator = temperature, positive_in_denominator

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        samples = self.rows(batch, similarity.world)
        log_ratio = math.log(self.samples - 1) - math.log(len(samples) - 1)
        negatives_by_anchor = [scores.negatives(self._temperature, log_ratio) for scores in similarity.directions]
        terms = []
        for anchor, negatives in enumerate(negatives_by_anchor):
            log_denominator = self.track(anchor, samples, negatives.log_sum(), similarity.world)
            if self._positive_in_denominator:
                log_denominator = torch.logaddexp(log_denominator, log_denominator.new_zeros(()))
            terms.append((negatives.surrogate(log_denominator), self._temperature * log_denominator.mean()))
        return sum_over_anchors(*terms)
