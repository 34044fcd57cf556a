"""Loss scaling of fp16 where ranks hold different gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from clipzoo.distributed.world import World


class ShardedScaler(torch.amp.GradScaler):
    """A GradScaler that skips a step on all ranks if a gradient is infinite on one."""

    def __init__(self, world: World, enabled: bool) -> None:
        super().__init__(world.device.type, enabled=enabled)
        self._world = world

    def _unscale_grads_(self, optimizer: Any, *arguments: Any) -> dict[torch.device, Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # torch unscales no shards together with whole tensors.
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        stand_in: Any = SimpleNamespace(param_groups=[{"params": [_with_gradient(part) for part in local]}])
        found = super()._unscale_grads_(stand_in, *arguments)
        return {device: self._world.maximum(value) for device, value in found.items()}


def _with_gradient(gradient: Tensor) -> Tensor:
    """Return a tensor whose gradient this is."""
    tensor = gradient.detach()
    tensor.grad = gradient
    return tensor
