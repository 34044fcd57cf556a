"""Hardness-weighted InfoNCE: negatives weigh more the more similar they are (LLaVE, Lan et al. 2025)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from clipzoo.errors import ConfigError
from clipzoo.heads.base import Paper
from clipzoo.heads.scores import DenseScores
from clipzoo.objectives.base import LogitScale, WeightedObjective, weighted_loss
from clipzoo.types import Batch, Loss, Positive, Progress, SameCaption, Scale, Scores, Similarity, Weight, checked


@checked
class Hardness(WeightedObjective):
    """InfoNCE with logits s_ij / tau + alpha sg(s_ij) for the negatives and s_ii / tau for the positive.

    temperature: tau, on cosines; initial value if `learnable_temperature`.
    learnable_temperature: train it; False fixes it. max_scale: upper bound of 1 / temperature.
    alpha: strength of the weights exp(alpha s_ij), which have no gradient; 0 gives InfoNCE.
    weighted: negatives with weights: "all"; "other", all but an image's own hard captions; "own", only these. With hard
        captions, "other" and "own" need the matrix of the scores.
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
    one_positive = False

    relations = {
        "image_to_text + text_to_image > 0": "one of the weights must be above 0",
        "at_most(1 / temperature, max_scale)": "the scale 1 / temperature must not exceed its bound max_scale",
    }

    def __init__(
        self, temperature: Scale, learnable_temperature: bool, max_scale: Positive, alpha: Weight,
        image_to_text: Weight, text_to_image: Weight, weighted: Literal["all", "other", "own"] = "all",
        same_caption: SameCaption = "negative",
    ) -> None:  # fmt: skip
        super().__init__(image_to_text, text_to_image, same_caption)
        self._alpha, self._weighted = alpha, weighted
        self.scale = LogitScale(1 / temperature, learnable_temperature, max_scale)

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        scale, views = self.scale(), batch.views
        texts = views.captions + views.hard
        single = self._weighted != "all" and views.hard > 0
        if single and similarity.further:
            raise ConfigError(
                f"objective.weighted={self._weighted} takes no boxes and crops: use objective.weighted=all"
            )
        # The softmax is that of the scores times `weighted`, the gradient of a logit by its score is `scale`. Both
        # follow from one sum: its gradient is multiplied by `share`, and that of the scale is not.
        # Captions as anchors, and images without hard captions, have no negatives of their own.
        weighted = scale.detach() + (0.0 if self._weighted == "own" else self._alpha)
        share = scale.detach() / weighted
        weighted = weighted + (scale - scale.detach()) / share

        def hard_weighted(scores: Scores) -> Tensor:
            plain = scores.scaled(scale.mul)
            if single and scores is similarity.image_to_text:
                matrix = scores.dense().detach()
                images = torch.arange(len(matrix), device=matrix.device) + similarity.world.rank * len(matrix)
                columns = torch.arange(scores.columns, device=matrix.device)
                is_own = (images[:, None] == columns // texts) & (columns % texts >= views.captions)
                weights = self._alpha * matrix * (is_own == (self._weighted == "own"))
                negatives = plain.minus(DenseScores(-weights)).log_sum_exp(exclude_positive=True)
            else:
                sums = scores.scaled(weighted.mul).log_sum_exp(exclude_positive=True)
                negatives = (sums.detach() + share * (sums - sums.detach())).where(sums != -torch.inf, sums)
            return (negatives.logaddexp(plain.positives_log_sum_exp()) - plain.positives()).mean()

        loss = weighted_loss(similarity, self.weights, hard_weighted)
        return Loss(loss.total, {**loss.logs, "logit_scale": scale.detach()})
