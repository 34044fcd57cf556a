"""Many ranks pretended by one process: a process group that answers collectives and counts their bytes.

All ranks are pretended to hold what this one, rank 0, holds; only sample ids go on counting from rank to rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore

from clipzoo.distributed.world import World


class PretendedGroup(dist.ProcessGroup):
    """Counts the bytes that a rank receives; collectives with several algorithms count as rings.

    Each method answers the collective of its name in torch.distributed.

    received: by collective, in all groups together.
    """

    received: Counter[str] = Counter()

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._name = ""

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def total(self) -> int:
        return sum(self.received.values())

    def getBackendName(self) -> str:  # noqa: N802
        return "pretended"

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._done("all_reduce", 2 * _size(tensors) // self.size(), tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._done("broadcast", _size(tensors) / (self.size() - 1), tensors)

    def barrier(self, options: Any = None) -> Any:
        return self._done("barrier", 0, [])

    def allgather(self, outputs: list[list[Tensor]], sources: list[Tensor], options: Any = None) -> Any:
        for received, source in zip(outputs, sources, strict=True):
            for output in received:
                output.copy_(source)
        return self._done("all_gather", _size(sources), outputs)

    def _allgather_base(self, output: Tensor, source: Tensor, options: Any = None) -> Any:
        own = source.storage_offset() if source.untyped_storage()._cdata == output.untyped_storage()._cdata else None
        parts = output.view(self.size(), *source.shape)
        # FSDP2 gathers in place: a rank's part of the output is its source already.
        for part in parts:
            if part.storage_offset() != own:
                part.copy_(source)
        if source.dtype == torch.int64 and source.ndim == 1:
            parts += len(source) * torch.arange(self.size())[:, None]
        return self._done("all_gather", source.nbytes, output)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], sources: list[Tensor], options: Any = None) -> Any:
        for output, source in zip(outputs, sources, strict=True):
            self._allgather_base(output, source)
        return self._done("all_gather", 0, outputs)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any = None) -> Any:
        output.copy_(source.reshape(self.size(), -1)[0].reshape(output.shape))
        return self._done("reduce_scatter", output.nbytes, output)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], sources: list[Tensor], options: Any = None) -> Any:
        for output, source in zip(outputs, sources, strict=True):
            self._reduce_scatter_base(output, source)
        return self._done("reduce_scatter", 0, outputs)

    def alltoall_base(self, output: Tensor, source: Tensor, *splits_and_options: Any) -> Any:
        parts = source.reshape(self.size(), -1)
        output.copy_(parts[:1].expand_as(parts).reshape(output.shape))
        return self._done("all_to_all", source.nbytes // self.size(), output)

    def _done(self, name: str, part: float, result: Any) -> Any:
        """Count `part`, the bytes that come from each other rank."""
        self.received[name] += round(part * (self.size() - 1))
        future: Future[Any] = Future()
        future.set_result(result)
        return _create_work_from_future(future)


def _size(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


dist.Backend.register_backend("pretended", PretendedGroup, devices=["cpu", "cuda"])


@contextmanager
def pretended_ranks(size: int) -> Iterator[tuple[World, PretendedGroup]]:
    """The world of rank 0 of `size` pretended ranks within the block, and the group that counts its traffic."""
    PretendedGroup.received.clear()
    dist.init_process_group("pretended", store=FakeStore(), rank=0, world_size=size)
    try:
        group = dist.distributed_c10d._get_default_group()
        yield World(0, size, 0, torch.device("cpu")), group
    finally:
        dist.destroy_process_group()
