"""Inverse temperature of an objective."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LogitScale(nn.Module):
    """exp(log_scale), optimized with the model if learnable.

    initial: initial scale, 1 / temperature. maximum: upper bound of the scale; None for no bound.
    """

    def __init__(self, initial: float, learnable: bool, maximum: float | None) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(initial)), requires_grad=learnable)
        self._log_maximum = math.inf if maximum is None else math.log(maximum)

    def forward(self) -> Tensor:
        with torch.no_grad():
            # The parameter itself is clamped, as by CLIP after a step: a clamped copy has no gradient beyond the bound.
            self.log_scale.clamp_(max=self._log_maximum)
        return self.log_scale.exp()
