"""All talk among ranks. Without torchrun or SLURM every function is the identity of a world of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from clipzoo.types import EmbeddingKind, PointSet


def start(device: torch.device, timeout_seconds: float) -> None:
    """Join the process group named by torchrun's environment; a single process joins none."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds), device_id=bound)


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    return rank() == 0


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


class _Gather(torch.autograd.Function):
    """All-gather along the first dimension, with the full gradient.

    The gradient of a rank's slice is the sum of what all ranks send back to it. Averaged over ranks (as DDP does) the
    parameters' gradient is then that of the mean of the ranks' losses. torch's own differentiable all_gather gave
    wrong gradients on gloo for upstream gradients that were not contiguous, hence the copies.
    """

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        context.rows = len(tensor)
        return _all_gather(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        start = rank() * context.rows
        return total[start : start + context.rows]


def gather(tensor: Tensor) -> Tensor:
    """[b, ...] -> [N, ...] in rank order, differentiable. Every rank must bring the same shape."""
    if world_size() == 1:
        return tensor
    if tensor.requires_grad:
        return _Gather.apply(tensor)
    return _all_gather(tensor)


def gather_embedding(embedding: EmbeddingKind) -> EmbeddingKind:
    """All ranks' embeddings in rank order, differentiable; point sets may differ in their number of points."""
    if world_size() == 1:
        return embedding
    if isinstance(embedding, PointSet):
        count = int(maximum(torch.tensor(embedding.points.shape[1], device=embedding.points.device)))
        return embedding.padded(count).map(gather)
    return gather(embedding)


def gather_object(value: Any) -> list[Any]:
    """Every rank's picklable value, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def mean(tensor: Tensor) -> Tensor:
    """The mean over ranks, without gradient."""
    return total(tensor) / world_size()


def total(tensor: Tensor) -> Tensor:
    """The sum over ranks, without gradient."""
    return _reduced(tensor, dist.ReduceOp.SUM)


def maximum(tensor: Tensor) -> Tensor:
    """The maximum over ranks, without gradient."""
    return _reduced(tensor, dist.ReduceOp.MAX)


def first_rank_does(action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 alone and give its picklable result to all; an error there is raised everywhere."""
    if world_size() == 1:
        return action()
    outcome: list[Any] = [None, None]
    if is_first():
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _reduced(tensor: Tensor, operation: Any) -> Tensor:
    copy = tensor.detach().clone()
    if world_size() > 1:
        dist.all_reduce(copy, operation)
    return copy


def _all_gather(tensor: Tensor) -> Tensor:
    source = tensor.detach().contiguous()
    gathered = source.new_empty((world_size() * len(source), *source.shape[1:]))
    dist.all_gather_into_tensor(gathered, source)
    return gathered
