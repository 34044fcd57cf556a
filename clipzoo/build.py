"""Build the parts of a run from its checked configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn

from clipzoo.contracts import Dataset, Logger, Optimizer
from clipzoo.errors import ConfigError
from clipzoo.evaluation.suite import Suite
from clipzoo.heads.base import Head
from clipzoo.model import Model
from clipzoo.objectives import compatibility
from clipzoo.objectives.base import Objective
from clipzoo.training.trainer import Trainer


@dataclass(frozen=True)
class RunParts:
    """The parts of a run, before its dataset is opened and its encoder is built."""

    trainer: Trainer
    head: Head
    objective: Objective
    dataset: Dataset
    evaluator: Suite
    optimizer: Optimizer
    logger: Logger


def build_parts(plain: Mapping[str, Any]) -> RunParts:
    """Build every part but the encoder, which takes longest.

    Raises:
        ConfigError: a constructor refuses its arguments, or the objective cannot train the head.
    """
    parts = RunParts(
        trainer=part(plain["trainer"]),
        head=build_head(plain),
        objective=build_objective(plain),
        dataset=part(plain["data"]),
        evaluator=part(plain["eval"]),
        optimizer=part(plain["optim"]),
        logger=part(plain["logger"]),
    )
    compatibility.require(parts.head, parts.objective)
    return parts


def part(node: Mapping[str, Any]) -> Any:
    """Build the object that a `_target_` node describes, from plain values.

    Raises:
        ConfigError: the constructor refuses a value.
    """
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        # Hydra wraps the errors of constructors; a message meant for the user is raised as it is.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None


def build_head(plain: Mapping[str, Any]) -> Head:
    """Build the head with the initial weights of `seed`."""
    return _seeded(plain, "head")


def build_objective(plain: Mapping[str, Any]) -> Objective:
    """Build the objective with the initial parameters of `seed`."""
    return _seeded(plain, "objective")


def build_model(plain: Mapping[str, Any], head: Head | None = None) -> Model:
    """Build encoder and head with the initial weights of `seed`; on the meta device under `torch.device("meta")`.

    head: already built; None builds it.

    Raises:
        ConfigError: the head expects features of another width.
    """
    for width in ("image_width", "text_width"):
        expected = plain["head"].get(width)
        actual = plain["encoder"].get(width, expected)
        if expected != actual:
            raise ConfigError(f"head.{width} is {expected}, but the encoder's features have {actual}: leave it out")
    encoder = _seeded(plain, "encoder")
    return Model(encoder, head or build_head(plain))


def _seeded(plain: Mapping[str, Any], name: str) -> Any:
    """Build a part whose initial weights depend on the seed alone, not on the order of construction."""
    torch.manual_seed(plain["seed"])
    return part(plain[name])


def parameters_of(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
