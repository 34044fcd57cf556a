"""SigLIP: binary classification of every pair (Zhai et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from clipzoo.heads.base import Head, Paper
from clipzoo.objectives.base import LogitScale, WeightedObjective, weighted_loss
from clipzoo.types import Batch, Bias, Loss, Progress, SameCaption, Scale, Similarity, Weight, checked


@checked
class SigLIP(WeightedObjective):
    """sum over the directions of weight * 1/N sum_ij -log sigmoid( y_ij (t s_ij + bias) ), y = 1 for i = j, else -1.

    With several captions, y = 1 for all captions of an image, and N is the number of images.

    initial_scale: initial value of a learnable t on cosines (10 in the paper); null uses the head's logits with t = 1.
    initial_bias: initial value of the learnable bias (-10 in the paper).
    image_to_text, text_to_image: weights of the directions; for heads with one matrix both losses are equal.
    """

    name = "siglip"
    citations = (
        Paper(
            "siglip",
            "Sigmoid Loss for Language Image Pre-Training",
            "Zhai, Xiaohua and others",
            "IEEE/CVF International Conference on Computer Vision",
            2023,
        ),
    )
    loss_unit = "nats"
    one_positive = False

    def __init__(
        self,
        initial_scale: Scale | None,
        initial_bias: Bias,
        image_to_text: Weight,
        text_to_image: Weight,
        same_caption: SameCaption = "negative",
    ) -> None:
        super().__init__(image_to_text, text_to_image, same_caption)
        self.scale = None if initial_scale is None else LogitScale(initial_scale, learnable=True, maximum=None)
        self.own_temperature = self.scale is not None
        self.bias = nn.Parameter(torch.tensor(float(initial_bias)))

    @staticmethod
    def pair(state: Mapping[str, Tensor]) -> tuple[float, float]:
        """Return log t and the bias from an objective's state."""
        log_scale = state.get("scale.log_scale")
        return 0.0 if log_scale is None else float(log_scale), float(state["bias"])

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        scale = self.bias.new_ones(()) if self.scale is None else self.scale()
        loss = weighted_loss(similarity, self.weights, lambda scores: scores.binary_cross_entropy(scale, self.bias))
        logs = {"logit_bias": self.bias.detach()}
        if self.scale is not None:
            logs["logit_scale"] = scale.detach()
        return Loss(loss.total, {**loss.logs, **logs})

    def check(self, head: Head) -> list[str]:
        return [f"{reason}, or set objective.initial_scale=null" for reason in super().check(head)]
