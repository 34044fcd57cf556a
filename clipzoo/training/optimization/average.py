"""The average of the weights over the steps of a training, beside the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from clipzoo.distributed.parallel import by_kind
from clipzoo.encoders.tuning import plain_name
from clipzoo.training.parts import Averaging
from clipzoo.types import Progress


class WeightAverage:
    """Running average of all parameters that train and of the statistics of batch norms; a part of the checkpoint.

    Every rank averages the tensors that it holds, whole ones or its shards. Other buffers, such as an objective's
    per-sample state, are those of the model.

    averaging: which steps enter. modules: by their names in the checkpoint.
    """

    def __init__(self, averaging: Averaging, modules: Mapping[str, nn.Module]) -> None:
        self._averaging = averaging
        named = {
            part: {plain_name(name): tensor for name, tensor in averaged_tensors(module).items()}
            for part, module in modules.items()
        }
        unique = {id(tensor): tensor for tensors in named.values() for tensor in tensors.values()}
        averages = {key: tensor.detach().clone() for key, tensor in unique.items()}
        self._tensors, self._averages = list(unique.values()), list(averages.values())
        # Tied weights have one average under several names.
        self._named = {
            part: {name: averages[id(tensor)] for name, tensor in own.items()} for part, own in named.items()
        }
        self.has_begun = False

    @classmethod
    def of(cls, averaging: Averaging | None, modules: Mapping[str, nn.Module]) -> WeightAverage | None:
        """Return the average, None without `averaging`."""
        return None if averaging is None else cls(averaging, modules)

    @torch.no_grad()
    def update(self, progress: Progress) -> None:
        """Let the weights after `progress.step` steps enter the average."""
        weight = self._averaging(progress)
        if weight == 1:
            for average, tensor in zip(self._averages, self._tensors, strict=True):
                average.copy_(tensor)
            self.has_begun = True
        elif weight > 0:
            for averages, tensors in zip(by_kind(self._averages), by_kind(self._tensors), strict=True):
                torch._foreach_lerp_(averages, tensors, weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Exchange the weights of the modules for their average while the context lasts."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state_dict(self) -> dict[str, Any]:
        """Return the average by part and plain name."""
        return {**self._named, "has_begun": self.has_begun}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Fill it in place."""
        self.has_begun = bool(state["has_begun"])
        for part, tensors in self._named.items():
            if tensors.keys() != state[part].keys():
                raise RuntimeError(f"the average has other tensors: {sorted(tensors.keys() ^ state[part].keys())[:4]}")
            for name, tensor in tensors.items():
                tensor.copy_(state[part][name])

    @torch.no_grad()
    def _exchange(self) -> None:
        for tensor, average in zip(self._tensors, self._averages, strict=True):
            kept = tensor.clone()
            tensor.copy_(average)
            average.copy_(kept)


def averaged_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that train and the running statistics of batch norms, by name."""
    parameters = module.named_parameters(remove_duplicate=False)
    statistics = {
        f"{name}.{kind}": tensor
        for name, inner in module.named_modules()
        if isinstance(inner, _NormBase)
        for kind, tensor in inner.named_buffers(recurse=False)
        if tensor.is_floating_point()
    }
    return {name: parameter for name, parameter in parameters if parameter.requires_grad} | statistics
