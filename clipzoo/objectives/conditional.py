"""Matching the two conditionals (A mathematical perspective on contrastive learning, problems 2.7 and 3.4)."""

from __future__ import annotations

import math

from torch import Tensor

from clipzoo.objectives.base import Objective
from clipzoo.objectives.directions import direction_weights, weighted_loss
from clipzoo.objectives.infonce import cross_entropy
from clipzoo.types import Batch, Loss, Progress, Scores, Similarity


class Conditional(Objective):
    """-1/2 E[ lambda_u log rho(u|v) + lambda_v log rho(v|u) ], u the image and v the text.

    Densities are against the marginals, rho(u|v) = exp S(u, v) / mean_u' exp S(u', v), so conditional(1, 1) is CLIP's
    loss minus log N. lambda_u alone matches u given v, anchored on texts; classifying labels v is lambda_v alone.
    """

    name = "conditional"

    def __init__(self, lambda_u: float, lambda_v: float) -> None:
        super().__init__()
        u_given_v, v_given_u = direction_weights(lambda_u=lambda_u, lambda_v=lambda_v)
        self._weights = v_given_u / 2, u_given_v / 2

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        return weighted_loss(similarity, self._weights, negative_log_density)


def negative_log_density(scores: Scores) -> Tensor:
    """Return the mean over the local anchors of -log rho(positive | anchor)."""
    return cross_entropy(scores) - math.log(scores.columns)
