"""CLIP: unit vectors and a learnable inverse temperature (Radford et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from clipzoo.errors import ConfigError
from clipzoo.heads.vector import UnitVectorHead
from clipzoo.types import Count, Positive


class ClipHead(UnitVectorHead):
    """logits = exp(log_scale) * unit(x P) . unit(y Q).

    image_width, text_width: widths of the pooled features. embed_width: d.
    temperature: initial tau, scale = 1 / tau. max_scale: the scale is clamped to [1, max_scale] after every step.
    learnable_temperature: False fixes tau (a fixed temperature of 1 gives plain cosines).
    """

    published_with = (
        *("infonce", "infoloob", "siglip", "dcl", "cyclip", "nuclr", "sogclr", "isogclr"),
        *("conditional", "joint", "mmd_conditional", "mmd_joint"),
    )

    def __init__(
        self,
        image_width: int,
        text_width: int,
        embed_width: Count,
        temperature: Positive,
        max_scale: Positive,
        learnable_temperature: bool,
    ) -> None:
        super().__init__(image_width, text_width, embed_width)
        if learnable_temperature and not 1 <= 1 / temperature <= max_scale:
            raise ConfigError(
                f"head.temperature={temperature} is an initial scale of {1 / temperature:g}, and every step clamps the "
                f"scale to [1, head.max_scale={max_scale:g}]: change one, or set head.learnable_temperature=false"
            )
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)), requires_grad=learnable_temperature)
        self.learnable_temperature = learnable_temperature
        self._max_scale = max_scale if learnable_temperature else 1 / temperature

    @property
    def score_range(self) -> tuple[float, float]:
        return -self._max_scale, self._max_scale

    def factors(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_scale.exp() * image, text

    @torch.no_grad()
    def clamp_(self) -> None:
        if self.learnable_temperature:
            self.log_scale.clamp_(0.0, math.log(self._max_scale))

    def logs(self) -> Mapping[str, Tensor]:
        return {"temperature": (-self.log_scale.detach()).exp()}
