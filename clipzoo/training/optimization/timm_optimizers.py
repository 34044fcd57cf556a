"""Optimizers of timm by name: Lion, LAMB, Adan and many more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from clipzoo.errors import ConfigError, nearest
from clipzoo.training.optimization.groups import Group, GroupedOptimizer
from clipzoo.training.parts import Schedule
from clipzoo.types import Decay, NonNegative, checked

LOOKAHEAD = "lookahead_"


@checked
@dataclass(frozen=True)
class TimmOptimizer(GroupedOptimizer):
    """An optimizer of timm.

    name: as in `timm.optim.list_optimizers()`; lookahead_NAME wraps NAME in Lookahead. betas: for optimizers that have
    them; null for their own. options: further arguments of its class.
    """

    name: str
    betas: list[Decay] | None
    options: dict[str, Any]
    weight_decay: NonNegative
    schedule: Schedule

    def __post_init__(self) -> None:
        from timm.optim import get_optimizer_info, list_optimizers

        name, known = self.name.lower().removeprefix(LOOKAHEAD), [str(known) for known in list_optimizers()]
        if name not in known:
            hint = nearest(name, known) or ": timm.optim.list_optimizers() lists them"
            raise ConfigError(f"timm has no optimizer optim.name={self.name}{hint}")
        if get_optimizer_info(name).second_order:
            raise ConfigError(f"optim.name={self.name} needs second derivatives: choose another")
        self.require_constructible(f"optim.name={self.name}")

    def construct(self, groups: list[Group]) -> torch.optim.Optimizer:
        from timm.optim import create_optimizer_v2

        betas = {} if self.betas is None else {"betas": tuple(self.betas)}
        arguments: dict[str, Any] = {"weight_decay": self.weight_decay, **betas, **self.options}
        optimizer = create_optimizer_v2(groups, opt=self.name, lr=self.schedule.peak, **arguments)
        if hasattr(optimizer, "rng"):
            raise ConfigError(
                f"optim.name={self.name} draws random numbers that no checkpoint holds, so that a resumed run would be "
                "another one: choose another"
            )
        return optimizer
