"""GloFND: FastCLIP without the negatives above a threshold that is learned for each anchor (Balmaseda et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from clipzoo.config.vocabulary import Decay, Epsilon, NonNegativeCount, Rate, Scale, Share, Weight
from clipzoo.heads.base import Paper
from clipzoo.objectives.fastclip import FastCLIP
from clipzoo.objectives.per_sample import SampleRows
from clipzoo.types import Negatives, Progress, Similarity, checked


@checked
class GloFND(FastCLIP):
    """FastCLIP v1 or v3 with g_i = mean over the negatives j with s_ij <= lambda_i, which are not false negatives.

    lambda_i estimates the 1 - alpha quantile of the cosines of anchor i with all samples. Each visit moves it by Adam
    along alpha minus the share of its negatives above it, before they are left out. The term of an anchor without a
    negative below its threshold is zero.

    alpha: share of false negatives. start: whole epochs without thresholds. threshold_rate: learning rate of
    the thresholds, whose initial value is 1. threshold_betas, adam_epsilon: of their Adam.
    Others as for FastCLIP.
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

    def __init__(
        self, version: Literal["v1", "v3"], temperature: Scale, minimum_temperature: Scale, maximum_temperature: Scale,
        temperature_rate: Rate, rho: Weight, epsilon: Epsilon, gamma: Share, gamma_decay: Share, alpha: Share,
        start: NonNegativeCount, threshold_rate: Rate, threshold_betas: tuple[Decay, Decay], adam_epsilon: Epsilon,
    ) -> None:  # fmt: skip
        super().__init__(
            version, temperature, minimum_temperature, maximum_temperature, temperature_rate, threshold_betas,
            adam_epsilon, 1.0, rho, epsilon, gamma, gamma_decay,
        )  # fmt: skip
        self._alpha, self._start, self._threshold_rate = alpha, start, threshold_rate

    def negatives(
        self, similarity: Similarity, samples: SampleRows, tau: Tensor, progress: Progress
    ) -> Sequence[tuple[Negatives, Tensor]]:
        epoch = progress.completed()
        if epoch < self._start:
            return super().negatives(similarity, samples, tau, progress)
        directions, thresholds = similarity.directions, samples.read(self.threshold).to(tau.dtype)

        def counts() -> list[Tensor]:
            """Numbers of negatives below the thresholds of image and of text anchors, [b]: sums of exp(0)."""
            both = zip(directions, thresholds, strict=True)
            ones = [scores.negatives(math.inf, 0.0, threshold=threshold) for scores, threshold in both]
            return [negatives.log_sum().exp().round() for negatives in ones]

        if self.training:
            gradients = [similarity.world.gather(self._alpha - 1 + count / (len(samples) - 1)) for count in counts()]
            rate, betas, bounds = self._threshold_rate, self._betas, (-1.0, 1.0)
            thresholds = torch.stack([
                self.descend("threshold", anchor, samples, thresholds[anchor], gradient, rate, betas, bounds, epoch)
                for anchor, gradient in enumerate(gradients)
            ])  # fmt: skip
        both = zip(directions, tau, thresholds, counts(), strict=True)
        return [
            (scores.negatives(temperatures, 0.0, threshold=threshold), count.clamp(min=1).log())
            for scores, temperatures, threshold, count in both
        ]

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """Return log u and the thresholds."""
        return {**super().sample_statistics(), **self.only_seen("threshold", self.threshold)}
