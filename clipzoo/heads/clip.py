"""CLIP: one unit vector a side, a learnable inverse temperature (Radford et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.heads.base import Head
from clipzoo.types import Embedding, Features


class ClipHead(Head):
    """logits = exp(log_scale) * unit(x P) . unit(y Q).

    image_width, text_width: widths of the pooled features. embed_width: d.
    temperature: initial tau, scale = 1 / tau. max_scale: the scale is clamped to [1, max_scale] after each step.
    learnable_temperature: False freezes tau (a fixed temperature of 1 gives plain cosines).
    """

    published_with = ("infonce", "siglip", "dcl", "cyclip", "nuclr", "sogclr", "isogclr")

    def __init__(
        self,
        image_width: int,
        text_width: int,
        embed_width: int,
        temperature: float,
        max_scale: float,
        learnable_temperature: bool,
    ) -> None:
        super().__init__()
        self.image_projection = nn.Parameter(torch.randn(image_width, embed_width) * image_width**-0.5)
        self.text_projection = nn.Parameter(torch.randn(text_width, embed_width) * text_width**-0.5)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)), requires_grad=learnable_temperature)
        self.learnable_temperature = learnable_temperature
        self._max_scale = max_scale

    @property
    def score_range(self) -> tuple[float, float]:
        bound = self._max_scale if self.learnable_temperature else float(self.log_scale.exp())
        return -bound, bound

    def embed_image(self, features: Features) -> Embedding:
        return functional.normalize(features.pooled @ self.image_projection, dim=-1)

    def embed_text(self, features: Features) -> Embedding:
        return functional.normalize(features.pooled @ self.text_projection, dim=-1)

    def score(self, image: Embedding, text: Embedding) -> Tensor:
        return self.log_scale.exp() * image @ text.mT

    def ensemble(self, prompts: Embedding) -> Embedding:
        """[p, d] unit vectors -> [1, d], their mean brought back to unit length."""
        return functional.normalize(prompts.mean(dim=0, keepdim=True), dim=-1)

    def probe(self, features: Features, where: str) -> Tensor:
        return features.pooled if where == "before" else self.embed_image(features)

    @torch.no_grad()
    def clamp_(self) -> None:
        if self.learnable_temperature:
            self.log_scale.clamp_(0.0, math.log(self._max_scale))

    def logs(self) -> Mapping[str, Tensor]:
        return {"temperature": (-self.log_scale.detach()).exp()}
