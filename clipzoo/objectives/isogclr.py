"""iSogCLR: the global contrastive loss with a temperature for each sample (Qiu et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from clipzoo.heads.base import Paper
from clipzoo.heads.cost import Shape
from clipzoo.objectives.per_sample import IMAGE, TEXT, MovingAverageObjective, SampleRows, both_anchors
from clipzoo.types import (
    Batch,
    Loss,
    Negatives,
    Positive,
    Probability,
    Progress,
    Scale,
    Scores,
    Share,
    Similarity,
    Weight,
    World,
    checked,
)


@checked
class ISogCLR(MovingAverageObjective):
    """1/n sum_i tau_i [ log mean_{j != i} exp((s_ij - s_ii) / tau_i) + rho ], both directions added, tau_i learned.

    temperature: initial value of every tau_i, which is clamped to [minimum_temperature, maximum_temperature].
    minimum_temperature and maximum_temperature: bounds of every tau_i.
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
        self._rho = rho
        self._eta = eta
        self._momentum = momentum
        self._gradient_clip = gradient_clip
        self._range = minimum_temperature, maximum_temperature

    @classmethod
    def cost(cls, shape: Shape, embedding: float, views: float) -> float:
        """The sample's id, and for both modalities the new sum and the gradient of the temperature."""
        return 24

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        samples = self.rows(batch, similarity.world)
        # Before the temperatures of either modality change.
        tau = samples.read(self.tau).to(similarity.image_to_text.positives().dtype)  # [2, N]

        def negatives(anchor: int, scores: Scores) -> Negatives:
            return scores.negatives(tau[anchor], -math.log(len(samples) - 1))

        def direction(anchor: int, rows: slice, terms: Negatives) -> tuple[Tensor, Tensor]:
            return self._direction(anchor, rows, terms, tau[anchor], samples, similarity.world)

        loss = both_anchors(similarity, negatives, direction)
        means = samples.read(self.tau).mean(dim=1)
        logs = {"temperature_image_mean": means[IMAGE], "temperature_text_mean": means[TEXT]}
        return Loss(loss.total, {**loss.logs, **logs})

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """Return the temperatures."""
        return self.only_seen("temperature", self.tau)

    def _direction(
        self, anchor: int, rows: slice, terms: Negatives, all_tau: Tensor, samples: SampleRows, world: World
    ) -> tuple[Tensor, Tensor]:
        log_u = self.track(anchor, samples, terms.log_sum(), world)[rows]
        if self.training:
            gradient = log_u + self._rho - terms.mean_difference(log_u)
            self._update_tau(anchor, samples, world.gather(gradient), all_tau)
        return terms.surrogate(log_u), (all_tau[rows] * (log_u + self._rho)).mean()

    def _update_tau(self, modality: int, samples: SampleRows, gradient: Tensor, tau: Tensor) -> None:
        """Take one step of SGD with momentum. gradient: [N], of the objective by the temperatures."""
        before = samples.read(self.tau_momentum)[modality].to(gradient.dtype)
        clipped = gradient.clamp(-self._gradient_clip, self._gradient_clip)
        step = (1 - self._momentum) * before + self._momentum * clipped
        samples.write(self.tau_momentum, modality, step)
        samples.write(self.tau, modality, (tau - self._eta * step).clamp(*self._range))
