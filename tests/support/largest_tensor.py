"""The largest tensor that a computation makes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """`elements` is the number of elements of the largest tensor returned by any operation so far."""

    elements = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operation(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return output
