"""FastCLIP v0 to v3: global contrastive losses with a decreasing inner learning rate and four rules for tau (2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from clipzoo.heads.base import Paper
from clipzoo.objectives.per_sample import MovingAverageObjective, SampleRows, sum_over_anchors
from clipzoo.types import (
    Batch,
    Decay,
    Epsilon,
    Loss,
    Negatives,
    Positive,
    Progress,
    Rate,
    Scale,
    Scores,
    Share,
    Similarity,
    Weight,
    checked,
    decimal,
)


@checked
class FastCLIP(MovingAverageObjective):
    """With g_i = mean_{j != i} exp((s_ij - s_ii) / tau), half the sum over both modalities of the mean over anchors of

        v0, v1: log(eps + g_i)    v2: tau_i [log(eps + g_i) + rho]    v3: tau [log(eps + g_i) + rho]

    u_i, the moving average of g_i, replaces g_i in the denominators of the gradients. tau is fixed in v1, learned in v0
    and v3, and learned for each sample and modality in v2. Gradients are those of the formulas: see
    docs/papers/deviations.md for the released code.

    temperature: initial value of tau. minimum_temperature and maximum_temperature: bounds of a learned tau.
    temperature_rate: learning rate of tau. v0, v3: of log(1 / tau) in the model's optimizer, constant; in v3 a third of
        it while tau <= 0.03. v2: of the Adam of the samples' temperatures.
    betas, adam_epsilon, gradient_clip: Adam of v2; in the first epoch both betas are 0.
    rho: radius of the robust objective (v2, v3). epsilon: eps above.
    gamma: final weight of a batch estimate in u; it falls from 1 along half a cosine, at epoch boundaries.
    gamma_decay: share of the epochs in which it falls.
    """

    name = "fastclip"
    depends_on_length = True
    citations = (
        Paper(
            "fastclip",
            "FastCLIP: A Suite of Optimization Techniques to Accelerate CLIP Training with Limited Resources",
            "Wei, Xiyuan and others",
            "arXiv preprint arXiv:2407.01445",
            2024,
        ),
    )
    relations = {
        "minimum_temperature <= temperature <= maximum_temperature": (
            "temperature must lie between minimum_temperature and maximum_temperature"
        )
    }
    weight = 0.5
    """Weight of each modality."""
    further_state: Mapping[str, float] = {}
    """Names and initial values of further state of a subclass."""
    epsilon_in_level = False
    """Whether the slope of v3's objective by tau has log(eps + u_i), and not log u_i as in the released code."""
    tau: Tensor
    tau_mean: Tensor
    tau_square: Tensor

    def __init__(
        self,
        version: Literal["v0", "v1", "v2", "v3"],
        temperature: Scale,
        minimum_temperature: Scale,
        maximum_temperature: Scale,
        temperature_rate: Rate,
        betas: tuple[Decay, Decay],
        adam_epsilon: Epsilon,
        gradient_clip: Positive,
        rho: Weight,
        epsilon: Epsilon,
        gamma: Share,
        gamma_decay: Share,
    ) -> None:
        self._per_sample, self._learned, self._times_tau = version == "v2", version in ("v0", "v3"), version > "v1"
        state = {"tau": temperature, "tau_mean": 0.0, "tau_square": 0.0} if self._per_sample else {}
        super().__init__(gamma, **state, **self.further_state)
        if not self._per_sample:
            self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)), requires_grad=self._learned)
        self._range, self._rate = (minimum_temperature, maximum_temperature), temperature_rate
        self._betas, self._adam_epsilon, self._gradient_clip = betas, adam_epsilon, gradient_clip
        self._rho, self._log_epsilon, self._gamma_decay = rho, math.log(epsilon), gamma_decay

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        world, samples = similarity.world, self.rows(batch, similarity.world)
        gamma = self.gamma_at(progress)
        tau = self._temperatures(samples).to(similarity.image_to_text.positives().dtype)  # [2, N]
        terms, derivatives, ratios = [], [], []
        for anchor, (negatives, log_count) in enumerate(self.negatives(similarity, samples, tau, progress)):
            log_estimate = negatives.log_sum() - log_count
            # The term of an anchor without negatives is zero.
            counted, count = log_estimate > -math.inf, len(batch)
            log_u = self.track(anchor, samples, log_estimate, world, gamma)
            log_denominator = torch.logaddexp(log_u, log_u.new_full((), self._log_epsilon))
            log_u, log_denominator = log_u.where(counted, 0.0), log_denominator.where(counted, 0.0)
            local_tau = tau[anchor, samples.own]
            slopes = negatives.mean_difference(log_denominator + log_count)  # of log g by log(1 / tau)
            surrogate, values = negatives.surrogate(log_denominator + log_count), log_denominator
            if self._times_tau:
                level = self._rho + (log_denominator if self._per_sample or self.epsilon_in_level else log_u)
                by_tau, values = level - slopes, local_tau * (log_denominator + self._rho)
            else:
                by_tau, surrogate = -slopes / local_tau, surrogate / local_tau[0]
            terms.append((self.weight * surrogate, self.weight * values.where(counted, 0.0).sum() / count))
            derivatives.append(-self.weight * (local_tau * by_tau).where(counted, 0.0).sum() / count)
            ratios.append((log_estimate - log_denominator).exp().mean())
            if self._per_sample and self.training:
                clip, buffers = self._gradient_clip, (self.tau_mean, self.tau_square)
                gradient = world.gather(by_tau).clamp(-clip, clip)
                betas = self._betas if progress.completed() else (0.0, 0.0)
                step = adam(samples, anchor, buffers, gradient, betas, self._adam_epsilon, progress.completed())
                samples.write(self.tau, anchor, (tau[anchor] - self._rate * step).clamp(*self._range))
        loss = sum_over_anchors(*terms)
        total = loss.total
        if self._learned:
            # A term with value zero and the derivative by log(1 / tau) as its gradient.
            total = total + (self.log_scale - self.log_scale.detach()) * sum(derivatives)
        logs = {"tau": tau.mean(), "gamma": tau.new_full((), gamma), "ratio": sum(ratios, tau.new_zeros(()))}
        return Loss(total, {**loss.logs, **logs})

    def negatives(
        self, similarity: Similarity, samples: SampleRows, tau: Tensor, progress: Progress
    ) -> Sequence[tuple[Negatives, Tensor]]:
        """Return the terms of (N - 1) g of image anchors and of text anchors, and log(N - 1). tau: [2, N]."""
        log_count = tau.new_full((), math.log(len(samples) - 1))
        directions = zip(self.directions(similarity), tau, strict=True)
        return [(scores.negatives(temperatures, 0.0), log_count) for scores, temperatures in directions]

    def directions(self, similarity: Similarity) -> Sequence[Scores]:
        """Return the scores s of image anchors and of text anchors."""
        return similarity.directions

    def gamma_at(self, progress: Progress) -> float:
        """Return the weight of a batch estimate: 1 in the first epoch, `gamma` from the decay's end."""
        epochs = math.ceil(progress.total_steps / progress.steps(1))
        decay = max(1, math.floor(decimal(self._gamma_decay) * epochs))
        cosine = (1 + math.cos(math.pi * min(1.0, progress.completed() / decay))) / 2
        final = self.final_gamma(epochs)
        return final + (1 - final) * cosine

    def final_gamma(self, epochs: int) -> float:
        """Return `gamma` for a training of some number of epochs."""
        return self._gamma

    def learning_rates(self, progress: Progress) -> Mapping[nn.Parameter, float]:
        if not self._learned:
            return {}
        slow = self._times_tau and self.log_scale.item() >= -math.log(SLOW_BELOW)
        return {self.log_scale: self._rate / 3 if slow else self._rate}

    def _temperatures(self, samples: SampleRows) -> Tensor:
        """Return the temperatures of the anchors of both modalities, [2, N]."""
        if self._per_sample:
            return samples.read(self.tau)
        low, high = self._range
        with torch.no_grad():
            self.log_scale.clamp_(-math.log(high), -math.log(low))
        return (-self.log_scale.detach()).exp().expand(2, len(samples))

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """Return log u, and the temperatures of v2."""
        statistics = self.only_seen("log_negatives", self.log_u)
        return {**statistics, **self.only_seen("temperature", self.tau)} if self._per_sample else statistics


SLOW_BELOW = 0.03
"""Temperature of v3 from which its learning rate is a third."""


def adam(
    samples: SampleRows,
    modality: int,
    moments: tuple[Tensor, Tensor],
    gradient: Tensor,
    betas: tuple[float, float],
    epsilon: float,
    epoch: int,
) -> Tensor:
    """Update the moments of the global batch with its gradients, [N], and return Adam's step without its rate.

    moments: buffers of the first and of the second moment. An epoch counts as one step in the bias correction.
    """
    corrected = []
    for buffer, new, beta in zip(moments, (gradient, gradient**2), betas, strict=True):
        moment = beta * samples.read(buffer)[modality].to(gradient.dtype) + (1 - beta) * new
        samples.write(buffer, modality, moment)
        corrected.append(moment / (1 - beta ** (epoch + 1)))
    mean, square = corrected
    return mean / (square.sqrt() + epsilon)
