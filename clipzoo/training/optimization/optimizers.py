"""AdamW with its parameter groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

from clipzoo.training.parts import Schedule
from clipzoo.types import Decay, NonNegative, Part, Progress, Range, checked


@checked
@dataclass(frozen=True)
class AdamW(Part):
    """torch's fused AdamW, without weight decay for parameters of fewer than two dimensions (biases, norms, scales)."""

    betas: tuple[Decay, Decay]
    eps: Annotated[float, Range(at_least=1e-30, at_most=1)]
    weight_decay: NonNegative
    schedule: Schedule

    relations = {
        "schedule.peak * weight_decay <= 1": "a step must not take away more than the whole weight: lower one of them"
    }

    def build(self, *modules: nn.Module) -> torch.optim.AdamW:
        """Return the optimizer over all parameters of the modules that require a gradient."""
        parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        matrices = [p for p in parameters if p.ndim >= 2]
        others = [p for p in parameters if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.schedule.peak,
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
            fused=True,
        )

    def set_rate(self, optimizer: torch.optim.Optimizer, progress: Progress) -> float:
        """Set the learning rate of the coming step and return it."""
        rate = self.schedule(progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate
