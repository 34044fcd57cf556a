"""AdamW with its parameter groups, and learning rates as pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from clipzoo.errors import ConfigError
from clipzoo.types import Positive, Progress


@dataclass(frozen=True)
class Cosine:
    """Linear warmup from `start` to `peak`, then half a cosine down to `end`.

    warmup_epochs or warmup_steps: the length of the warmup, one of them (the other null).
    restart_epochs: the cosine begins again after so many epochs (CLOOB: 7); null for one cosine to the end of training.
    per_epoch: the rate changes at epoch boundaries only (NUCLR).
    """

    peak: Positive
    start: float
    end: float
    warmup_epochs: float | None
    warmup_steps: int | None
    restart_epochs: Positive | None
    per_epoch: bool

    def __post_init__(self) -> None:
        if (self.warmup_epochs is None) == (self.warmup_steps is None):
            raise ConfigError(
                "give one of optim.schedule.warmup_epochs and optim.schedule.warmup_steps and null for the other: "
                f"they are {self.warmup_epochs} and {self.warmup_steps}"
            )

    def __call__(self, progress: Progress) -> float:
        """The learning rate of the step that comes after `progress.step` steps."""
        steps_per_epoch = progress.samples / progress.global_batch
        warmup = self.warmup_steps if self.warmup_epochs is None else round(self.warmup_epochs * steps_per_epoch)
        warmup = min(warmup or 0, progress.total_steps)
        if progress.step < warmup:
            return self.start + (self.peak - self.start) * progress.step / warmup
        step: float = progress.step
        if self.per_epoch:
            step = max(warmup, math.floor(step / steps_per_epoch) * steps_per_epoch)
        length = float(progress.total_steps - warmup)
        done = step - warmup
        if self.restart_epochs is not None:
            length = min(length, self.restart_epochs * steps_per_epoch)
            done %= length
        return self.end + (self.peak - self.end) * (1 + math.cos(math.pi * done / max(length, 1))) / 2


@dataclass(frozen=True)
class AdamW:
    """torch's fused AdamW; no decay on parameters with fewer than two dimensions (biases, norms, scales)."""

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
        parameters = [each for module in modules for each in module.parameters() if each.requires_grad]
        decayed = [each for each in parameters if each.ndim >= 2]
        others = [each for each in parameters if each.ndim < 2]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.schedule.peak,
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
            fused=True,
        )

    def set_rate(self, optimizer: torch.optim.Optimizer, progress: Progress) -> float:
        """Set the rate of the coming step; it is returned."""
        rate = self.schedule(progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate
