"""NUCLR: a global contrastive loss with learned popularities of the negatives (Wang et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from torch import Tensor

from clipzoo.config.vocabulary import NonNegativeCount, Probability, Range, Scale, Share, Weight
from clipzoo.heads.base import Paper
from clipzoo.objectives.per_sample import UNSET, MovingAverageObjective, sum_over_anchors
from clipzoo.types import Batch, Loss, Progress, Similarity, checked

Popularity = Annotated[float, Range(at_least=-10, at_most=10)]
"""A log popularity times the temperature, on the scale of cosines."""


@checked
class NUCLR(MovingAverageObjective):
    """Algorithm 1 summed over anchors of both modalities: a surrogate loss whose gradient is the estimator (15).

    The state of a sample in each modality is log u (moving average of the sum over its negatives), zeta (tau times its
    log popularity as a negative) and the momentum of zeta. Each modality has one xi, which reduces the weight of the
    positives in the model's gradient.

    temperature: tau, fixed, on cosines. gamma: weight of the new value in u.
    zeta, xi: initial values. eta: initial learning rate of zeta.
    eta_image_factor: factor of eta for the zeta of images.
    momentum: weight of the new gradient in the momentum of zeta (0.9 in the released code).
    frozen_epochs: number of whole epochs at the start in which zeta is constant; 0 is the paper's spade variant.
    learn_zeta: False is the dagger variant.
    positive: the positive's strength in the model's gradient is exp(-xi / tau) or exp(-zeta / tau); "zeta" is the
        diamond variant.
    xi_update: "epoch": max(xi, signed maximum of zeta) at the end of an epoch, as in the released code; "step": running
        maximum of |zeta|, as in Algorithm 1.
    """

    name = "nuclr"
    citations = (
        Paper(
            "nuclr",
            "On Discriminative Probabilistic Modeling for Self-Supervised Representation Learning",
            "Wang, Bokun and Lei, Yunwen and Ying, Yiming and Yang, Tianbao",
            "International Conference on Learning Representations",
            2025,
        ),
    )
    depends_on_length = True
    zeta: Tensor
    zeta_momentum: Tensor
    xi: Tensor

    def __init__(
        self,
        temperature: Scale,
        gamma: Share,
        zeta: Popularity,
        xi: Popularity,
        eta: Probability,
        eta_image_factor: Weight,
        momentum: Share,
        frozen_epochs: NonNegativeCount,
        learn_zeta: bool,
        positive: Literal["xi", "zeta"],
        xi_update: Literal["epoch", "step"],
    ) -> None:
        super().__init__(gamma, zeta=zeta, zeta_momentum=UNSET)
        self.register_buffer("xi", torch.full((2,), xi))
        self._temperature, self._first_xi, self._momentum = temperature, xi, momentum
        self._eta, self._eta_factors = eta, (eta_image_factor, 1.0)
        self._frozen_epochs, self._learn_zeta = frozen_epochs, learn_zeta
        self._positive_by_xi, self._xi_each_step = positive == "xi", xi_update == "step"

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        samples, tau = self.rows(batch, similarity.world), self._temperature
        if self.training and not self._xi_each_step and progress.step > 0 and progress.begins_epoch:
            self.xi.copy_(self.largest(self.zeta).clamp(min=self._first_xi))
        rate = zeta_rate(progress, self._eta, self._frozen_epochs) if self._learn_zeta else 0.0
        # Read before the popularities of either modality change.
        zeta = samples.read(self.zeta).to(similarity.image_to_text.positives().dtype)  # [2, N]
        log_ratio = math.log(self.samples - 1) - math.log(len(samples) - 1)
        directions = zip(similarity.directions, zeta.flip(0), strict=True)
        negatives_by_anchor = [scores.negatives(tau, log_ratio, of_contrasts) for scores, of_contrasts in directions]
        terms, log_pulls = [], []
        for anchor, negatives in enumerate(negatives_by_anchor):
            log_u, contrast = self.track(anchor, samples, negatives.log_sum(), similarity.world), 1 - anchor
            zeta_strength = -zeta[contrast, samples.own] / tau
            xi_strength = -self.xi[contrast].to(log_u.dtype) / tau
            log_denominator = torch.logaddexp(xi_strength if self._positive_by_xi else zeta_strength, log_u)
            if self.training and rate > 0:
                # The gradient of the popularity always weighs the positive by its zeta, and includes the diagonal.
                log_pulls.append(negatives.log_pull(torch.logaddexp(zeta_strength, log_u), similarity.world))
            terms.append((negatives.surrogate(log_denominator), tau * log_denominator.mean()))

        # A step of SGD with momentum along n times the gradient (14), for the contrasts of the global batch. The pull
        # is the log of the sum over anchors i of exp((s_ij - s_ii - zeta_j) / tau) / (exp(-zeta_i / tau) + u_i), [N].
        for anchor, log_pull in enumerate(log_pulls):
            contrast = 1 - anchor
            gradient = 1 - (log_pull() + math.log(self.samples / len(samples))).exp()
            old_momentum = samples.read(self.zeta_momentum)[contrast].to(gradient.dtype)
            blended = (1 - self._momentum) * old_momentum + self._momentum * gradient
            step = torch.where(old_momentum == UNSET, gradient, blended)
            samples.write(self.zeta_momentum, contrast, step)
            samples.write(self.zeta, contrast, zeta[contrast] - rate * self._eta_factors[contrast] * step)
        if self.training and self._xi_each_step:
            self.xi.copy_(torch.maximum(self.xi, self.largest(self.zeta, magnitude=True)))

        loss = sum_over_anchors(*terms)
        logs = {**loss.logs, "zeta_rate": self.zeta.new_full((), rate)}
        for name, values, xi in zip(("image", "text"), samples.read(self.zeta), self.xi, strict=True):
            logs |= {f"zeta_{name}_mean": values.mean(), f"zeta_{name}_min": values.min()}
            logs |= {f"zeta_{name}_max": values.max(), f"xi_{name}": xi.clone()}
        return Loss(loss.total, logs)

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """Return the log popularity, zeta / tau."""
        return self.only_seen("log_popularity", self.zeta / self._temperature)


def zeta_rate(progress: Progress, eta: float, frozen_epochs: int) -> float:
    """A cosine from eta to 0 over the epochs after the frozen ones; / 10 from half of training, / 100 from 3/4 of it.

    It changes at epoch boundaries, as in the released code. zeta is constant in a training shorter than the freeze.
    """
    epoch, epochs = progress.completed(), math.ceil(progress.total_steps / progress.steps(1))
    if epoch < frozen_epochs:
        return 0.0
    fraction = min(1.0, (epoch - frozen_epochs) / max(1, epochs - 1 - frozen_epochs))
    cosine = eta * (1 + math.cos(math.pi * fraction)) / 2
    if epoch >= epochs * 3 // 4:
        return cosine / 100
    return cosine / 10 if epoch >= epochs // 2 else cosine
