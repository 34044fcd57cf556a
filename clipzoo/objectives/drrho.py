"""DRRho-CLIP: FastCLIP on the excess over a reference model (Wei et al. 2025)."""

from __future__ import annotations

from dataclasses import replace

from clipzoo.errors import ConfigError
from clipzoo.heads.base import Paper
from clipzoo.objectives.fastclip import FastCLIP
from clipzoo.types import Batch, Epsilon, Loss, Progress, Rate, Scale, Share, Similarity, Weight, checked


@checked
class DRRhoCLIP(FastCLIP):
    """tau [log(eps + g_i) + rho], averaged over anchors and summed over both modalities, with

        g_i = mean_{j != i} exp([(s_ij - s_ii) - (r_ij - r_ii)] / tau)

    and the cosines r of a frozen teacher, whose embeddings may have any width. Otherwise as FastCLIP v3.

    temperature: tau, on differences of cosines. learnable_temperature: learn tau as FastCLIP v3 does, between its
    bounds with the rate temperature_rate. rho, epsilon: as for FastCLIP.
    gamma: final weight of a batch estimate; None for the paper's law, min(1, 4.177 E^-0.7265) for E epochs.
    gamma_decay: share of the epochs in which it falls from 1.
    """

    name = "drrho"
    needs_teacher = True
    citations = (
        Paper(
            "drrho",
            "Model Steering: Learning with a Reference Model Improves Generalization Bounds and Scaling Laws",
            "Wei, Xiyuan and others",
            "International Conference on Machine Learning",
            2025,
        ),
    )
    weight = 1.0

    def __init__(
        self, temperature: Scale, learnable_temperature: bool, minimum_temperature: Scale, maximum_temperature: Scale,
        temperature_rate: Rate, rho: Weight, epsilon: Epsilon, gamma: Share | None, gamma_decay: Share,
    ) -> None:  # fmt: skip
        # Betas, epsilon and clip belong to the temperatures of v2.
        super().__init__(
            "v3", temperature, minimum_temperature, maximum_temperature, temperature_rate, (0.0, 0.0), 1.0, 1.0,
            rho, epsilon, gamma or 1.0, gamma_decay,
        )  # fmt: skip
        self._learned, self._law, self._epsilon_in_slope = learnable_temperature, gamma is None, True
        self.log_scale.requires_grad_(learnable_temperature)

    def final_gamma(self, epochs: int) -> float:
        return min(1.0, 4.177 * epochs**-0.7265) if self._law else super().final_gamma(epochs)

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        reference = similarity.teacher
        if reference is None or reference.log_cosine_scale is None:
            raise ConfigError(
                "objective drrho compares cosines with those of a reference model: give a teacher whose scores are "
                "cosines times a factor, such as teacher=open_clip"
            )
        to_cosines = (-reference.log_cosine_scale).exp()
        pairs = zip(similarity.directions, reference.directions, strict=True)
        images, texts = (scores.minus(teacher.scaled(to_cosines.mul)) for scores, teacher in pairs)
        return super().forward(replace(similarity, image_to_text=images, text_to_image=texts), batch, progress)
