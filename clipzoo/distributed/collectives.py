"""Collectives of the default process group, with gradients. `World` is the interface to them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from clipzoo.distributed.ranges import step_part

T = TypeVar("T")
STORE_ERRORS: tuple[type[Exception], ...] = (dist.DistError,)
"""Errors that the store raises when the process that serves it is gone."""


class CollectiveCounter:
    """Number of collectives that this rank has entered: the watchdog finds the rank that the others wait for."""

    def __init__(self) -> None:
        self.entered = 0

    def entering(self) -> AbstractContextManager[object]:
        """Return the context of one collective."""
        self.entered += 1
        return step_part("communication")


def is_collective_error(error: BaseException) -> bool:
    """Return True if `error` says that another rank is lost. gloo raises a bare RuntimeError with its own file name."""
    return isinstance(error, STORE_ERRORS) or (type(error) is RuntimeError and "/gloo/" in str(error))


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's picklable value in rank order. Collective. group: None for the default process group."""
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class Gather(torch.autograd.Function):
    """All-gather along the first dimension, with the full gradient.

    The gradient of a rank's slice is the sum of the gradients that all ranks return for it. Averaged over ranks (as
    DDP does), the parameters' gradient is then that of the mean of the ranks' losses. torch's own differentiable
    all_gather gave wrong gradients on gloo for upstream gradients that were not contiguous, hence the copies.
    """

    @staticmethod
    def forward(context: Any, tensor: Tensor, dtype: torch.dtype | None, counter: CollectiveCounter) -> Tensor:
        context.rows, context.counter = len(tensor), counter
        source = tensor.to(dtype or tensor.dtype).detach().contiguous()
        gathered = source.new_empty((dist.get_world_size() * len(source), *source.shape[1:]))
        with counter.entering():
            dist.all_gather_into_tensor(gathered, source)
        return gathered.to(tensor.dtype)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        local = gradient.new_empty((context.rows, *gradient.shape[1:]))
        with context.counter.entering():
            dist.reduce_scatter_tensor(local, gradient.contiguous())
        return local, None, None


class Exchange(torch.autograd.Function):
    """All-to-all of equal parts: a permutation of all ranks' numbers, its own inverse and so its own gradient."""

    @staticmethod
    def forward(context: Any, parts: Tensor, counter: CollectiveCounter) -> Tensor:
        context.counter = counter
        source = parts.detach().contiguous()
        received = torch.empty_like(source)
        with counter.entering():
            dist.all_to_all_single(received, source)
        return received

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return Exchange.forward(context, gradient, context.counter), None
