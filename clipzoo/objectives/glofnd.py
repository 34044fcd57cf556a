"""GloFND: FastCLIP without the negatives above a threshold that is learned for each anchor (Balmaseda et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from clipzoo.heads.base import Paper
from clipzoo.objectives.fastclip import FastCLIP, adam
from clipzoo.objectives.per_sample import SampleRows
from clipzoo.types import (
    Decay,
    Epsilon,
    Negatives,
    NonNegativeCount,
    Progress,
    Rate,
    Scale,
    Share,
    Similarity,
    Weight,
    checked,
)


@checked
class GloFND(FastCLIP):
    """FastCLIP v1 or v3 with g_i = mean over the negatives j with s_ij <= lambda_i, which are not false negatives.

    lambda_i estimates the 1 - alpha quantile of the cosines of anchor i with all samples. Each visit moves it by Adam
    along alpha minus the share of its negatives above it, before they are left out. The term of an anchor without a
    negative below its threshold is zero.

    alpha: share of false negatives. start: whole epochs without thresholds. threshold_rate, threshold_betas,
    adam_epsilon: Adam of the thresholds, whose initial value is 1. Other arguments: see FastCLIP.
    """

    name = "glofnd"
    citations = (
        Paper(
            "glofnd",
            "Discovering Global False Negatives On the Fly for Self-supervised Contrastive Learning",
            "Balmaseda, Vicente and others",
            "International Conference on Machine Learning",
            2025,
        ),
    )
    further_state = {"threshold": 1.0, "threshold_mean": 0.0, "threshold_square": 0.0}
    threshold: Tensor
    threshold_mean: Tensor
    threshold_square: Tensor

    def __init__(
        self,
        version: Literal["v1", "v3"],
        temperature: Scale,
        minimum_temperature: Scale,
        maximum_temperature: Scale,
        temperature_rate: Rate,
        rho: Weight,
        epsilon: Epsilon,
        gamma: Share,
        gamma_decay: Share,
        alpha: Share,
        start: NonNegativeCount,
        threshold_rate: Rate,
        threshold_betas: tuple[Decay, Decay],
        adam_epsilon: Epsilon,
    ) -> None:
        super().__init__(
            version, temperature, minimum_temperature, maximum_temperature, temperature_rate, threshold_betas,
            adam_epsilon, 1.0, rho, epsilon, gamma, gamma_decay,
        )  # fmt: skip
        self._alpha, self._start, self._threshold_rate = alpha, start, threshold_rate

    def negatives(
        self, similarity: Similarity, samples: SampleRows, tau: Tensor, progress: Progress
    ) -> Sequence[tuple[Negatives, Tensor]]:
        if progress.completed() < self._start:
            return super().negatives(similarity, samples, tau, progress)
        directions, thresholds = similarity.directions, samples.read(self.threshold).to(tau.dtype)

        def counts() -> list[Tensor]:
            """Numbers of negatives below the thresholds of image and of text anchors, [b]: sums of exp(0)."""
            both = zip(directions, thresholds, strict=True)
            ones = [scores.negatives(math.inf, 0.0, threshold=threshold) for scores, threshold in both]
            return [negatives.log_sum().exp().round() for negatives in ones]

        if self.training:
            moved = []
            for anchor, count in enumerate(counts()):
                gradient = similarity.world.gather(self._alpha - (1 - count / (len(samples) - 1)))
                buffers = self.threshold_mean, self.threshold_square
                step = adam(samples, anchor, buffers, gradient, self._betas, self._adam_epsilon, progress.completed())
                moved.append((thresholds[anchor] - self._threshold_rate * step).clamp(-1, 1))
                samples.write(self.threshold, anchor, moved[-1])
            thresholds = torch.stack(moved)
        both = zip(directions, tau, thresholds, counts(), strict=True)
        return [
            (scores.negatives(temperatures, 0.0, threshold=threshold), count.clamp(min=1).log())
            for scores, temperatures, threshold, count in both
        ]

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """Return log u and the thresholds."""
        return {**super().sample_statistics(), **self.only_seen("threshold", self.threshold)}
