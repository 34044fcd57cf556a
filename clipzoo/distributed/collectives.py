"""All talk among ranks. Without torchrun or SLURM every function is the identity of a world of one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from clipzoo.errors import ConfigError
from clipzoo.types import EmbeddingKind, PointSet

BROKEN: tuple[type[Exception], ...] = (dist.DistError,)
"""What the store of a lost rank raises."""

_entered = 0
_firsts = 0
_meetings = 0
_wire: torch.dtype | None = None


def start(device: torch.device, timeout_seconds: float) -> None:
    """Join the process group named by torchrun's environment; a single process joins none."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    bound = device if device.type == "cuda" else None
    # NCCL's own watchdog aborts the process without a word of ours: `clipzoo.distributed.watchdog` comes before it.
    seconds = timeout_seconds + (60 if backend == "nccl" else 0)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds), device_id=bound)
    except BROKEN as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(
            f"rank {os.environ.get('RANK')} did not meet all of {os.environ['WORLD_SIZE']} ranks at {where} within "
            f"trainer.timeout={timeout_seconds:g} seconds: {error}"
        ) from None


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    return rank() == 0


def store(name: str) -> dist.Store:
    """A connection of its own to the store of the process group; `name` is put before its keys."""
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store().clone())


def collectives() -> int:
    """How many of this module's collectives this rank has entered: a rank that is behind keeps the others waiting."""
    return _entered


def is_broken_collective(error: BaseException) -> bool:
    """Whether another rank is to blame for `error`. gloo raises a bare RuntimeError that names its own source."""
    return isinstance(error, BROKEN) or (type(error) is RuntimeError and "/gloo/" in str(error))


def is_echo(error: BaseException) -> bool:
    """Whether the first rank raised `error` and this rank only repeats it."""
    return getattr(error, "is_echo", False)


def send_in(dtype: torch.dtype | None) -> None:
    """The precision in which `gather_embedding` sends; None for that of the embedding."""
    global _wire
    _wire = dtype


def barrier() -> None:
    if world_size() > 1:
        _enter()
        dist.barrier()


class _Gather(torch.autograd.Function):
    """All-gather along the first dimension, with the full gradient.

    The gradient of a rank's slice is the sum of what all ranks send back to it. Averaged over ranks (as DDP does) the
    parameters' gradient is then that of the mean of the ranks' losses. torch's own differentiable all_gather gave
    wrong gradients on gloo for upstream gradients that were not contiguous, hence the copies.
    """

    @staticmethod
    def forward(context: Any, tensor: Tensor, wire: torch.dtype | None) -> Tensor:
        context.rows = len(tensor)
        return _all_gather(tensor.to(wire or tensor.dtype)).to(tensor.dtype)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        mine = gradient.new_empty((context.rows, *gradient.shape[1:]))
        _enter()
        dist.reduce_scatter_tensor(mine, gradient.contiguous())
        return mine, None


def gather(tensor: Tensor, wire: torch.dtype | None = None) -> Tensor:
    """[b, ...] -> [N, ...] in rank order, differentiable. Every rank must bring the same shape.

    wire: the precision in which the values travel, and to which they are rounded; gradients travel exact.
    """
    return tensor if world_size() == 1 else _Gather.apply(tensor, wire)


def gather_embedding(embedding: EmbeddingKind, *, exact: bool = False) -> EmbeddingKind:
    """All ranks' embeddings in rank order, differentiable; point sets may differ in their number of points.

    exact: whatever `send_in` says. It is for training: evaluation's numbers, labels among them, must not be rounded.
    """
    if world_size() == 1:
        return embedding
    wire = None if exact else _wire
    if isinstance(embedding, PointSet):
        count = int(maximum(torch.full((), embedding.points.shape[1], device=embedding.points.device)))
        padded = embedding.padded(count)
        # Log-weights stay exact: rounding them is a relative error of the weights.
        return PointSet(gather(padded.points, wire), gather(padded.log_weights))
    return gather(embedding, wire)


class _Exchange(torch.autograd.Function):
    """All-to-all of equal parts: a permutation of all ranks' numbers, its own inverse and so its own gradient."""

    @staticmethod
    def forward(context: Any, parts: Tensor) -> Tensor:
        source = parts.detach().contiguous()
        received = torch.empty_like(source)
        _enter()
        dist.all_to_all_single(received, source)
        return received

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return _Exchange.forward(context, gradient)


def exchange(parts: Tensor) -> Tensor:
    """[ranks, ...] -> [ranks, ...]: part r goes to rank r, part r of the answer came from rank r. Differentiable."""
    return parts if world_size() == 1 else _Exchange.apply(parts)


def transposed(rows: Tensor) -> Tensor:
    """[b, N], this rank's rows of the global batch's matrix -> [b, N], its rows of the transpose. Differentiable."""
    if world_size() == 1:
        return rows.mT
    parts = exchange(rows.unflatten(1, (world_size(), -1)).permute(1, 2, 0))  # [ranks, b texts, b images]
    return parts.transpose(0, 1).flatten(1)


def gather_object(value: Any) -> list[Any]:
    """Every rank's picklable value, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    _enter()
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


def copy_from_first_(tensors: Iterable[Tensor]) -> None:
    """Overwrite them with the first rank's values."""
    for tensor in tensors if world_size() > 1 else ():
        _enter()
        dist.broadcast(tensor, src=0)


def first_rank_does(action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 alone and give its picklable result to all; an error there is raised everywhere.

    The others wait as long as it takes: the group's timeout is for collectives.
    """
    global _firsts
    if world_size() == 1:
        return action()
    _firsts += 1
    done = f"first{_firsts}"
    board = dist.distributed_c10d._get_default_store()
    outcome: list[Any] = [None, None]
    if is_first():
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
        board.set(done, "")
    _poll(lambda: is_first() or board.check([done]))
    _enter()
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        outcome[1].is_echo = not is_first()
        raise outcome[1]
    return outcome[0]


def wait_for_all() -> None:
    """Until every rank has come here, as long as it takes: the group's timeout is for collectives."""
    global _meetings
    if world_size() == 1:
        return
    _meetings += 1
    board, come = dist.distributed_c10d._get_default_store(), f"meeting{_meetings}"
    board.add(come, 1)
    _poll(lambda: board.add(come, 0) == world_size())


def _poll(holds: Callable[[], bool]) -> None:
    pause = 0.001
    while not holds():
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def _enter() -> None:
    global _entered
    _entered += 1


def _reduced(tensor: Tensor, operation: Any) -> Tensor:
    copy = tensor.detach().clone()
    if world_size() > 1:
        _enter()
        dist.all_reduce(copy, operation)
    return copy


def _all_gather(tensor: Tensor) -> Tensor:
    source = tensor.detach().contiguous()
    gathered = source.new_empty((world_size() * len(source), *source.shape[1:]))
    _enter()
    dist.all_gather_into_tensor(gathered, source)
    return gathered
