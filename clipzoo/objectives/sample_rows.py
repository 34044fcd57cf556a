"""Rows of per-sample state: those of the samples of a global batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clipzoo.types import World

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by size in bytes."""


@dataclass(frozen=True)
class SampleRows:
    """The rows of a global batch in buffers [2, n] that every rank holds whole. ids: of its samples, [N]."""

    ids: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, buffer: Tensor) -> Tensor:
        """Return the state of both modalities, [2, N]."""
        return buffer[:, self.ids]

    def write(self, buffer: Tensor, modality: int, values: Tensor) -> None:
        """Store the state of one modality. values: [N], the same on all ranks."""
        buffer[modality, self.ids] = values.to(buffer.dtype)


@dataclass(frozen=True)
class SharedRows(SampleRows):
    """The rows of a global batch in buffers of which every rank holds the part of its own samples.

    rows: positions in the batch of the samples that this rank holds. columns: their positions in its buffers.
    """

    world: World
    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, ids: Tensor, world: World, first: int, end: int) -> SharedRows:
        """Find the samples of this rank, first .. end - 1, among those of the batch."""
        rows = ((ids >= first) & (ids < end)).nonzero().flatten()
        return cls(ids, world, rows, ids[rows] - first)

    def read(self, buffer: Tensor) -> Tensor:
        # One rank has the bits of a value, the others zeros: the sum is exact for every value.
        bits = BITS[buffer.element_size()]
        values = torch.zeros(2, len(self.ids), dtype=bits, device=buffer.device)
        values[:, self.rows] = buffer[:, self.columns].view(bits)
        return self.world.sum(values).view(buffer.dtype)

    def write(self, buffer: Tensor, modality: int, values: Tensor) -> None:
        buffer[modality, self.columns] = values[self.rows].to(buffer.dtype)
