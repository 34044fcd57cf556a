"""Fill a head with the weights of another run's head, or with the projections of a CLIP model of open_clip."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from clipzoo.encoders.weights.matching import Row
from clipzoo.errors import ConfigError
from clipzoo.heads.base import Head

FOREIGN = {
    "image_projection": (
        "visual.proj", "visual.head.proj.weight", "visual.attnpool.c_proj.weight", "visual_projection.weight",
    ),
    "text_projection": ("text_projection", "text.text_projection", "text.proj.weight", "text_projection.weight"),
    "log_scale": ("logit_scale",),
}  # fmt: skip
"""Our tensor -> its names in open_clip and transformers. Weights of a linear layer, "....weight", are transposed."""


BIASES = ("image_bias", "text_bias")


def fill_head(head: Head, source: Mapping[str, Tensor], place: str, is_required: bool) -> list[Row]:
    """Copy all tensors of the head, or none of them. place: key and value, for the message.

    Raises:
        ConfigError: `is_required`, and a tensor is missing or has another shape.
    """
    targets = head.state_dict()
    found = {name: _find(name, source) for name in targets}
    faults = []
    for name, target in targets.items():
        match = found[name]
        if match is None:
            faults.append(f"it has no {name}")
        elif match[1].shape != target.shape:
            faults.append(f"{name} is {list(match[1].shape)} instead of {list(target.shape)}")
    if any(f"head.{name}" in source and name not in targets for name in BIASES):
        faults.append("its projections have a bias: give +head.bias=true")
    if faults and is_required:
        raise ConfigError(f"{place} does not fit the head ({type(head).__name__}): {'; '.join(faults)}")
    rows = []
    with torch.no_grad():
        for name, target in targets.items():
            match = None if faults else found[name]
            if match is None:
                rows.append(Row("head", "kept", name, tuple(target.shape)))
                continue
            target.copy_(match[1])
            rows.append(Row("head", "loaded", name, tuple(target.shape), match[0], tuple(source[match[0]].shape)))
    return rows


def _find(name: str, source: Mapping[str, Tensor]) -> tuple[str, Tensor] | None:
    """Return the source's name and value of a tensor of the head."""
    ours = f"head.{name}"
    if ours in source:
        return ours, source[ours]
    for foreign in FOREIGN.get(name, ()):
        if foreign in source:
            value = source[foreign]
            return foreign, value.mT if foreign.endswith(".weight") else value
    return None
