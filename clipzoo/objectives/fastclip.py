"""FastCLIP v0 to v3: global contrastive losses with a decreasing inner learning rate and four rules for tau (2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from clipzoo.config.vocabulary import Decay, Epsilon, Positive, Rate, Scale, Share, Weight
from clipzoo.heads.base import Paper
from clipzoo.objectives.per_sample import MovingAverageObjective, SampleRows, sum_over_anchors
from clipzoo.types import Batch, Loss, Negatives, Progress, Similarity, checked, decimal


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
    """Names and initial values of further state of a subclass, which Adam moves (`descend`)."""
    tau: Tensor

    def __init__(
        self, version: Literal["v0", "v1", "v2", "v3"], temperature: Scale, minimum_temperature: Scale,
        maximum_temperature: Scale, temperature_rate: Rate, betas: tuple[Decay, Decay], adam_epsilon: Epsilon,
        gradient_clip: Positive, rho: Weight, epsilon: Epsilon, gamma: Share, gamma_decay: Share,
    ) -> None:  # fmt: skip
        self._per_sample, self._learned, self._times_tau = version == "v2", version in ("v0", "v3"), version > "v1"
        # The slope of v3's objective by tau has log u_i, as in the released code, and not log(eps + u_i).
        self._epsilon_in_slope = self._per_sample
        state = {"tau": temperature, "tau_mean": 0.0, "tau_square": 0.0} if self._per_sample else {}
        super().__init__(gamma, **state, **self.further_state)
        self.moves_state = bool(state or self.further_state)
        if not self._per_sample:
            self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)), requires_grad=self._learned)
        self._range, self._rate = (minimum_temperature, maximum_temperature), temperature_rate
        self._betas, self._adam_epsilon, self._gradient_clip = betas, adam_epsilon, gradient_clip
        self._rho, self._log_epsilon, self._gamma_decay = rho, math.log(epsilon), gamma_decay

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        world, samples = similarity.world, self.rows(batch, similarity.world)
        gamma, epoch = self.gamma_at(progress), progress.completed()
        if self._per_sample:
            tau = samples.read(self.tau)
        else:
            low, high = self._range
            with torch.no_grad():
                self.log_scale.clamp_(-math.log(high), -math.log(low))
            tau = (-self.log_scale.detach()).exp().expand(2, len(samples))
        tau = tau.to(similarity.image_to_text.positives().dtype)  # [2, N]

        terms, derivatives, ratios = [], [], []
        for anchor, (negatives, log_count) in enumerate(self.negatives(similarity, samples, tau, progress)):
            log_estimate, local_tau = negatives.log_sum() - log_count, tau[anchor, samples.own]
            log_u = self.track(anchor, samples, log_estimate, world, gamma)
            log_denominator = log_u.logaddexp(log_u.new_full((), self._log_epsilon))
            surrogate = negatives.surrogate(log_denominator + log_count)
            slopes = negatives.mean_difference(log_denominator + log_count)  # of log g by log(1 / tau)
            if self._times_tau:
                by_tau = self._rho + (log_denominator if self._epsilon_in_slope else log_u) - slopes
                values, by_log_scale = local_tau * (log_denominator + self._rho), -local_tau * by_tau
            else:
                surrogate, values, by_log_scale = surrogate / local_tau[0], log_denominator, slopes
            # The term of an anchor without negatives is zero.
            value, derivative = (
                self.weight * part.where(log_estimate > -math.inf, 0.0).mean() for part in (values, by_log_scale)
            )
            terms.append((self.weight * surrogate, value))
            derivatives.append(derivative)
            ratios.append((log_estimate - log_denominator).exp().mean())
            if self._per_sample and self.training:
                gradient = world.gather(by_tau).clamp(-self._gradient_clip, self._gradient_clip)
                betas = self._betas if epoch else (0.0, 0.0)
                self.descend("tau", anchor, samples, tau[anchor], gradient, self._rate, betas, self._range, epoch)
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
        directions = zip(similarity.directions, tau, strict=True)
        return [(scores.negatives(temperatures, 0.0), log_count) for scores, temperatures in directions]

    def descend(
        self, name: str, modality: int, samples: SampleRows, values: Tensor, gradient: Tensor, rate: float,
        betas: tuple[float, float], bounds: tuple[float, float], epoch: int,
    ) -> Tensor:  # fmt: skip
        """Make a step of Adam for the state `name` of the global batch: values and gradient [N] -> new values [N].

        The moments are the states NAME_mean and NAME_square; an epoch counts as one step in their bias correction.
        """
        corrected = []
        for moment, new, beta in zip(("mean", "square"), (gradient, gradient**2), betas, strict=True):
            buffer = self.get_buffer(f"{name}_{moment}")
            average = beta * samples.read(buffer)[modality].to(gradient.dtype) + (1 - beta) * new
            samples.write(buffer, modality, average)
            corrected.append(average / (1 - beta ** (epoch + 1)))
        mean, square = corrected
        values = (values - rate * mean / (square.sqrt() + self._adam_epsilon)).clamp(*bounds)
        samples.write(self.get_buffer(name), modality, values)
        return values

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
        slow = self._times_tau and self.log_scale.item() >= -math.log(0.03)
        return {self.log_scale: self._rate / 3 if slow else self._rate}

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """Return log u, and the temperatures of v2."""
        temperatures = self.only_seen("temperature", self.tau) if self._per_sample else {}
        return {**super().sample_statistics(), **temperatures}
