"""Ranks of a training hold copies of the weights (DDP); `sharded.py` divides the weights among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from clipzoo.distributed.world import World

OWN_PASSES, OTHER_RANKS = "own passes", "other ranks"
"""Marks: the end of this rank's passes before it waits for other ranks, and the end of the wait."""
Mark = Callable[[str], None]
M = TypeVar("M", bound=nn.Module)
T = TypeVar("T", bound=Tensor)


class Stateful(Protocol):
    """A module, optimizer or gradient scaler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Parallel(Generic[M]):
    """How ranks share the weights of one model. Here every rank holds all weights, and torch's DDP averages gradients.

    The trainer, the step, the gradient cache, checkpoints and averages of weights call these methods and are
    independent of the kind of parallelism. `Sharded` overrides them.

    model: the caller's model; its parameters are whole outside of `fit`.
    trained: the model that the optimizer updates: the same object, or a copy with the same names of parameters.
    equal_passes: True if every rank must run the encoder equally often.
    """

    equal_passes = False

    def __init__(self, model: M, world: World) -> None:
        self.model, self.world = model, world
        self.trained = model
        self._encoder: nn.Module | None = None

    def wrap(self, encoder: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Return the module to call in place of `encoder`, a module of `trained`, whose gradients ranks average.

        From then on the optimizer updates the parameters of `trained`. Collective. blocks: modules called in sequence.
        """
        if self.world.size == 1 or not any(parameter.requires_grad for parameter in encoder.parameters()):
            return encoder
        # Buffers may differ among ranks: batch norm's running statistics are those of the rank's own samples.
        self._encoder = DistributedDataParallel(encoder, broadcast_buffers=False, gradient_as_bucket_view=True)
        return self._encoder

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of the passes of one micro-batch. last: whether the step ends with it."""
        # Ranks exchange the sum over the micro-batches, once.
        if last or not isinstance(self._encoder, DistributedDataParallel):
            return nullcontext()
        return self._encoder.no_sync()

    def time_passes(self, mark: Mark) -> None:
        """Call `mark` with OWN_PASSES and OTHER_RANKS during the passes of the wrapped encoder, in every step."""

        def on_forward(module: nn.Module, arguments: object, output: object) -> None:
            # DDP queues its wait for the other ranks when the last gradient is there: this callback comes before it.
            queue: Any = Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
            on_gradient(output, lambda: queue(lambda: mark(OWN_PASSES)))

        if self._encoder is not None:
            self._encoder.register_forward_hook(on_forward)

    def any_rank(self, condition: bool) -> bool:
        """Return True if the condition holds on any rank. Collective."""
        return bool(self.world.maximum(torch.tensor(int(condition), device=self.world.device)).item())

    def end_step(self) -> None:
        """Free the memory that only the passes of the encoder need."""

    def trained_parameters(self, values: Mapping[nn.Parameter, float]) -> dict[nn.Parameter, float]:
        """Return values by parameter of `model` as values by parameter of `trained`."""
        return dict(values)

    def scaler(self, enabled: bool) -> torch.amp.GradScaler:
        """Return the loss scaling of fp16."""
        return torch.amp.GradScaler(self.world.device.type, enabled=enabled)

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm of the gradients of all parameters, 0-d and equal on all ranks. Collective."""
        return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])

    def clip_gradient_(self, parameters: Sequence[nn.Parameter], largest: float, norm: Tensor) -> None:
        """Scale the gradients, whose norm is `norm`, to a norm of at most `largest`."""
        for kind in by_kind(parameters):
            nn.utils.clip_grads_with_norm_(kind, largest, norm)

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Return the context of a step of the optimizer."""
        return nullcontext()

    @contextmanager
    def whole(self) -> Iterator[M]:
        """Give `model` the trained weights, whole on every rank, while the context lasts. Collective."""
        yield self.model

    def load_whole(self) -> None:
        """Copy the weights of `model` to `trained`. Call this inside `whole`."""

    def whole_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a nested state with whole tensors; ranks other than the first may get none. Collective."""
        return dict(state)

    def finish(self) -> None:
        """Give `model` the trained weights for good. Collective."""


def by_kind(tensors: Sequence[T]) -> list[list[T]]:
    """Return the shards, which are DTensors, and the whole tensors: torch accepts no list with both."""
    kinds = [[t for t in tensors if hasattr(t, "device_mesh") == is_sharded] for is_sharded in (True, False)]
    return [kind for kind in kinds if kind]


def on_gradient(value: object, action: Callable[[], None]) -> bool:
    """Call `action` once the gradient of a tensor, or of the first in a list, is known; return False without one."""
    if isinstance(value, Tensor) and value.requires_grad:
        value.register_hook(lambda gradient: action())
        return True
    return isinstance(value, list | tuple) and any(on_gradient(item, action) for item in value)
