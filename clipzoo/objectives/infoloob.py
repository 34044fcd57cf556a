"""InfoLOOB, the leave-one-out bound: InfoNCE without the positive in the denominator (CLOOB, eq. 8)."""

from __future__ import annotations

import math

from torch import Tensor

from clipzoo.heads.base import Head
from clipzoo.objectives.base import Objective
from clipzoo.objectives.directions import direction_weights, weighted_loss
from clipzoo.types import Batch, Loss, Positive, Progress, Scores, Similarity


class InfoLOOB(Objective):
    """scale * sum over the two directions of weight * mean_i [ log sum_{j != i} exp s_ij - s_ii ].

    scale: factor of the loss; CLOOB trains tau * (sum of two terms), so scale = tau = 1/30 with weights 1, 1.
    image_to_text, text_to_image: weights of the directions. For a Hopfield head the first is CLOOB's U term, anchored
    on images, the second its V term, anchored on texts.
    """

    name = "infoloob"

    def __init__(self, scale: Positive, image_to_text: float, text_to_image: float) -> None:
        super().__init__()
        first, second = direction_weights(image_to_text=image_to_text, text_to_image=text_to_image)
        self._weights = scale * first, scale * second

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        return weighted_loss(similarity, self._weights, leave_one_out)

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
    return (scores.log_sum_exp(exclude_positive=True) - scores.positives()).mean()
