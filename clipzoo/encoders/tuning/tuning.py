"""Which parameters of a model train, and how fast."""

from __future__ import annotations

from torch import Tensor, nn

from clipzoo.encoders.base import Encoder
from clipzoo.encoders.tuning.lora import plain_name
from clipzoo.encoders.tuning.towers import TowerTuning
from clipzoo.errors import ConfigError
from clipzoo.types import NonNegativeCount, Part, Weight, checked


@checked
class Tuning(Part):
    """Which parameters of the encoder train, and how fast.

    image, text: settings of the two towers. head_rate: factor of the learning rate of head and objective.
    head_steps: steps at the start in which only head and objective train; the towers then cost no backward pass.
    """

    def __init__(self, image: TowerTuning, text: TowerTuning, head_rate: Weight, head_steps: NonNegativeCount) -> None:
        self.towers = {"image": image, "text": text}
        self.head_rate, self.head_steps = head_rate, head_steps

    def frozen_towers(self, encoder: Encoder) -> dict[str, nn.Module]:
        """Return the towers of which parts do not train, by view. Raises ConfigError if the encoder lacks one."""
        return {name: _tower(encoder, name) for name, tuning in self.towers.items() if tuning.freezes}

    def apply(self, encoder: Encoder) -> None:
        """Freeze and adapt the towers."""
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
    tower = getattr(encoder, f"{name}_tower", None)
    if tower is None:
        raise ConfigError(f"tune.{name} needs a tower, but {type(encoder).__name__} has no attribute {name}_tower")
    return tower


def frozen_modules(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that have parameters of which none trains."""
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
