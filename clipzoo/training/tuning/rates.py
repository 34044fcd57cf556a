"""Factors of the learning rate, for the parameter groups of any optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

FACTOR = "rate_factor"


def split_groups(optimizer: torch.optim.Optimizer, factors: Mapping[nn.Parameter, float]) -> None:
    """Split the parameter groups of a new optimizer so that all parameters of a group have one factor."""
    if not factors:
        return
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        by_factor: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_factor.setdefault(factors.get(parameter, 1.0), []).append(parameter)
        own = group.get(FACTOR, 1.0)
        groups += [{**group, "params": parameters, FACTOR: own * factor} for factor, parameters in by_factor.items()]
    optimizer.param_groups[:] = groups


def scale_rates(optimizer: torch.optim.Optimizer) -> None:
    """Multiply the learning rate of each group, which has been set for the coming step, by the group's factor."""
    for group in optimizer.param_groups:
        if FACTOR in group:
            group["lr"] *= group[FACTOR]
