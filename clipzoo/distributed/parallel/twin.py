"""A second object for the same model: its modules are copies, its tensors are shared."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def twin(model: M, kept: Iterable[object] = ()) -> M:
    """Return a copy of the model's modules with the same parameters and buffers.

    kept: modules and other objects inside the model that both share.
    """
    shared = [*model.parameters(), *model.buffers(), *kept]
    return copy.deepcopy(model, {id(item): item for item in shared})
