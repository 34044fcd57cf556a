"""Tensors of our models and of transformers' models, which split and name them in two ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

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
