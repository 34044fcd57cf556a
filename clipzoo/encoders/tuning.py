"""Which parameters of the towers train, and how fast: full, frozen, the last layers, low-rank adapters.

A low-rank adapter, W + (alpha / r) B A (Hu et al. 2022), is a parametrization of the weight itself, so that every
forward pass uses it: linear layers, fused query, key and value projections, and torch's `MultiheadAttention`, whose
kernel reads `in_proj_weight`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from clipzoo.encoders.base import Encoder, Tower, longest_list
from clipzoo.errors import ConfigError, number_of
from clipzoo.types import Count, Layers, NonNegativeCount, Part, Positive, Range, Weight, checked

LayerDecay = Annotated[float, Range(above=0, at_most=1)]
_ORIGINAL = re.compile(r"\bparametrizations\.(\w+)\.original$")
_ADAPTER = re.compile(r"\bparametrizations\.(\w+)\.0\.(lora_A|lora_B|lora_scale)$")
_STATE = re.compile(r"^(.*)\.(lora_A|lora_B|lora_scale)$")


@checked
class Tuning(Part):
    """Which parameters of the encoder train, and how fast.

    image, text: settings of the two towers. head_rate: factor of the learning rate of head and objective.
    head_steps: first steps, in which only head and objective train; the towers then need no backward pass.
    """

    def __init__(self, image: TowerTuning, text: TowerTuning, head_rate: Weight, head_steps: NonNegativeCount) -> None:
        self.towers = {"image": image, "text": text}
        self.head_rate, self.head_steps = head_rate, head_steps

    def frozen_towers(self, encoder: Encoder) -> dict[str, nn.Module]:
        """Return the towers with frozen parameters, by view. Raises ConfigError if the encoder lacks one."""
        return {name: _tower(encoder, name) for name, tuning in self.towers.items() if tuning.freezes}

    def apply(self, encoder: Encoder) -> None:
        for name, tower in self.frozen_towers(encoder).items():
            self.towers[name].apply(tower, f"tune.{name}")

    def factors(self, encoder: Encoder, others: list[nn.Parameter]) -> dict[nn.Parameter, float]:
        """Return the factors of the learning rate that are not 1. others: the parameters of head and objective."""
        factors = dict.fromkeys(others, self.head_rate)
        for name, tuning in self.towers.items():
            if tuning.rate != 1 or tuning.layer_decay != 1:
                factors |= tuning.factors(_tower(encoder, name))
        return {parameter: factor for parameter, factor in factors.items() if factor != 1}


def _tower(encoder: Encoder, name: str) -> nn.Module:
    if name not in encoder.towers:
        raise ConfigError(f"tune.{name} needs a tower, but {type(encoder).__name__} has no attribute {name}_tower")
    return encoder.towers[name]


class TowerTuning(Part):
    """Base class. rate: factor of the learning rate. layer_decay: factor from each layer to the layer before it.

    cache_gigabytes: largest size of the cached features of a tower that does not train; 0 for no cache.
    freezes: False if the whole tower trains.
    """

    freezes = True
    rate: float = 1.0
    layer_decay: float = 1.0
    cache_gigabytes: float = 0.0

    def apply(self, tower: nn.Module, key: str) -> None:
        """Freeze and adapt the tower's parameters, where any do not train. key: configuration key, for messages."""

    def factors(self, tower: nn.Module) -> dict[nn.Parameter, float]:
        """Return the factor of the learning rate of every parameter that trains."""
        trained = [parameter for parameter in tower.parameters() if parameter.requires_grad]
        if self.layer_decay == 1:
            return dict.fromkeys(trained, self.rate)
        depths = layer_indices(tower)
        top = max(depths.values())
        return {parameter: self.rate * self.layer_decay ** (top - depths[parameter]) for parameter in trained}


@checked
class Full(TowerTuning):
    """All parameters train."""

    freezes = False

    def __init__(self, rate: Weight, layer_decay: LayerDecay) -> None:
        self.rate, self.layer_decay = rate, layer_decay


@checked
class Frozen(TowerTuning):
    """Nothing trains, neither parameters nor batch-norm statistics; dropout is off (LiT, Zhai et al. 2022)."""

    def __init__(self, cache_gigabytes: Annotated[float, Range(at_least=0)]) -> None:
        self.cache_gigabytes = cache_gigabytes

    def apply(self, tower: nn.Module, key: str) -> None:
        tower.requires_grad_(False)


@checked
class LastLayers(TowerTuning):
    """The last `layers` blocks and all layers after them train; all layers before them are frozen."""

    def __init__(self, layers: Layers, rate: Weight, layer_decay: LayerDecay) -> None:
        self.layers, self.rate, self.layer_decay = layers, rate, layer_decay

    def apply(self, tower: nn.Module, key: str) -> None:
        blocks = len(blocks_of(tower))
        if self.layers > blocks:
            raise ConfigError(f"{key}.layers={self.layers}: {type(tower).__name__} has {number_of(blocks, 'layer')}")
        for parameter, index in layer_indices(tower).items():
            parameter.requires_grad_(index > blocks - self.layers)


@checked
class Lora(TowerTuning):
    """Low-rank adapters train, nothing else; see `LowRank`.

    rank, alpha: rank and scale of the adapters.
    targets: patterns of names of weights, such as ["*attn*"]; None for all linear maps of the blocks, fused query, key
    and value included.
    """

    def __init__(
        self, rank: Count, alpha: Positive, targets: list[str] | None, rate: Weight, layer_decay: LayerDecay
    ) -> None:
        self.rank, self.alpha, self.targets = rank, alpha, targets
        self.rate, self.layer_decay = rate, layer_decay

    def apply(self, tower: nn.Module, key: str) -> None:
        tower.requires_grad_(False)
        # Linear layers, convolutions without groups, and fused projections of attentions.
        kinds = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
        weights = {
            f"{path}.{attribute}".lstrip("."): (module, attribute)
            for path, module in tower.named_modules()
            for attribute, parameter in module.named_parameters(recurse=False)
            if attribute == "in_proj_weight" or (isinstance(module, kinds) and getattr(module, "groups", 1) == 1)
            if parameter.ndim >= 2
        }
        if self.targets is None:
            block_modules = {id(module) for block in blocks_of(tower) for module in block.modules()}
            target_names = [
                name
                for name, (module, attribute) in weights.items()
                if id(module) in block_modules and (isinstance(module, nn.Linear) or attribute == "in_proj_weight")
            ]
        else:
            target_names = []
            for pattern in self.targets:
                names = [name for name in weights if fnmatchcase(name, pattern)]
                if not names:
                    shown = ", ".join(list(weights)[:4])
                    raise ConfigError(f"{key}.targets: {pattern} matches no weight of the tower ({shown}, ...)")
                target_names += names
        for name in dict.fromkeys(target_names):
            module, attribute = weights[name]
            weight = getattr(module, attribute)
            largest = min(len(weight), weight[0].numel())
            if self.rank > largest:
                raise ConfigError(
                    f"{key}.rank={self.rank}: {name} {list(weight.shape)} has rank {largest}; lower it, or give targets"
                )
            parametrize.register_parametrization(module, attribute, LowRank(weight, self.rank, self.alpha))
        if not target_names:
            raise ConfigError(
                f"{key}: the blocks of {type(tower).__name__} have no linear map; give {key}.targets=[...]"
            )


def blocks_of(tower: nn.Module) -> list[nn.Module]:
    """Return the blocks of a tower, from the input to the output. Raises ConfigError if there are none."""
    blocks = tower.layers() if isinstance(tower, Tower) else longest_list(tower)
    if not blocks:
        raise ConfigError(f"{type(tower).__name__} has no layers() that list its blocks: tune it full or frozen")
    return blocks


def layer_indices(tower: nn.Module) -> dict[nn.Parameter, int]:
    """Return the layer of every parameter: 0 before the first block, 1 to n in the blocks, n + 1 after the last.

    A parameter between two blocks belongs to the block before it. The order is that of registration.
    """
    blocks = blocks_of(tower)
    block_indices = {parameter: index for index, block in enumerate(blocks, 1) for parameter in block.parameters()}
    parameters = list(tower.parameters())
    last = max((place for place, parameter in enumerate(parameters) if parameter in block_indices), default=-1)
    indices: dict[nn.Parameter, int] = {}
    current = 0
    for place, parameter in enumerate(parameters):
        current = block_indices.get(parameter, current)
        indices[parameter] = block_indices.get(parameter, current if place < last else len(blocks) + 1)
    return indices


def frozen_modules(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that have parameters, none of which trains."""
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        return [module]
    return [frozen for child in module.children() for frozen in frozen_modules(child)]


def frozen_tensors(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a state that training does not change, by plain names: parameters that do not train and
    all buffers of frozen modules."""
    buffers = {id(buffer) for frozen in frozen_modules(module) for buffer in frozen.buffers()}
    parameters = {id(parameter) for parameter in module.parameters() if not parameter.requires_grad}
    return {
        f"{prefix}{plain_name(name)}": value
        for name, value in module.state_dict(keep_vars=True).items()
        if id(value) in buffers or id(value) in parameters
    }


class LowRank(nn.Module):
    """A weight [o, i, ...] -> W + (alpha / rank) B A, the product in the shape of the weight. B is zero at first."""

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


def plain_name(name: str) -> str:
    """Return the name of a tensor without torch's word for a parametrization: `x.weight`, `x.weight.lora_A`."""
    return _ADAPTER.sub(r"\1.\2", _ORIGINAL.sub(r"\1", name))


def merged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state by plain names with every adapter added to its weight."""
    merged_state = {name: value for name, value in state.items() if not _STATE.match(name)}
    for name, parts in adapters_of(state).items():
        merged_state[name] = adapted(merged_state[name], parts["lora_A"], parts["lora_B"], parts["lora_scale"])
    return merged_state


def adapters_of(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the adapters in a state: the plain name of the weight -> its lora_A, lora_B and lora_scale."""
    adapters: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        if match := _STATE.match(name):
            adapters.setdefault(match[1], {})[match[2]] = value
    return adapters
