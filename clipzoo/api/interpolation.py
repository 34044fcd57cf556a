"""WiSE-FT: the weights between two models, those before and after a fine-tuning (Wortsman et al. 2022)."""

from __future__ import annotations

import copy

import torch

from clipzoo.api.loading import LoadedModel
from clipzoo.errors import ConfigError, number_of


def interpolate(first: LoadedModel, second: LoadedModel, mix: float) -> LoadedModel:
    """Return the model with weights (1 - mix) first + mix second; mix 0 is the first model, 1 the second, exactly.

    The models must have the same tensors. Counts and other whole numbers are those of the second.

    Raises:
        ConfigError: a tensor is in one model alone, or has another shape there.
    """
    start, end = first.state_dict(), second.state_dict()
    shapes = [{name: tuple(value.shape) for name, value in state.items()} for state in (start, end)]
    if shapes[0] != shapes[1]:
        names = sorted(name for name in {*start, *end} if shapes[0].get(name) != shapes[1].get(name))
        raise ConfigError(
            f"models cannot be mixed: {number_of(len(names), 'tensor')} have other shapes, the first is {names[0]}"
        )
    mixed = copy.deepcopy(second)
    with torch.no_grad():
        for name, value in mixed.state_dict().items():
            if value.is_floating_point() and mix != 1:
                value.copy_(start[name] if mix == 0 else torch.lerp(start[name], end[name], mix))
    return mixed
