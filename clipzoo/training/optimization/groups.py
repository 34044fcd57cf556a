"""Parameter groups and learning rates that all optimizers share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from clipzoo.errors import ConfigError, first_line
from clipzoo.training.parts import Schedule
from clipzoo.types import Part, Progress

Group = dict[str, Any]
"""A parameter group of torch: "params" and the values that differ from the optimizer's."""


class GroupedOptimizer(Part):
    """Base class of the optimizers: weight decay for matrices, none for biases, norms and scales; a schedule.

    Factors of the learning rate, per tower and per layer, split the groups: `clipzoo.training.tuning.rates`.
    """

    weight_decay: float
    schedule: Schedule

    takes_shards = True
    """False if the optimizer cannot update weights that ranks divide (DTensors)."""

    relations = {
        "at_most(schedule.peak * weight_decay, 1)": (
            "a step must not take away more than the whole weight: lower one of them"
        )
    }

    def build(self, *modules: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer over all parameters of the modules that require a gradient."""
        parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        return self.construct(decay_groups(parameters, self.weight_decay))

    @abstractmethod
    def construct(self, groups: list[Group]) -> torch.optim.Optimizer:
        """Return the library's optimizer over the groups, with the peak of the schedule as its learning rate."""

    def set_rate(self, optimizer: torch.optim.Optimizer, progress: Progress) -> float:
        """Set the learning rate of the coming step and return it."""
        rate = self.schedule(progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    def require_constructible(self, key: str) -> None:
        """Raise ConfigError, with the library's reason, if it cannot construct the optimizer. key: for the message."""
        parameter = nn.Parameter(torch.zeros(2, 2))
        try:
            self.construct([{"params": [parameter], "weight_decay": self.weight_decay}])
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{key}: {first_line(error)}") from error


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[Group]:
    """Return the group of the matrices, which decay, and that of the parameters of fewer than two dimensions."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
