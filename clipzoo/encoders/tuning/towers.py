"""Ways to tune one tower: options of the groups `tune/image` and `tune/text`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated

from torch import nn

from clipzoo.encoders.base import Tower, longest_list
from clipzoo.encoders.tuning.lora import add_adapters
from clipzoo.errors import ConfigError, number_of
from clipzoo.types import Count, Layers, Part, Positive, Range, Weight, checked

LayerDecay = Annotated[float, Range(above=0, at_most=1)]


class TowerTuning(Part, ABC):
    """Base class. rate: factor of the learning rate. layer_decay: factor from each layer to the layer before it.

    cache_gigabytes: largest size of the cached features of a tower that does not train; 0 for no cache.
    freezes: False if the whole tower trains.
    """

    freezes = True
    rate: float = 1.0
    layer_decay: float = 1.0
    cache_gigabytes: float = 0.0

    @abstractmethod
    def apply(self, tower: nn.Module, key: str) -> None:
        """Freeze and adapt the tower's parameters. key: of the configuration, for messages."""

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

    def apply(self, tower: nn.Module, key: str) -> None:
        pass


@checked
class Frozen(TowerTuning):
    """Nothing trains: no parameter, and no statistic of a batch norm; dropout is off (LiT, Zhai et al. 2022)."""

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
        blocks = [tower] if self.targets is not None else blocks_of(tower)
        add_adapters(tower, blocks, self.rank, self.alpha, self.targets, key)
        if not any(parameter.requires_grad for parameter in tower.parameters()):
            raise ConfigError(
                f"{key}: the blocks of {type(tower).__name__} have no linear map; give {key}.targets=[...]"
            )


def blocks_of(tower: nn.Module) -> list[nn.Module]:
    """Return the blocks of a tower, from the input to the output.

    Raises:
        ConfigError: there are none.
    """
    blocks = list(tower.layers()) if isinstance(tower, Tower) else longest_list(tower)
    if not blocks:
        raise ConfigError(f"{type(tower).__name__} has no layers() that list its blocks: tune it full or frozen")
    return blocks


def layer_indices(tower: nn.Module) -> dict[nn.Parameter, int]:
    """Return the layer of every parameter: 0 before the first block, 1 to n in the blocks, n + 1 after the last.

    A parameter between two blocks belongs to the block before it. Order is that of registration.
    """
    blocks = blocks_of(tower)
    inside = {parameter: index for index, block in enumerate(blocks, 1) for parameter in block.parameters()}
    parameters = list(tower.parameters())
    last = max((place for place, parameter in enumerate(parameters) if parameter in inside), default=-1)
    indices: dict[nn.Parameter, int] = {}
    current = 0
    for place, parameter in enumerate(parameters):
        current = inside.get(parameter, current)
        indices[parameter] = inside.get(parameter, current if place < last else len(blocks) + 1)
    return indices
