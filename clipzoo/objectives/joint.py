"""Matching the joint distribution (A mathematical perspective on contrastive learning, problem 3.7)."""

from __future__ import annotations

import math

from torch import Tensor

from clipzoo.heads.base import Shape
from clipzoo.heads.vector import PERSPECTIVE
from clipzoo.objectives.base import Objective, weighted_loss
from clipzoo.types import Batch, Loss, Progress, Scores, Similarity


class Joint(Objective):
    """-E S + log E e^S, the second expectation over all N^2 pairs of the global batch.

    Mean of both directions: they are equal for heads with one matrix, but not for CLOOB, which has two.
    """

    name = "joint"
    citations = (PERSPECTIVE,)
    loss_unit = "nats"

    def cost(self, shape: Shape, embedding: float, views: float) -> float:
        """The partition sums of the sample as an anchor, and their gradients, in both directions."""
        return 16

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        def negative_log_density(scores: Scores) -> Tensor:
            """The mean over the local pairs of -log rho(u, v), with the gradient through all ranks' partition sums."""
            log_partition = similarity.world.gather(scores.log_sum_exp()).logsumexp(dim=0)
            return log_partition - 2 * math.log(scores.columns) - scores.positives().mean()

        return weighted_loss(similarity, (0.5, 0.5), negative_log_density)
