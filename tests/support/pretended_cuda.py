"""CPU tensors that say they lie on a GPU, to hold the code to a GPU's rules without one.

Inside `pretended()` torch sees one CUDA device. A tensor that is made there or sent there is an `OnCuda`: its device is
cuda:0, `torch.autocast("cuda")` counts for it, and its numbers lie in a CPU tensor inside. Every operation works on
those numbers and gives the right answer. A CPU tensor among CUDA tensors is an error, and whatever makes the host wait
for the device is noted. What this cannot show: that a GPU has a kernel for the operation and its types, how that kernel
rounds, what it costs, and anything about streams.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

import clipzoo

DEVICE = torch.device("cuda", 0)
PACKAGE = Path(clipzoo.__file__).parent
aten = torch.ops.aten
ANSWERS = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive, aten.bincount,
    aten.equal,
}  # fmt: skip
"""Operations whose answer, or its size, the host waits for."""

_waits: list[str] = []


@contextmanager
def pretended() -> Iterator[list[str]]:
    """Yield a list that grows by a place in the package, as "ops/kme.py pack", whenever the host waits."""
    # Autograd asks each node's device for its stream; torch's own fake tensors do this where there is no GPU.
    torch._C._ensureCUDADeviceGuardSet()
    own = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    _waits.clear()
    try:
        engine = mock.patch.object(torch.autograd, "backward", _walk_back)
        with mock.patch.multiple(torch.cuda, **_CUDA), engine, _Pretence():
            yield _waits
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(own)


def numbers(tensor: Tensor) -> Tensor:
    """The CPU tensor inside."""
    assert isinstance(tensor, OnCuda)
    return tensor.inside.detach()


class OnCuda(Tensor):
    inside: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inside: Tensor) -> OnCuda:
        facts = {"strides": inside.stride(), "storage_offset": inside.storage_offset(), "dtype": inside.dtype}
        return Tensor._make_wrapper_subclass(cls, inside.size(), device=DEVICE, layout=inside.layout, **facts)

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _do(operation, args, kwargs or {})

    def tolist(self) -> Any:
        _note()
        return self.inside.tolist()

    def backward(self, gradient: Tensor | None = None) -> None:  # type: ignore[override]
        _walk_back([self], [torch.ones_like(self) if gradient is None else gradient])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnCuda({self.inside!r})"


def check_launches(module: Any) -> None:
    """Hold the module's kernels, run by the interpreter, to contiguous CUDA tensors: `<name>_kernel[grid](...)`."""
    for name in [name for name in vars(module) if name.endswith("_kernel")]:
        setattr(module, name, _Launch(getattr(module, name)))


class _Launch:
    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
            assert all(isinstance(tensor, OnCuda) and tensor.is_contiguous() for tensor in tensors)
            with _disable_current_modes():
                self._kernel[grid](
                    *(argument.inside if isinstance(argument, OnCuda) else argument for argument in arguments),
                    **constants,
                )

        return launch


class _Pretence(TorchDispatchMode):
    """Sees also what makes CUDA tensors out of none."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _do(operation, args, kwargs or {})


def _do(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_cuda = [tensor for tensor in tensors if isinstance(tensor, OnCuda)]
    asked, kind = kwargs.get("device"), operation.overloadpacket
    answers_on_cuda = bool(on_cuda) if asked is None else torch.device(asked).type == "cuda"
    if kind is aten._to_copy:
        _check_copy(args[0], answers_on_cuda, kwargs.get("non_blocking", False))
    elif kind is aten.copy_:
        _check_copy(args[1], isinstance(args[0], OnCuda), args[2] if len(args) > 2 else False)
    elif on_cuda and kind is not aten.lift_fresh:
        # A number as a 0-d tensor may stay on the CPU.
        stray = [tensor for tensor in tensors if not isinstance(tensor, OnCuda) and tensor.ndim]
        if stray:
            raise RuntimeError(f"{operation} of tensors on cuda:0 and a tensor {tuple(stray[0].shape)} on the CPU")
        if kind in ANSWERS or (kind in (aten.index, aten.index_put, aten.index_put_) and _by_mask(args[1])):
            _note()
    if kind is aten.is_pinned:
        return not on_cuda
    plain_args, plain = tree_map(lambda leaf: leaf.inside if isinstance(leaf, OnCuda) else leaf, (args, kwargs))
    if answers_on_cuda and asked is not None:
        plain["device"] = torch.device("cpu")
    plain.pop("pin_memory", None)
    if kind is aten._pin_memory:
        return plain_args[0].clone()
    if operation is aten.mm.dtype:  # CPUs have none
        result = torch.mm(*(matrix.to(plain_args[2]) for matrix in plain_args[:2]))
    else:
        result = operation(*plain_args, **plain)
    if kind is aten.copy_:
        return args[0]
    if not answers_on_cuda or kind is aten._local_scalar_dense:
        return result
    result = tree_map(lambda leaf: OnCuda(leaf) if isinstance(leaf, Tensor) else leaf, result)
    return return_and_correct_aliasing(operation, args, kwargs, result) if on_cuda else result


def _check_copy(source: Tensor, to_cuda: bool, non_blocking: bool) -> None:
    if isinstance(source, OnCuda) != to_cuda and not non_blocking:
        _note()


def _by_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _note() -> None:
    frame = sys._getframe()
    while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None:
        _waits.append(f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)} {frame.f_code.co_name}")


def _walk_back(tensors: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """What torch's engine does on one thread: the engine itself asks the driver for its devices."""
    pending = {(tensor.grad_fn, tensor.output_nr): gradient for tensor, gradient in zip(tensors, given, strict=True)}
    with torch.no_grad():
        for node in _from_the_end([tensor.grad_fn for tensor in tensors]):
            facts = node._input_metadata
            gradients = [pending.pop((node, index), None) for index in range(len(facts))]
            if all(gradient is None for gradient in gradients):
                continue
            if hasattr(node, "variable"):
                own, new = node.variable.grad, gradients[0].detach()
                node.variable.grad = new.clone() if own is None else own + new
                continue
            if isinstance(node, BackwardCFunction):
                gradients = [
                    torch.zeros(fact.shape, dtype=fact.dtype, device=fact.device) if gradient is None else gradient
                    for gradient, fact in zip(gradients, facts, strict=True)
                ]
                # Arguments that are no tensors have no gradient; in our functions they come last.
                results = node.apply(*gradients)[: len(node.next_functions)]
            else:
                results = node(*gradients)
                results = results if isinstance(results, tuple) else (results,)
            for (following, index), gradient in zip(node.next_functions, results, strict=True):
                if following is None or gradient is None:
                    continue
                fact = following._input_metadata[index]
                assert gradient.device == fact.device, f"{node} gives a gradient on {gradient.device} for {fact.device}"
                gradient = gradient.sum_to_size(fact.shape).to(fact.dtype)
                before = pending.get((following, index))
                pending[following, index] = gradient if before is None else before + gradient


def _from_the_end(roots: list[Any]) -> list[Any]:
    """Every node of the graph, none before all that lead to it."""
    order: list[Any] = []
    seen: set[Any] = set()
    for root in roots:
        stack = [] if root in seen else [(root, iter(root.next_functions))]
        seen.add(root)
        while stack:
            node, rest = stack[-1]
            following = next((other for other, _ in rest if other is not None and other not in seen), None)
            if following is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(following.next_functions)))
    return order[::-1]


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return 1000 * (end.time - self.time)


_CUDA: dict[str, Any] = {
    "is_available": lambda: True, "is_bf16_supported": lambda *_: True, "_lazy_init": lambda: None,
    "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda _: None, "Event": _Event,
    "get_device_name": lambda _: "a pretended H100", "max_memory_allocated": lambda _: 0,
    "is_current_stream_capturing": lambda: False,
    # Its random numbers are the CPU's.
    "manual_seed_all": lambda _: None, "get_rng_state": lambda _: torch.empty(0), "set_rng_state": lambda *_: None,
}  # fmt: skip
