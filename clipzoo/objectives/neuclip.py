"""NeuCLIP: log-normalizers predicted by a small network (Wei et al. 2025)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clipzoo.heads.base import Paper
from clipzoo.objectives.amorlip import FittedObjective
from clipzoo.types import Batch, Count, Epsilon, Loss, Progress, Rate, Scale, Similarity, checked


@checked
class NeuCLIP(FittedObjective):
    """1/2 sum over the directions of mean_i log(eps + g_i), g_i = mean_{j != i} exp((s_ij - s_ii) / tau).

    log(eps + g) = min_a [ e^{-a} (eps + g) + a - 1 ]. The network predicts a_i, is fitted to this minimum, and e^{-a_i}
    replaces 1 / (eps + g_i) in the gradient of the model. The loss is a surrogate with this gradient.

    The network is ours, as the authors' code is not public: a_i = log mean_k exp(w_k . x_i / tau) - s_ii / tau. Its
    prototypes w_k start in every epoch as the embeddings of a batch's other modality.

    temperature: tau, fixed, on cosines. epsilon: added to the means over negatives.
    prototypes: number of prototypes of each modality.
    """

    name = "neuclip"
    citations = (
        Paper(
            "neuclip",
            "NeuCLIP: Efficient Large-Scale CLIP Training with Neural Normalizer Optimization",
            "Wei, Xiyuan and Lin, Chih-Jen and Yang, Tianbao",
            year=2025,
        ),
    )

    def __init__(
        self, temperature: Scale, epsilon: Epsilon, prototypes: Count, width: Count, fit_steps: Count, fit_rate: Rate
    ) -> None:
        super().__init__((2, prototypes, width), width, fit_steps, fit_rate)
        self._temperature, self._log_epsilon = temperature, math.log(epsilon)

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        tau, log_factor = self._temperature, -math.log(similarity.image_to_text.columns - 1)
        both = [scores.negatives(tau, log_factor) for scores in similarity.directions]
        log_sums = torch.stack([negatives.log_sum() for negatives in both])  # [2, b]
        log_sums = log_sums.logaddexp(log_sums.new_full((), self._log_epsilon))
        value = log_sums.mean(dim=1).sum() / 2
        if not self.training:
            return Loss(value, {"objective": value})

        features = self.embeddings(similarity)
        if progress.begins_epoch:
            others = similarity.world.gather(features.flip(0).transpose(0, 1))  # [N, 2, d]
            rows = torch.arange(self.network.shape[1], device=others.device) % len(others)
            self.restart(others[rows].transpose(0, 1))
        positives = torch.stack([scores.positives().detach() for scores in similarity.directions])

        def predict(prototypes: Tensor) -> Tensor:
            """Prototypes [2, K, d] -> a, [2, b]."""
            logits = (features @ prototypes.mT - positives[:, :, None]) / tau
            return logits.logsumexp(dim=2) - math.log(prototypes.shape[1])

        def bound(prototypes: Tensor) -> Tensor:
            normalizers = predict(prototypes)
            return ((log_sums - normalizers).exp() + normalizers - 1).mean(dim=1).sum()

        self.fit(bound, similarity.world)
        normalizers = predict(self.network)
        first, second = (negatives.surrogate(a) for negatives, a in zip(both, normalizers, strict=True))
        error = (normalizers - log_sums).abs().mean()
        return Loss((first + second) / (2 * tau), {"objective": value, "normalizer_error": error})
