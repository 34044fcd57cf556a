"""Memory that tensors take, counted as they are made and freed; fake tensors take none and are counted alike."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of tensors made in the block: `live` now, `peak` at most. known: tensors that do not count."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in known)
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage at its new size, which no dispatch mode sees."""
        if storage in self._sizes:
            self._change(self._sizes[storage], storage.nbytes())

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known and storage not in self._sizes:
            size = self._sizes[storage] = [0]
            weakref.finalize(storage, self._change, size, 0)
            self._change(size, storage.nbytes())

    def _change(self, size: list[int], now: int) -> None:
        self.live += now - size[0]
        self.peak = max(self.peak, self.live)
        size[0] = now


def fake_(module: nn.Module) -> None:
    """Replace all tensors of a module, in place, by new ones. Call it under FakeTensorMode."""
    replaced: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                new = nn.Parameter(_fake(parameter), parameter.requires_grad)
                part._parameters[name] = replaced.setdefault(id(parameter), new)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _fake(buffer)


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)
