"""CLIP: unit vectors and a learnable inverse temperature (Radford et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from clipzoo.heads.vector import UnitVectorHead
from clipzoo.types import Count, Positive, Scale, checked


@checked
class ClipHead(UnitVectorHead):
    """logits = exp(log_scale) * unit(x P) . unit(y Q).

    image_width, text_width: widths of the pooled features. embed_width: d.
    temperature: initial tau, scale = 1 / tau. max_scale: the scale is clamped to [1, max_scale] after every step.
    learnable_temperature: False fixes tau (a fixed temperature of 1 gives plain cosines).
    bias: add a vector to each projection, as in SigLIP's models and OpenAI's ResNets.
    image_projection: False keeps the identity in place of P, without a bias, as in SigLIP's models.
    """

    published_with = (
        *("infonce", "infoloob", "siglip", "dcl", "cyclip", "nuclr", "sogclr", "isogclr"),
        *("conditional", "joint", "mmd_conditional", "mmd_joint"),
    )

    relations = {
        "not learnable_temperature or (at_most(1, 1 / temperature) and at_most(1 / temperature, max_scale))": (
            "every step clamps the scale 1 / temperature to [1, max_scale]: change one, or set "
            "learnable_temperature=false"
        ),
        "image_projection or image_width == embed_width": (
            "without an image projection the embeddings have the width of the image tower"
        ),
    }

    def __init__(
        self,
        image_width: Count,
        text_width: Count,
        embed_width: Count,
        temperature: Scale,
        max_scale: Positive,
        learnable_temperature: bool,
        bias: bool = False,
        image_projection: bool = True,
    ) -> None:
        super().__init__(image_width, text_width, embed_width, bias)
        if not image_projection:
            self.image_projection = nn.Parameter(torch.eye(image_width), requires_grad=False)
            if self.image_bias is not None:
                self.image_bias.requires_grad_(False)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)), requires_grad=learnable_temperature)
        self.learnable_temperature = learnable_temperature
        self._max_scale = max_scale if learnable_temperature else 1 / temperature

    @property
    def score_range(self) -> tuple[float, float]:
        return -self._max_scale, self._max_scale

    def factors(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_scale.exp() * image, text

    def log_cosine_scale(self) -> Tensor:
        return self.log_scale

    @torch.no_grad()
    def clamp_(self) -> None:
        if self.learnable_temperature:
            self.log_scale.clamp_(0.0, math.log(self._max_scale))

    def logs(self) -> Mapping[str, Tensor]:
        return {"temperature": (-self.log_scale.detach()).exp()}
