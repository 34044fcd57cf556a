"""RINCE: InfoNCE that is robust to false positives (Chuang et al. 2022)."""

from __future__ import annotations

import math

from torch import Tensor

from clipzoo.heads.base import Head, Paper
from clipzoo.objectives.base import WeightedObjective, weighted_loss
from clipzoo.types import Batch, Loss, Probability, Progress, Scores, Share, Similarity, Weight, checked

LARGEST_EXPONENT = 80.0
"""exp of it is finite in float32."""


@checked
class RINCE(WeightedObjective):
    """sum over the directions of weight * mean_i [ (lam Z_i)^q - e^{q s_ii} ] / q, Z_i = sum_j e^{s_ij}.

    The paper pairs images; its code has no image-text loss.

    q: 0 gives InfoNCE + log lam, 1 a symmetric loss, which is robust to noise of the positives.
    lam: weight of the sum. Below 1 the loss falls without bound as the scores grow.
    """

    name = "rince"
    citations = (
        Paper(
            "rince",
            "Robust Contrastive Learning against Noisy Views",
            "Chuang, Ching-Yao and others",
            "IEEE/CVF Conference on Computer Vision and Pattern Recognition",
            2022,
        ),
    )

    def __init__(self, q: Probability, lam: Share, image_to_text: Weight, text_to_image: Weight) -> None:
        super().__init__(image_to_text, text_to_image)
        self._q, self._log_lam = q, math.log(lam)

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        def power(logarithms: Tensor) -> Tensor:
            """(e^x)^q / q without its constant 1 / q, which cancels: x for q = 0."""
            return (self._q * logarithms).expm1() / self._q if self._q else logarithms

        def robust(scores: Scores) -> Tensor:
            return (power(scores.log_sum_exp() + self._log_lam) - power(scores.positives())).mean()

        return weighted_loss(similarity, self.weights, robust)

    def check(self, head: Head) -> list[str]:
        if not self._q or self._q * head.score_range[1] <= LARGEST_EXPONENT:
            return []
        return [
            f"objective rince computes exp(q * score), and scores of head {type(head).__name__} reach "
            f"{head.score_range[1]:g}: use a head with a bound of at most {LARGEST_EXPONENT / self._q:g}, such as "
            "head=clip, or lower objective.q"
        ]
