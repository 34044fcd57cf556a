"""Low-rank adaptation, W + (alpha / r) B A, of any weight matrix (Hu et al. 2022).

An adapter is a parametrization of the weight itself, so that every forward pass uses it: linear layers, fused query,
key and value projections, and torch's `MultiheadAttention`, whose kernel reads `in_proj_weight`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from clipzoo.errors import ConfigError

_ORIGINAL = re.compile(r"\bparametrizations\.(\w+)\.original$")
_ADAPTER = re.compile(r"\bparametrizations\.(\w+)\.0\.(lora_A|lora_B|lora_scale)$")
_STATE = re.compile(r"^(.*)\.(lora_A|lora_B|lora_scale)$")


class LowRank(nn.Module):
    """A weight [o, i, ...] -> W + lora_scale B A, the product in the shape of the weight. B is zero at first.

    rank: r. alpha: lora_scale is alpha / r.
    """

    lora_scale: Tensor

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        # On the CPU with the global generator: the same values on every device.
        self.lora_A = nn.Parameter(torch.empty(rank, weight[0].numel(), dtype=weight.dtype))
        self.lora_B = nn.Parameter(torch.zeros(len(weight), rank, dtype=weight.dtype))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.register_buffer("lora_scale", torch.tensor(alpha / rank, dtype=weight.dtype))
        self.to(weight.device)

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            return adapted(weight, self.lora_A, self.lora_B, self.lora_scale)


def adapted(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: Tensor) -> Tensor:
    """[o, i, ...], [r, i...], [o, r] -> the merged weight [o, i, ...]."""
    return weight + (scale * (lora_b @ lora_a)).view_as(weight)


def add_adapters(tower: nn.Module, blocks: Sequence[nn.Module], rank: int, alpha: float, targets: Sequence[str] | None,
                 key: str) -> None:  # fmt: skip
    """Add an adapter to every target of a tower.

    targets: patterns of names of weights, such as "*attn*", of linear layers, convolutions and attentions; None for
    all linear maps of the blocks. key: for messages.

    Raises:
        ConfigError: a pattern matches no weight, or a weight is smaller than the rank.
    """
    chosen = dict(_targets(tower, blocks, targets, key))
    for name, (module, attribute) in chosen.items():
        weight = getattr(module, attribute)
        largest = min(len(weight), weight[0].numel())
        if rank > largest:
            raise ConfigError(
                f"{key}.rank={rank}: {name} {list(weight.shape)} has rank {largest}; lower it, or give targets"
            )
        parametrize.register_parametrization(module, attribute, LowRank(weight, rank, alpha))


def _targets(
    tower: nn.Module, blocks: Sequence[nn.Module], patterns: Sequence[str] | None, key: str
) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    weights = {
        f"{path}.{attribute}".lstrip("."): (module, attribute)
        for path, module in tower.named_modules()
        for attribute, parameter in module.named_parameters(recurse=False)
        if parameter.ndim >= 2 and (attribute == "in_proj_weight" or _is_linear_map(module))
    }
    if patterns is None:
        inside = {id(module) for block in blocks for module in block.modules()}
        yield from (
            (name, (module, attribute))
            for name, (module, attribute) in weights.items()
            if id(module) in inside and (isinstance(module, nn.Linear) or attribute == "in_proj_weight")
        )
        return
    for pattern in patterns:
        names = [name for name in weights if fnmatchcase(name, pattern)]
        if not names:
            shown = ", ".join(list(weights)[:4])
            raise ConfigError(f"{key}.targets: {pattern} matches no weight of the tower ({shown}, ...)")
        yield from ((name, weights[name]) for name in names)


def _is_linear_map(module: nn.Module) -> bool:
    """Return True for linear layers, and for convolutions without groups."""
    convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1
    return isinstance(module, nn.Linear) or convolution


def plain_name(name: str) -> str:
    """Return the name of a tensor without torch's word for a parametrization: `x.weight`, `x.weight.lora_A`."""
    return _ADAPTER.sub(r"\1.\2", _ORIGINAL.sub(r"\1", name))


def merged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state by plain names with every adapter added to its weight."""
    adapters = {match[1] for name in state if (match := _STATE.match(name))}
    return {
        name: adapted(value, *(state[f"{name}.{part}"] for part in ("lora_A", "lora_B", "lora_scale")))
        if name in adapters
        else value
        for name, value in state.items()
        if not _STATE.match(name)
    }


def adapters_of(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the adapters in a state: the plain name of the weight -> its lora_A, lora_B and lora_scale."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        if match := _STATE.match(name):
            found.setdefault(match[1], {})[match[2]] = value
    return found
