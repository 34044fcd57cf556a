"""Tensors of our models and of transformers' models, which split and name them in two ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clipzoo.encoders.base import Tower
from clipzoo.model import Model

Ties = Sequence["Tie"]


@dataclass(frozen=True)
class Tie:
    """Tensors with the same numbers: ours, joined along the first dimension, are theirs, joined.

    ours, theirs: name -> number of equal parts of the joined tensor. transposed: the tensor is theirs, transposed.
    leading: ours has one more dimension, of size 1. Both are for single tensors.
    """

    ours: Mapping[str, int]
    theirs: Mapping[str, int]
    transposed: bool = False
    leading: bool = False


def tie(ours: str, theirs: str, transposed: bool = False, leading: bool = False) -> Tie:
    """Return the tie of two tensors with different names."""
    return Tie({ours: 1}, {theirs: 1}, transposed, leading)


def qkv(ours: str, theirs: str, kind: str) -> Tie:
    """Return the tie of a fused input projection of attention with transformers' three. kind: "weight" or "bias"."""
    return Tie({ours: 3}, {f"{theirs}.{letter}_proj.{kind}": 1 for letter in "qkv"})


def with_kinds(ours: str, theirs: str) -> Iterator[Tie]:
    """Yield the ties of weight and bias of two modules."""
    for kind in ("weight", "bias"):
        yield tie(f"{ours}.{kind}", f"{theirs}.{kind}")


def inside(module: str, ties: Ties) -> list[Tie]:
    """Return the ties of a module of our model from those of its tensors' names inside the module."""
    return [replace(one, ours={f"{module}.{name}": count for name, count in one.ours.items()}) for one in ties]


def layers_of(model: Model) -> tuple[int, int]:
    """Return the numbers of blocks of the image tower and of the text tower."""
    towers = model.get_submodule("encoder.image_tower"), model.get_submodule("encoder.text_tower")
    image, text = (len(tower.layers()) for tower in towers if isinstance(tower, Tower))
    return image, text


def to_theirs(ties: Ties, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors under transformers' names. Raises KeyError if one is missing."""
    named: dict[str, Tensor] = {}
    for one in ties:
        found = _divided([state[name][0] if one.leading else state[name] for name in one.ours], one.theirs)
        named |= {name: value.mT for name, value in found.items()} if one.transposed else found
    return named


def to_ours(ties: Ties, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return transformers' tensors under our names. Raises KeyError if one is missing."""
    named: dict[str, Tensor] = {}
    for one in ties:
        found = _divided([state[name].mT if one.transposed else state[name] for name in one.theirs], one.ours)
        named |= {name: value[None] for name, value in found.items()} if one.leading else found
    return named


def left_out(ties: Ties, state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of our tensors that transformers' model has no place for."""
    tied = {name for one in ties for name in one.ours}
    return sorted(name for name in state if name not in tied)


def _divided(tensors: list[Tensor], parts: Mapping[str, int]) -> dict[str, Tensor]:
    if len(tensors) == len(parts) == 1:
        return dict(zip(parts, tensors, strict=True))
    whole = torch.cat(tensors)
    unit = len(whole) // sum(parts.values())
    return dict(zip(parts, whole.split([unit * count for count in parts.values()]), strict=True))


# Facts of transformer trunks that the configurations of transformers' models state.


OWN = ("head.log_scale", "head.image_projection", "head.image_bias", "head.text_projection", "head.text_bias")
"""Tensors of the head; each format has its own place for them."""


def epsilon(trunk: nn.Module) -> float | None:
    """Return the epsilon of the layer norms; None if they have several."""
    found = {module.eps for module in trunk.modules() if isinstance(module, nn.LayerNorm)}
    return found.pop() if len(found) == 1 else None


def activation(module: nn.Module) -> str | None:
    """Return transformers' name of an activation, None if it has none."""
    names = {"QuickGELU": "quick_gelu", "GELUTanh": "gelu_pytorch_tanh", "ReLU": "relu"}
    if isinstance(module, nn.GELU):
        return "gelu_pytorch_tanh" if module.approximate == "tanh" else "gelu"
    return names.get(type(module).__name__)


def trunk_faults(what: str, trunk: nn.Module, act: nn.Module) -> list[str]:
    """Return the reasons why one epsilon and one named activation do not describe a trunk."""
    reasons = []
    if epsilon(trunk) is None:
        reasons.append(f"the layer norms of {what} have several epsilons")
    if activation(act) is None:
        reasons.append(f"the activation of {what} is {type(act).__name__}")
    return reasons


def tensor_faults(model: Model, ties: Ties) -> list[str]:
    """Return the reasons why the tensors of the towers are not those of the other model."""
    state: Mapping[str, Tensor] = model.state_dict()
    missing = [name for one in ties for name in one.ours if name not in state and name not in OWN]
    others = [name for name in left_out(ties, state) if name not in OWN]
    reasons = [f"it has {_shown(others)}"] if others else []
    return [*reasons, f"it lacks {_shown(missing)}"] if missing else reasons


def open_clip_blocks(trunk: Any) -> dict[str, Any]:
    """Return the settings of open_clip's transformer as transformers' configuration names them."""
    block = trunk.transformer.resblocks[0]
    return {
        "num_hidden_layers": len(trunk.transformer.resblocks), "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.c_fc.out_features, "hidden_act": activation(block.mlp.gelu),
        "layer_norm_eps": epsilon(trunk), "attention_dropout": 0.0,
    }  # fmt: skip


def _shown(names: list[str]) -> str:
    short = [name.removeprefix("encoder.") for name in names[:2]]
    return ", ".join(short) + (f" and {len(names) - 2} more tensors" if len(names) > 2 else "")
