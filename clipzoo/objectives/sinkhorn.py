"""Sinkhorn contrast: the positives' probability in the transport plan of a batch (in the spirit of GCA, 2024)."""

from __future__ import annotations

import math
from typing import Annotated

from torch import Tensor

from clipzoo.heads.base import FLOAT, Paper, Shape
from clipzoo.objectives.base import WeightedObjective, weighted_loss
from clipzoo.types import Batch, Loss, Progress, Range, Scores, Similarity, Weight, checked


@checked
class Sinkhorn(WeightedObjective):
    """sum over the directions of weight * -mean_i log(N P_ii), P a matrix with columns that sum to 1/N.

    log P starts as the scores s_ij; an iteration normalises the sums of its rows, then of its columns, to 1/N. The
    gradient passes through all iterations. The formula is ours, and needs the matrix of the scores.

    iterations: number of iterations. With many, both directions of a head with one matrix are equal.
    """

    name = "sinkhorn"
    citations = (
        Paper(
            "gca",
            "Your Contrastive Learning Problem is Secretly a Distribution Alignment Problem",
            "Chen, Zihao and others",
            "Advances in Neural Information Processing Systems",
            2024,
        ),
    )
    loss_unit = "nats"

    def __init__(
        self, iterations: Annotated[int, Range(at_least=1, at_most=1000)], image_to_text: Weight, text_to_image: Weight
    ) -> None:
        super().__init__(image_to_text, text_to_image)
        self._iterations = iterations

    def cost(self, shape: Shape, embedding: float, views: float) -> float:
        """Sums over a rank's rows of all N columns and their gradients, in every iteration of each direction."""
        directions = sum(weight > 0 for weight in self.weights)
        return directions * self._iterations * 2 * FLOAT * shape.batch / shape.local

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        def transport(scores: Scores) -> Tensor:
            log_plan, log_count = scores.dense(), math.log(scores.columns)
            for _ in range(self._iterations):
                log_plan = log_plan - log_plan.logsumexp(dim=1, keepdim=True) - log_count
                # A column has rows of all ranks.
                sums = similarity.world.gather(log_plan.logsumexp(dim=0, keepdim=True)).logsumexp(dim=0)
                log_plan = log_plan - sums - log_count
            return -log_plan.diagonal(scores.first_positive).mean() - log_count

        return weighted_loss(similarity, self.weights, transport)
