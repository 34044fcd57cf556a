"""Memory of a rank under FSDP2: storages that are freed and filled again, and tensors behind DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from clipzoo.plan.counts import LiveMemory


class ShardedMemory(LiveMemory):
    """LiveMemory that follows `storage.resize_`, by which FSDP2 frees gathered weights, and looks behind DTensors."""

    _finds_shapes = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tensors made in the block."""
        resize = torch.UntypedStorage.resize_

        def counted_resize(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self.resized(storage)

        # DTensor holds this lock while it computes shapes with tensors that take no memory.
        with (
            patch.object(torch.UntypedStorage, "resize_", counted_resize),
            patch.object(ShardingPropagator, "_fake_mode_lock", self._Shapes(self)),
            self,
        ):
            yield

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self._finds_shapes:
            return function(*args, **(kwargs or {}))
        return super().__torch_dispatch__(function, types, args, kwargs)

    class _Shapes:
        def __init__(self, memory: ShardedMemory) -> None:
            self._memory = memory

        def __enter__(self) -> None:
            self._memory._finds_shapes = True

        def __exit__(self, *error: object) -> None:
            self._memory._finds_shapes = False
