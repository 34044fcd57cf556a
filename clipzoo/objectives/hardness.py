"""Hardness-weighted InfoNCE: negatives weigh more the more similar they are (LLaVE, Lan et al. 2025)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from clipzoo.errors import ConfigError
from clipzoo.heads.base import Paper
from clipzoo.heads.pairs import batch_pairing
from clipzoo.objectives.base import LogitScale, Objective, weighted_loss
from clipzoo.types import Batch, Loss, Positive, Progress, Scale, Scores, Similarity, Weight, checked


@checked
class Hardness(Objective):
    """InfoNCE with logits s_ij / tau + alpha sg(s_ij) for the negatives and s_ii / tau for the positive.

    temperature: tau, on cosines; initial value if `learnable_temperature`.
    learnable_temperature: train it; False fixes it. max_scale: upper bound of 1 / temperature.
    alpha: strength of the weights exp(alpha s_ij), which have no gradient; 0 gives InfoNCE.
    image_to_text, text_to_image: weights of the directions; both are weighted by hardness.
    weighted: negatives with weights: "all"; "other", all but an image's own hard captions; "own", only these. With hard
        captions, "other" and "own" need the matrix of the scores.
    same_caption: pairs of different samples with an equal caption or group are negatives, are left out ("ignore"), or
        are positives, of which the mean of the losses is taken.
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
        same_caption: Literal["negative", "ignore", "positive"] = "negative",
    ) -> None:  # fmt: skip
        super().__init__()
        self._weighted, self.same_caption = weighted, same_caption
        self.scale = LogitScale(1 / temperature, learnable_temperature, max_scale)
        self._alpha, self._weights = alpha, (image_to_text, text_to_image)

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        scale, views = self.scale(), batch.views
        # The softmax is that of the scores times `weighted`, the gradient of a logit by its score is `scale`. Both
        # follow from one sum: its gradient is multiplied by `share`, and that of the scale is not.
        # Captions as anchors, and images without hard captions, have no negatives of their own.
        weighted = scale.detach() + (0.0 if self._weighted == "own" else self._alpha)
        share = scale.detach() / weighted
        weighted = weighted + (scale - scale.detach()) / share

        def entropy(scores: Scores, negatives: Tensor) -> Tensor:
            plain = scores.scaled(scale.mul)
            return (negatives.logaddexp(plain.positives_log_sum_exp()) - plain.positives()).mean()

        def same_weighted(scores: Scores) -> Tensor:
            sums = scores.scaled(weighted.mul).log_sum_exp(exclude_positive=True)
            negatives = sums.detach() + share * (sums - sums.detach())
            return entropy(scores, negatives.where(sums != -torch.inf, sums))

        def some_weighted(scores: Scores) -> Tensor:
            matrix, world = scores.dense(), similarity.world
            pairing = batch_pairing(batch, world, self.same_caption)
            assert pairing is not None, "hard captions have a pairing"
            columns = torch.arange(scores.columns, device=matrix.device)
            images = torch.arange(len(matrix), device=matrix.device) + world.rank * len(matrix)
            sample, place = columns // (views.captions + views.hard), columns % (views.captions + views.hard)
            is_own = (images[:, None] == sample) & (place >= views.captions)
            logits = scale * matrix + self._alpha * matrix.detach() * (is_own == (self._weighted == "own"))
            absent = pairing.absent(exclude_positive=True)
            return entropy(scores, logits.masked_fill(absent, -torch.inf).logsumexp(dim=1))

        of_images = some_weighted if self._weighted != "all" and views.hard else same_weighted
        if of_images is some_weighted and similarity.further:
            raise ConfigError(
                f"objective.weighted={self._weighted} knows no boxes and crops: use objective.weighted=all"
            )
        loss = weighted_loss(similarity, self._weights, of_images, same_weighted)
        return Loss(loss.total, {**loss.logs, "logit_scale": scale.detach()})
