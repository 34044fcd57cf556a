"""Matching the two conditionals (A mathematical perspective on contrastive learning, problems 2.7 and 3.4)."""

from __future__ import annotations

import math

from clipzoo.heads.vector import PERSPECTIVE
from clipzoo.objectives.base import Objective, weighted_loss
from clipzoo.objectives.infonce import cross_entropy
from clipzoo.types import Batch, Loss, Progress, Similarity, Weight, checked


@checked
class Conditional(Objective):
    """-1/2 E[ lambda_u log rho(u|v) + lambda_v log rho(v|u) ], u the image and v the text.

    Densities are against the marginals, rho(u|v) = exp S(u, v) / mean_u' exp S(u', v), so conditional(1, 1) is CLIP's
    loss minus log N. lambda_v = 0 matches only u given v, anchored on texts; lambda_u = 0 classifies labels v.
    """

    name = "conditional"
    citations = (PERSPECTIVE,)
    loss_unit = "nats"

    relations = {"lambda_u + lambda_v > 0": "one of the weights must be above 0"}

    def __init__(self, lambda_u: Weight, lambda_v: Weight) -> None:
        super().__init__()
        self._weights = lambda_v / 2, lambda_u / 2

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        # The mean over the anchors of -log rho(positive | anchor).
        return weighted_loss(similarity, self._weights, lambda scores: cross_entropy(scores) - math.log(scores.columns))
