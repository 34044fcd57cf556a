"""An inverse temperature that belongs to an objective."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LogitScale(nn.Module):
    """exp(log_scale), optimised with the model when learnable.

    initial: the scale at the start, 1 / temperature. maximum: never passed; None for no bound.
    """

    def __init__(self, initial: float, learnable: bool, maximum: float | None) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(initial)), requires_grad=learnable)
        self._log_maximum = math.inf if maximum is None else math.log(maximum)

    def forward(self) -> Tensor:
        with torch.no_grad():
            # The parameter itself, as CLIP clamps it after a step: a clamped copy would have no gradient to come back.
            self.log_scale.clamp_(max=self._log_maximum)
        return self.log_scale.exp()
