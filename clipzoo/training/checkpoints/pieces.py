"""Pieces of tensors: the part of a tensor that one rank holds, and its place in the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Keys = tuple[str | int, ...]
"""Keys and positions that lead to a value in nested mappings and lists."""


@dataclass(frozen=True)
class Place:
    """A box in a tensor of shape `whole`: `sizes` entries from `offsets` on, in every dimension."""

    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def everything(cls, shape: torch.Size | tuple[int, ...]) -> Place:
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Return the place of this rank's part: of a DTensor, or of a tensor that is whole on every rank."""
        if not is_sharded(tensor):
            return cls.everything(tensor.shape)
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        return cls(tuple(tensor.shape), tuple(chunk.offsets), tuple(chunk.sizes))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def is_empty_part(self) -> bool:
        """True if the box is empty and the tensor is not: a small tensor has no part on the last ranks."""
        return not math.prod(self.sizes) and bool(math.prod(self.whole))


@dataclass(frozen=True)
class Piece:
    """This rank's part of a tensor, and its place."""

    local: Tensor
    place: Place


Layout = Callable[[Keys, tuple[int, ...]], Place]
"""Function of the path and the whole shape of a stored tensor -> the part of it that this rank needs."""


def everything(path: Keys, shape: tuple[int, ...]) -> Place:
    """Layout of a reader that needs whole tensors."""
    return Place.everything(shape)


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor. Does not import torch.distributed.tensor, which takes half a second."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; other tensors as they are."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def like(part: Tensor, template: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a DTensor that is sharded like `template`, on its device."""
    from torch.distributed.tensor import DTensor

    assert isinstance(template, DTensor)
    moved = part.to(template.to_local().device)
    return DTensor.from_local(
        moved, template.device_mesh, template.placements, run_check=False, shape=template.shape,
        stride=template.stride(),
    )  # fmt: skip


def mapped(value: Any, change: Callable[[Keys, Tensor], Any], path: Keys = ()) -> Any:
    """Return nested mappings, lists and tuples with `change(path, tensor)` in place of every tensor."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, Mapping):
        return {key: mapped(item, change, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, change, (*path, index)) for index, item in enumerate(value))
    return value


def tensors(value: Any) -> Iterator[tuple[Keys, Tensor]]:
    """Yield all tensors in nested mappings, lists and tuples, with their paths."""
    found: list[tuple[Keys, Tensor]] = []
    mapped(value, lambda path, tensor: found.append((path, tensor)))
    return iter(found)
