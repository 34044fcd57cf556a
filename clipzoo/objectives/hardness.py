"""Hardness-weighted InfoNCE: negatives weigh more the more similar they are (LLaVE, Lan et al. 2025)."""

from __future__ import annotations

from torch import Tensor

from clipzoo.heads.base import Paper
from clipzoo.objectives.base import LogitScale, Objective, weighted_loss
from clipzoo.types import Batch, Loss, Positive, Progress, Scale, Scores, Similarity, Weight, checked


@checked
class Hardness(Objective):
    """InfoNCE with logits s_ij / tau + alpha sg(s_ij) for the negatives and s_ii / tau for the positive.

    temperature: tau, on cosines; initial value if `learnable_temperature`.
    learnable_temperature: train it; False fixes it. max_scale: upper bound of 1 / temperature.
    alpha: strength of the weights exp(alpha s_ij), which have no gradient; 0 gives InfoNCE.
    image_to_text, text_to_image: weights of the directions; both are weighted by hardness.
    """

    name = "hardness"
    citations = (
        Paper(
            "llave",
            "LLaVE: Large Language and Vision Embedding Models with Hardness-Weighted Contrastive Learning",
            "Lan, Zhibin and others",
            year=2025,
        ),
    )
    loss_unit = "nats"
    own_temperature = True
    needs_negatives = True

    relations = {
        "image_to_text + text_to_image > 0": "one of the weights must be above 0",
        "at_most(1 / temperature, max_scale)": "the scale 1 / temperature must not exceed its bound max_scale",
    }

    def __init__(
        self,
        temperature: Scale,
        learnable_temperature: bool,
        max_scale: Positive,
        alpha: Weight,
        image_to_text: Weight,
        text_to_image: Weight,
    ) -> None:
        super().__init__()
        self.scale = LogitScale(1 / temperature, learnable_temperature, max_scale)
        self._alpha, self._weights = alpha, (image_to_text, text_to_image)

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        scale = self.scale()
        # The softmax is that of the scores times `weighted`, the gradient of a logit by its score is `scale`. Both
        # follow from one sum: its gradient is multiplied by `share`, and that of the scale is not.
        weighted = scale.detach() + self._alpha
        share = scale.detach() / weighted
        weighted = weighted + (scale - scale.detach()) / share

        def cross_entropy(scores: Scores) -> Tensor:
            sums = scores.scaled(weighted.mul).log_sum_exp(exclude_positive=True)
            negatives = sums.detach() + share * (sums - sums.detach())
            positives = scale * scores.positives()
            return (negatives.logaddexp(positives) - positives).mean()

        loss = weighted_loss(similarity, self._weights, cross_entropy)
        return Loss(loss.total, {**loss.logs, "logit_scale": scale.detach()})
