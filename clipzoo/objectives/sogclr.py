"""SogCLR, the global contrastive loss by moving averages (Yuan et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from clipzoo.heads.base import Paper
from clipzoo.objectives.per_sample import MovingAverageObjective, both_anchors
from clipzoo.types import Batch, Loss, Negatives, Progress, Scale, Scores, Share, Similarity, checked


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
        self._temperature = temperature
        self._positive_in_denominator = positive_in_denominator

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        samples = self.rows(batch, similarity.world)
        log_ratio = math.log(self.samples - 1) - math.log(len(samples) - 1)

        def negatives(anchor: int, scores: Scores) -> Negatives:
            return scores.negatives(self._temperature, log_ratio)

        def direction(anchor: int, rows: slice, terms: Negatives) -> tuple[Tensor, Tensor]:
            log_u = self.track(anchor, samples, terms.log_sum(), similarity.world)[rows]
            log_denominator = torch.logaddexp(log_u, log_u.new_zeros(())) if self._positive_in_denominator else log_u
            return terms.surrogate(log_denominator), self._temperature * log_denominator.mean()

        return both_anchors(similarity, negatives, direction)

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """Return log u: high for samples that resemble their negatives."""
        return self.only_seen("log_negatives", self.log_u)
