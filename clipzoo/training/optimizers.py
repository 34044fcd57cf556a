"""AdamW with its parameter groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from clipzoo.errors import ConfigError
from clipzoo.training.schedules import Cosine
from clipzoo.types import Part, Positive, Progress


@dataclass(frozen=True)
class AdamW(Part):
    """torch's fused AdamW, without weight decay for parameters of fewer than two dimensions (biases, norms, scales)."""

    betas: list[float]
    eps: Positive
    weight_decay: float
    schedule: Cosine

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas is {list(self.betas)}: it must be two numbers in [0, 1)")
        if self.weight_decay < 0:
            raise ConfigError(f"optim.weight_decay must be at least 0, not {self.weight_decay}")

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
