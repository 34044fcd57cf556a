"""InfoLOOB, the leave-one-out bound: InfoNCE without the positive in the denominator (CLOOB, eq. 8)."""

from __future__ import annotations

import math

from torch import Tensor

from clipzoo.heads.base import Head
from clipzoo.heads.cloob import CLOOB
from clipzoo.objectives.base import WeightedObjective, weighted_loss
from clipzoo.types import Batch, Loss, Progress, SameCaption, Scale, Scores, Similarity, Weight, checked


@checked
class InfoLOOB(WeightedObjective):
    """scale * sum over the two directions of weight * mean_i [ log sum_{j != i} exp s_ij - s_ii ].

    With several positives, s_ii is their mean. An anchor without negatives has no loss.

    scale: factor of the loss; CLOOB trains tau * (sum of two terms), so scale = tau = 1/30 with weights 1, 1.
    image_to_text, text_to_image: weights of the directions. For a Hopfield head the first is CLOOB's U term, anchored
    on images, the second its V term, anchored on texts.
    """

    name = "infoloob"
    citations = (CLOOB,)
    loss_unit = "nats"
    needs_negatives = True
    one_positive = False

    def __init__(
        self,
        scale: Scale,
        image_to_text: Weight,
        text_to_image: Weight,
        same_caption: SameCaption = "negative",
    ) -> None:
        super().__init__(image_to_text, text_to_image, same_caption)
        self.weights = scale * image_to_text, scale * text_to_image

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        return weighted_loss(similarity, self.weights, leave_one_out)

    def check(self, head: Head) -> list[str]:
        if all(math.isfinite(bound) for bound in head.score_range):
            return []
        return [
            f"objective infoloob has no minimum under scores without bounds (head {type(head).__name__} gives "
            f"{head.score_range}): use head=cloob, or objective=infonce"
        ]

    def warnings(self, head: Head) -> list[str]:
        warnings = super().warnings(head)
        if head.learnable_temperature:
            warnings.append(
                f"objective infoloob does not saturate, so the learnable temperature of head {type(head).__name__} "
                "runs to its bound; CLOOB trains with a fixed one"
            )
        return warnings


def leave_one_out(scores: Scores) -> Tensor:
    """Return the mean over the local anchors of log sum_{j != i} exp s_ij - s_ii."""
    losses = scores.log_sum_exp(exclude_positive=True) - scores.positives()
    return losses.where(losses != -math.inf, 0.0).mean()
