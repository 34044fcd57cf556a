"""InfoNCE over the global batch (van den Oord et al. 2018; CLIP's symmetric loss with weights 1/2, 1/2)."""

from __future__ import annotations

from torch import Tensor

from clipzoo.heads.base import Paper
from clipzoo.objectives.base import Objective, weighted_loss
from clipzoo.types import Batch, Loss, Progress, Scores, Similarity, Weight, checked


@checked
class InfoNCE(Objective):
    """sum over the two directions of weight * mean_i [ log sum_j exp s_ij - s_ii ].

    image_to_text, text_to_image: weights of the directions, 0.5 and 0.5 for CLIP's loss.
    """

    name = "infonce"
    citations = (
        Paper(
            "infonce",
            "Representation Learning with Contrastive Predictive Coding",
            "van den Oord, Aaron and Li, Yazhe and Vinyals, Oriol",
            year=2018,
        ),
    )
    loss_unit = "nats"

    relations = {"image_to_text + text_to_image > 0": "one of the weights must be above 0"}

    def __init__(self, image_to_text: Weight, text_to_image: Weight) -> None:
        super().__init__()
        self._weights = image_to_text, text_to_image

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        return weighted_loss(similarity, self._weights, cross_entropy)


def cross_entropy(scores: Scores) -> Tensor:
    """Return the mean over the local anchors of -log softmax at the positive."""
    return (scores.log_sum_exp() - scores.positives()).mean()
