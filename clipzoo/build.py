"""From a checked configuration to the parts of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn

from clipzoo.errors import ConfigError
from clipzoo.heads.base import Head
from clipzoo.model import Model
from clipzoo.objectives import compatibility
from clipzoo.objectives.base import Objective


def part(node: Mapping[str, Any]) -> Any:
    """The object that one `_target_` node describes, built from plain values."""
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        # Hydra wraps what a constructor raises; a message meant for the user comes out as it is.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None


def build_head(plain: Mapping[str, Any]) -> Head:
    return _seeded(plain, "head")


def build_objective(plain: Mapping[str, Any]) -> Objective:
    return _seeded(plain, "objective")


def build_pair(plain: Mapping[str, Any]) -> tuple[Head, Objective]:
    """Build head and objective, and log the warnings about the pair.

    Raises:
        ConfigError: the objective cannot train the head.
    """
    head, objective = build_head(plain), build_objective(plain)
    compatibility.require(head, objective)
    return head, objective


def build_model(plain: Mapping[str, Any], head: Head | None = None) -> Model:
    """Encoder and head with the initial weights of `seed`; on the meta device under `torch.device("meta")`."""
    for width in ("image_width", "text_width"):
        asked = plain["head"].get(width)
        given = plain["encoder"].get(width, asked)
        if asked != given:
            raise ConfigError(f"head.{width} is {asked}, but the encoder's features have {given}: leave it out")
    return Model(_seeded(plain, "encoder"), head or build_head(plain))


def _seeded(plain: Mapping[str, Any], name: str) -> Any:
    """Each part's initial weights depend on the seed alone, not on what was built before it."""
    torch.manual_seed(plain["seed"])
    return part(plain[name])


def parameters_of(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())
