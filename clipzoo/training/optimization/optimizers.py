"""Optimizers of torch, and AdamW with 8-bit state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from clipzoo.errors import ConfigError, installation
from clipzoo.training.optimization.groups import Group, GroupedOptimizer
from clipzoo.training.parts import Schedule
from clipzoo.types import Decay, Epsilon, NonNegative, Positive, Range, checked


@checked
@dataclass(frozen=True)
class AdamW(GroupedOptimizer):
    """torch's fused AdamW, without weight decay for parameters of fewer than two dimensions (biases, norms, scales).

    betas: decay rates of the first and the second moment. eps: added to the root of the second moment.
    weight_decay: weight decay of matrices.
    """

    betas: tuple[Decay, Decay]
    eps: Epsilon
    weight_decay: NonNegative
    schedule: Schedule

    def construct(self, groups: list[Group]) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            groups, lr=self.schedule.peak, betas=(self.betas[0], self.betas[1]), eps=self.eps, fused=True
        )


@checked
@dataclass(frozen=True)
class SGD(GroupedOptimizer):
    """torch's stochastic gradient descent. Weight decay is added to the gradient, as in torch.

    momentum: weight of the earlier gradients. nesterov: look one step of the momentum ahead.
    weight_decay: weight decay of matrices.
    """

    momentum: Decay
    nesterov: bool
    weight_decay: NonNegative
    schedule: Schedule

    relations = {"momentum > 0 or not nesterov": "Nesterov's gradient needs momentum: raise it or give nesterov=false"}

    def construct(self, groups: list[Group]) -> torch.optim.SGD:
        return torch.optim.SGD(groups, lr=self.schedule.peak, momentum=self.momentum, nesterov=self.nesterov)


@checked
@dataclass(frozen=True)
class Adafactor(GroupedOptimizer):
    """torch's Adafactor (Shazeer and Stern 2018): second moments of matrices as row and column means, no first moments.

    The step of a tensor is the learning rate, at most 1 / sqrt(t), times the larger of eps2 and the tensor's root mean
    square. beta2_decay: exponent of t in 1 - t^beta2_decay, the decay of the second moments. eps1: null for the machine
    epsilon. clip: largest root mean square of an update before the learning rate.
    """

    beta2_decay: Annotated[float, Range(at_least=-10, at_most=0)]
    eps1: Epsilon | None
    eps2: Epsilon
    clip: Positive
    weight_decay: NonNegative
    schedule: Schedule

    takes_shards = False

    def construct(self, groups: list[Group]) -> torch.optim.Adafactor:
        return torch.optim.Adafactor(
            groups, lr=self.schedule.peak, beta2_decay=self.beta2_decay, eps=(self.eps1, self.eps2), d=self.clip
        )


@checked
@dataclass(frozen=True)
class AdamW8bit(GroupedOptimizer):
    """AdamW of bitsandbytes: 8-bit moments for tensors of at least 4096 elements (Dettmers et al. 2022).

    betas: decay rates of the first and the second moment. eps: added to the root of the second moment.
    weight_decay: weight decay of matrices.
    """

    betas: tuple[Decay, Decay]
    eps: Epsilon
    weight_decay: NonNegative
    schedule: Schedule

    takes_shards = False

    def __post_init__(self) -> None:
        self.require_constructible("optim=adamw_8bit")

    def construct(self, groups: list[Group]) -> torch.optim.Optimizer:
        try:
            import bitsandbytes
        except ImportError:
            raise ConfigError(f"optim=adamw_8bit needs bitsandbytes: {installation('bitsandbytes')}") from None
        return bitsandbytes.optim.AdamW8bit(
            groups, lr=self.schedule.peak, betas=(self.betas[0], self.betas[1]), eps=self.eps
        )
