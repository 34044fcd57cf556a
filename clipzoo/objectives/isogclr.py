"""iSogCLR: the global contrastive loss with a temperature for each sample (Qiu et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from clipzoo.heads.base import Paper
from clipzoo.objectives.per_sample import MovingAverageObjective, sum_over_anchors
from clipzoo.types import Batch, Loss, Positive, Probability, Progress, Scale, Share, Similarity, Weight, checked


@checked
class ISogCLR(MovingAverageObjective):
    """1/n sum_i tau_i [ log mean_{j != i} exp((s_ij - s_ii) / tau_i) + rho ], both directions added, tau_i learned.

    temperature: initial value of every tau_i.
    minimum_temperature and maximum_temperature: bounds to which every tau_i is clamped.
    gamma: weight of the new value in the moving average. rho: radius of the robust objective.
    eta: learning rate of the temperatures. momentum: weight of the new gradient in their momentum, initially zero.
    gradient_clip: bound of the gradient of a temperature.
    """

    name = "isogclr"
    citations = (
        Paper(
            "isogclr",
            "Not All Semantics are Created Equal: Contrastive Self-supervised Learning with Automatic Temperature "
            "Individualization",
            "Qiu, Zi-Hao and others",
            "International Conference on Machine Learning",
            2023,
        ),
    )
    moves_state = True
    tau: Tensor
    tau_momentum: Tensor

    relations = {
        "minimum_temperature <= temperature <= maximum_temperature": (
            "temperature must lie between minimum_temperature and maximum_temperature"
        )
    }

    def __init__(
        self,
        temperature: Scale,
        gamma: Share,
        rho: Weight,
        eta: Probability,
        momentum: Share,
        gradient_clip: Positive,
        minimum_temperature: Scale,
        maximum_temperature: Scale,
    ) -> None:
        super().__init__(gamma, tau=temperature, tau_momentum=0.0)
        self._rho, self._eta, self._momentum, self._gradient_clip = rho, eta, momentum, gradient_clip
        self._range = minimum_temperature, maximum_temperature

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        world = similarity.world
        samples = self.rows(batch, world)
        # Read before the temperatures of either modality change.
        tau = samples.read(self.tau).to(similarity.image_to_text.positives().dtype)  # [2, N]
        log_factor = -math.log(len(samples) - 1)
        both = [scores.negatives(tau[anchor], log_factor) for anchor, scores in enumerate(similarity.directions)]
        terms = []
        for anchor, negatives in enumerate(both):
            log_u = self.track(anchor, samples, negatives.log_sum(), world)
            if self.training:
                # A step of SGD with momentum for the temperatures of the global batch.
                gradient = world.gather(log_u + self._rho - negatives.mean_difference(log_u))
                gradient = gradient.clamp(-self._gradient_clip, self._gradient_clip)
                old_momentum = samples.read(self.tau_momentum)[anchor].to(gradient.dtype)
                step = (1 - self._momentum) * old_momentum + self._momentum * gradient
                samples.write(self.tau_momentum, anchor, step)
                samples.write(self.tau, anchor, (tau[anchor] - self._eta * step).clamp(*self._range))
            terms.append((negatives.surrogate(log_u), (tau[anchor, samples.own] * (log_u + self._rho)).mean()))
        loss = sum_over_anchors(*terms)
        image_mean, text_mean = samples.read(self.tau).mean(dim=1)
        logs = {"temperature_image_mean": image_mean, "temperature_text_mean": text_mean}
        return Loss(loss.total, {**loss.logs, **logs})

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """Return the temperatures."""
        return self.only_seen("temperature", self.tau)
