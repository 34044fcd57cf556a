"""Read weights by name, as tensors by the names that their own library gives them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipzoo.api import open_clip
from clipzoo.api.initial.heads import COUNTERPARTS
from clipzoo.api.loading import PAIR, load
from clipzoo.errors import ConfigError
from clipzoo.io.weights import (
    FORMS_ON_DISK,
    from_hub,
    is_checkpoint,
    is_sharded,
    read_tensors,
    registry_of,
    run_of,
    weights_file,
)
from clipzoo.training import checkpoint_files

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes of all names in checkpoints of models under DistributedDataParallel and torch.compile."""


@dataclass(frozen=True)
class Source:
    """Tensors by name. config: of the model in clipzoo's form; None if unknown."""

    state: Mapping[str, Tensor]
    config: Mapping[str, Any] | None = None


def read_source(name: str, key: str, tower: nn.Module | None, trust: Collection[str] = ()) -> Source:
    """Read the weights that `key=name` gives.

    tower: whose pretrained weights `timm` and `huggingface` mean where no name follows. trust: as in `clipzoo.load`.

    Raises:
        ConfigError: there are no such weights, or they hold other objects than tensors.
    """
    try:
        if registry_of(name) is None:
            return _from_disk(name, key, trust)
        place = name.partition(":")[2].removeprefix("local-dir:") or name
        with from_hub(place, f"{key}={name} cannot be loaded", f"Without a network, give {FORMS_ON_DISK}"):
            return _from_registry(name, key, tower)
    except ConfigError as error:
        raise ConfigError(str(error) if f"{key}=" in str(error) else f"{key}={name}: {error}") from error


def _from_disk(name: str, key: str, trust: Collection[str]) -> Source:
    path = weights_file(name, key)
    if is_sharded(path) or (is_checkpoint(path) and (run_of(path) / "config.yaml").exists()):
        model = load(path, trust=tuple(trust))
        objective = checkpoint_files.read(path, without=("optimizer", "model")).get("objective", {})
        learned = {
            f"objective.{name}": value for name, value in objective.items() if f"objective.{name}" in COUNTERPARTS
        }
        return Source(model.state_dict() | learned, model.config)
    return Source(_from_file(path))


def _from_file(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a .safetensors file, or of a .pt file of weights and plain values, such as a checkpoint of
    open_clip's trainer. Prefixes that DistributedDataParallel and torch.compile add to all names are removed."""
    content = read_tensors(path)
    for wrapper in ("state_dict", "model"):
        if isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    state = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    while prefix := next(
        (prefix for prefix in WRAPPERS if state and all(name.startswith(prefix) for name in state)), None
    ):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _from_registry(name: str, key: str, tower: nn.Module | None) -> Source:
    registry, rest = registry_of(name), name.partition(":")[2]
    if registry == "open_clip":
        return _from_open_clip(rest, name, key)
    if registry == "timm":
        return _from_timm(rest or _timm_name(tower, key))
    return _from_transformers(rest or _transformers_name(tower, key))


def _from_open_clip(rest: str, name: str, key: str) -> Source:
    if rest.startswith(("local-dir:", "hf-hub:")):
        model, tag = rest, None
    else:
        model, _, tag = rest.partition("/")
        if not tag:
            raise ConfigError(f"{key}={name} names no weights: give open_clip:NAME/TAG or open_clip:local-dir:FOLDER")
    ours, config = open_clip.from_open_clip(model, tag)
    state = ours.state_dict()
    if PAIR in config:
        state["logit_bias"] = torch.tensor(config[PAIR]["bias"])
    return Source(state, config)


def _from_timm(name: str) -> Source:
    from clipzoo.encoders.timm_trunks import timm_trunk

    return Source(timm_trunk(name, None, pretrained=True, options={}).state_dict())


def _from_transformers(name: str) -> Source:
    from clipzoo.encoders.huggingface import pretrained_model

    model, missing = pretrained_model("AutoModel", name)
    return Source({name: value for name, value in model.state_dict().items() if name not in missing})


def _timm_name(tower: nn.Module | None, key: str) -> str:
    settings = getattr(getattr(tower, "trunk", None), "pretrained_cfg", None)
    if not settings:
        raise ConfigError(f"{key}=timm: this tower is not from timm: give timm:NAME, or another encoder/image")
    return ".".join(filter(None, (settings["architecture"], settings.get("tag"))))


def _transformers_name(tower: nn.Module | None, key: str) -> str:
    name = getattr(getattr(getattr(tower, "trunk", None), "config", None), "name_or_path", None)
    if not name:
        raise ConfigError(f"{key}=huggingface: this tower has no name on the hub: give huggingface:NAME")
    return str(name)
