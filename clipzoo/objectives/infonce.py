"""InfoNCE over the global batch (van den Oord et al. 2018; CLIP's symmetric loss with weights 1/2, 1/2)."""

from __future__ import annotations

import torch

from clipzoo.objectives.base import Objective
from clipzoo.types import Batch, Loss, Progress, Scores, Similarity


class InfoNCE(Objective):
    """sum over the two directions of weight * mean_i [ log sum_j exp s_ij - s_ii ].

    image_to_text, text_to_image: the directions' weights, 0.5 each for CLIP's loss.
    """

    name = "infonce"

    def __init__(self, image_to_text: float, text_to_image: float) -> None:
        super().__init__()
        self._weights = image_to_text, text_to_image

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        losses = torch.stack([_cross_entropy(scores) for scores in similarity.directions])
        weights = losses.new_tensor(self._weights)
        image_to_text, text_to_image = losses.detach()
        logs = {"loss_image_to_text": image_to_text, "loss_text_to_image": text_to_image}
        return Loss((weights * losses).sum(), logs)


def _cross_entropy(scores: Scores):
    return (scores.log_sum_exp() - scores.positives()).mean()
