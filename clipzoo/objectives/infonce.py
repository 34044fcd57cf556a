"""InfoNCE over the global batch (van den Oord et al. 2018; CLIP's symmetric loss with weights 1/2, 1/2)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from clipzoo.heads.base import Paper
from clipzoo.objectives.base import WeightedObjective, weighted_loss
from clipzoo.types import Batch, Loss, Progress, SameCaption, Scores, Similarity, Weight, checked


@checked
class InfoNCE(WeightedObjective):
    """sum over the two directions of weight * mean_i [ log sum_j exp s_ij - s_ii ].

    positives: loss of an anchor i with several positives p, where Z_i sums exp s_ij over positives and negatives:
        "mean_log", the mean of log Z_i - s_ip (SupCon, UniCL); "log_sum", log Z_i - log sum_p exp s_ip (MIL-NCE);
        "each_alone", the mean of "mean_log" with each positive alone among the negatives.
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
    one_positive = False

    def __init__(
        self,
        image_to_text: Weight,
        text_to_image: Weight,
        positives: Literal["mean_log", "log_sum", "each_alone"] = "mean_log",
        same_caption: SameCaption = "negative",
    ) -> None:
        super().__init__(image_to_text, text_to_image, same_caption)
        self._loss = {"mean_log": cross_entropy, "log_sum": any_positive, "each_alone": each_alone}[positives]

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        return weighted_loss(similarity, self.weights, self._loss)


def cross_entropy(scores: Scores) -> Tensor:
    """Return the mean over the local anchors of -log softmax at the positive, or its mean over the positives."""
    return (scores.log_sum_exp() - scores.positives()).mean()


def any_positive(scores: Scores) -> Tensor:
    """Return the mean over the local anchors of -log of the softmax's sum over the positives."""
    return (scores.log_sum_exp() - scores.positives_log_sum_exp()).mean()


def each_alone(scores: Scores) -> Tensor:
    """Return the mean over the local anchors of the cross-entropy of one positive and the negatives."""
    return scores.each_alone().mean()
