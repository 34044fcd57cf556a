"""Fill a head and an objective with those of another run, or with the projections and scalars of a CLIP model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from clipzoo.encoders.weights.matching import Row
from clipzoo.errors import ConfigError

_IMAGE = ("visual.head.proj", "visual.head.mlp.fc2", "visual.attnpool.c_proj", "visual.trunk.head", "visual.trunk.fc",
          "visual.trunk.head.fc", "visual_projection")  # fmt: skip
_TEXT = ("text.text_projection", "text.proj", "text.proj.2", "text_projection")
COUNTERPARTS = {
    "head.image_projection": ("visual.proj", *(f"{name}.weight" for name in _IMAGE)),
    "head.text_projection": ("text_projection", "text.text_projection", *(f"{name}.weight" for name in _TEXT)),
    "head.image_bias": tuple(f"{name}.bias" for name in _IMAGE),
    "head.text_bias": tuple(f"{name}.bias" for name in _TEXT),
    "head.log_scale": ("logit_scale", "objective.scale.log_scale"),
    "objective.scale.log_scale": ("logit_scale", "head.log_scale"),
    "objective.bias": ("logit_bias",),
}
"""Our tensor -> its names elsewhere, those of open_clip and transformers first. "....weight" of a linear map is
transposed."""
BIASES = ("head.image_bias", "head.text_bias")
PROJECTIONS = ("head.image_projection", "head.text_projection")


def fill_head(head: nn.Module, source: Mapping[str, Tensor], place: str, is_required: bool) -> list[Row]:
    """Copy all tensors of the head; none if the source has none of them. place: key and value, for the message.

    Values that the configuration fixes, such as the temperature of head=cosine, stay as they are.

    Raises:
        ConfigError: the source lacks a tensor of the head, has another shape or biases that the head lacks; or it has
            no tensor of the head and `is_required`.
    """
    targets = {f"head.{name}": value for name, value in head.state_dict().items()}
    fixed = {f"head.{name}" for name, parameter in head.named_parameters() if not parameter.requires_grad}
    values = {name: found for name in targets if (found := _find(name, source))}
    faults, remedies = [], []
    for name, target in targets.items():
        short = name.removeprefix("head.")
        # A bias that the source lacks is zero, as that of a new head is.
        if name not in values and name not in fixed and not (name in BIASES and not target.any()):
            faults.append(f"it has no {short}")
            remedies += ["+head.image_projection=false"] if name == PROJECTIONS[0] and PROJECTIONS[1] in values else []
        elif name in values and (value := values[name][1]).shape != target.shape:
            faults.append(f"{short} is {list(value.shape)} instead of {list(target.shape)}")
            if name in PROJECTIONS and value.shape[0] == target.shape[0]:
                remedies.append(f"head.embed_width={value.shape[1]}")
    if any(name not in targets and _find(name, source) for name in BIASES):
        faults.append("its projections have a bias")
        remedies.append("+head.bias=true")
    if faults and (values or is_required):
        choice = " ".join(dict.fromkeys(remedies))
        raise ConfigError(
            f"{place} does not fit the head ({type(head).__name__}): {'; '.join(faults)}. Give "
            f"{choice + ', or ' if choice else ''}init.head=random for a head with the initial values of the seed"
        )
    return _copied("head", targets, values, fixed)


def fill_objective(objective: nn.Module, source: Mapping[str, Tensor]) -> list[Row]:
    """Copy the learned bias and scale of an objective, where the source has them."""
    learned = {f"objective.{name}": value for name, value in objective.named_parameters() if value.requires_grad}
    return _copied("objective", learned, {name: found for name in learned if (found := _find(name, source))}, set())


def is_of_head(name: str, source: Mapping[str, Tensor]) -> bool:
    """Return True if a tensor of the source belongs to its head or objective."""
    if any(other.startswith("encoder.") for other in source):
        return name.startswith(("head.", "objective."))
    return any(name in names for names in COUNTERPARTS.values())


def _copied(
    part: Literal["head", "objective"],
    targets: Mapping[str, Tensor],
    values: Mapping[str, tuple[str, Tensor]],
    fixed: Collection[str],
) -> list[Row]:
    """Copy the values in place. A fixed target takes no other value than its own."""
    rows = []
    for name, target in targets.items():
        short, shape = name.partition(".")[2], tuple(target.shape)
        origin, value = values.get(name, ("", target))
        if not origin or (name in fixed and not torch.equal(value.to(target), target)):
            rows.append(Row(part, "kept", short, shape))
            continue
        with torch.no_grad():
            target.copy_(value)
        rows.append(Row(part, "loaded", short, shape, origin, tuple(value.shape)))
    return rows


def _find(name: str, source: Mapping[str, Tensor]) -> tuple[str, Tensor] | None:
    """Return the source's name and value of one of our tensors. Scalars may be vectors of one number there."""
    for origin in (name, *COUNTERPARTS.get(name, ())):
        if origin in source:
            value = source[origin]
            transposed = origin.endswith(".weight") and name in PROJECTIONS
            return origin, value.mT if transposed else value.reshape(()) if value.numel() == 1 else value
    return None
