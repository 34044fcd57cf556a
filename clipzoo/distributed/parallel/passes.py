"""Marks around the moments at which passes of the encoder wait for other ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd import Variable

OWN_PASSES, OTHER_RANKS = "own passes", "other ranks"
"""Marks: the end of this rank's passes before it waits for other ranks, and the end of the wait."""
Mark = Callable[[str], None]


def on_gradient(value: object, action: Callable[[], None]) -> None:
    """Call `action` when the gradient of a tensor is known; in a list or tuple that of the first one that has any."""
    tensor = _first_with_gradient(value)
    if tensor is not None:
        tensor.register_hook(lambda gradient: action())


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Call `action` at the end of the backward pass that is running, after the actions queued before."""
    Variable._execution_engine.queue_callback(action)  # type: ignore[attr-defined]


def _first_with_gradient(value: object) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.requires_grad else None
    found = (_first_with_gradient(item) for item in value) if isinstance(value, list | tuple) else iter(())
    return next((tensor for tensor in found if tensor is not None), None)
