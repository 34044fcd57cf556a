"""iSogCLR: the global contrastive loss with a temperature for each sample (Qiu et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from clipzoo.objectives.moving_average import (
    MovingAverageObjective,
    both_anchors,
    differences,
    local_rows,
    surrogate,
    without_positive,
)
from clipzoo.objectives.per_sample import IMAGE, TEXT
from clipzoo.types import (
    Batch,
    Loss,
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
    gamma: weight of the new value in the moving average. rho: radius of the robust objective.
    eta: learning rate of the temperatures. momentum: weight of the new gradient in their momentum, initially zero.
    gradient_clip: bound of the gradient of a temperature.
    """

    name = "isogclr"
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

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        ids = self.global_ids(batch, similarity.world)
        loss = both_anchors(similarity, lambda anchor, scores: self._direction(anchor, scores, ids, similarity.world))
        means = self.tau[:, ids].mean(dim=1)
        logs = {"temperature_image_mean": means[IMAGE], "temperature_text_mean": means[TEXT]}
        return Loss(loss.total, {**loss.logs, **logs})

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """Return the temperatures."""
        return self.only_seen("temperature", self.tau)

    def _direction(self, anchor: int, scores: Scores, ids: Tensor, world: World) -> tuple[Tensor, Tensor]:
        difference = differences(scores)
        all_tau = self.tau[anchor, ids].to(difference.dtype)  # [N]
        tau = all_tau[local_rows(scores)]  # [b]
        exponents = difference.detach() / tau[:, None]
        log_terms = without_positive(exponents - math.log(len(ids) - 1), scores)
        log_u = self.track(anchor, ids, log_terms.logsumexp(dim=1), world)[local_rows(scores)]
        log_weights = log_terms - log_u[:, None]
        if self.training:
            gradient = log_u + self._rho - (log_weights.exp() * exponents).sum(dim=1)
            self._update_tau(anchor, ids, world.gather(gradient), all_tau)
        return surrogate(log_weights, difference), (tau * (log_u + self._rho)).mean()

    def _update_tau(self, modality: int, ids: Tensor, gradient: Tensor, tau: Tensor) -> None:
        """Take one step of SGD with momentum. gradient: [N], of the objective by the temperatures."""
        before = self.tau_momentum[modality, ids].to(gradient.dtype)
        clipped = gradient.clamp(-self._gradient_clip, self._gradient_clip)
        step = (1 - self._momentum) * before + self._momentum * clipped
        self.tau_momentum[modality, ids] = step.to(self.tau_momentum.dtype)
        self.tau[modality, ids] = (tau - self._eta * step).clamp(*self._range).to(self.tau.dtype)
