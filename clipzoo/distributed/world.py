"""The ranks of a run: who this process is among them, and how the ranks exchange tensors and objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipzoo.distributed import collectives


@dataclass(frozen=True)
class World:
    """This process's rank among all ranks, its device, and the collectives over them. `World()` is a single process.

    rank: 0 .. size - 1. size: number of ranks. local_rank: rank within the node. device: where this rank computes.
    gather_dtype: precision in which embeddings travel between ranks; None for the precision of the embedding.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    gather_dtype: torch.dtype | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[b, ...] -> [N, ...] in rank order, differentiable. All ranks must pass the same shape.

        dtype: precision in which the values travel, and to which they are rounded; gradients travel exactly.
        """
        return collectives.gather(tensor, dtype)

    def transpose(self, rows: Tensor) -> Tensor:
        """[b, N], this rank's rows of a global matrix -> [b, N], its rows of the transpose. Differentiable."""
        return collectives.transposed(rows)

    def exchange(self, parts: Tensor) -> Tensor:
        """[size, ...] -> [size, ...]: all-to-all; part r goes to rank r. Differentiable."""
        return collectives.exchange(parts)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, without gradient."""
        return collectives.total(tensor)

    def mean(self, tensor: Tensor) -> Tensor:
        """Mean over ranks, without gradient."""
        return collectives.mean(tensor)

    def maximum(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks, without gradient."""
        return collectives.maximum(tensor)

    def gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable value in rank order, on every rank."""
        return collectives.gather_object(value)

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with the first rank's values."""
        collectives.copy_from_first_(tensors)

    def run_on_first(self, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0 alone and return its picklable result on all ranks; its error is raised on all.

        The other ranks wait without a time limit.
        """
        return collectives.first_rank_does(action)

    def barrier(self) -> None:
        """Wait until every rank has reached this call, without a time limit."""
        collectives.wait_for_all()

    @staticmethod
    def environment_rank() -> tuple[int, int, int]:
        """(rank, world size, local rank) as torchrun or the SLURM scripts state them; (0, 1, 0) without them.

        The only place that reads these variables.
        """
        names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        rank, size, local_rank = (int(os.environ.get(name, default)) for name, default in names.items())
        return rank, size, local_rank
