"""Fill a tower with weights whose names have another prefix: `visual.trunk.` or `encoder.image_tower.trunk.`."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from clipzoo.encoders.base import Tower
from clipzoo.encoders.weights.resizing import resized
from clipzoo.errors import ConfigError, number_of

Outcome = Literal["loaded", "resized", "kept", "left out"]
HINTS = {"image": ("image", "visual", "vision"), "text": ("text",)}
"""Parts of a prefix that decide where both towers have the same names."""
MOST_NAMES = 4
"""Names that a message lists."""


@dataclass(frozen=True)
class Row:
    """How one tensor was initialised. kept: the tower's own value stays. left out: the tower has no such tensor."""

    part: str
    outcome: Outcome
    tensor: str = ""
    shape: tuple[int, ...] = ()
    source: str = ""
    source_shape: tuple[int, ...] = ()


def fill_tower(
    part: Literal["image", "text"], tower: nn.Module, source: Mapping[str, Tensor], key: str, vocabulary: int | None
) -> list[Row]:
    """Copy every tensor of a tower from `source`, in place.

    key: of the configuration, for messages. vocabulary: see `resized`.

    Raises:
        ConfigError: the source lacks a tensor of the tower, or has it in another shape; nothing has been copied.
    """
    targets = tower.state_dict()
    names = _correspondence(targets, source, HINTS[part])
    if isinstance(tower, Tower):
        for ours, theirs in tower.names_elsewhere.items():
            renamed = {re.sub(f"^{re.escape(ours)}", theirs, name): name for name in targets}
            elsewhere = _correspondence(renamed, source, HINTS[part])
            names = max(names, {renamed[name]: origin for name, origin in elsewhere.items()}, key=len)
    values: dict[str, Tensor] = {}
    rows, wrong = [], []
    for name, target in targets.items():
        origin = names.get(name)
        if origin is None:
            rows.append(Row(part, "kept", name, tuple(target.shape)))
            continue
        value = source[origin]
        fits = value.shape == target.shape
        fitted = value if fits else resized(name, value, target, part == "image", vocabulary)
        if fitted is None:
            wrong.append(f"{name} {list(value.shape)} instead of {list(target.shape)}")
            continue
        values[name] = fitted
        outcome: Outcome = "loaded" if fits else "resized"
        rows.append(Row(part, outcome, name, tuple(target.shape), origin, tuple(value.shape)))
    _require_all(part, tower, targets, names, wrong, source, key)
    with torch.no_grad():
        for name, value in values.items():
            targets[name].copy_(value)
    return rows


def _correspondence(targets: Iterable[str], source: Mapping[str, Tensor], hints: Sequence[str]) -> dict[str, str]:
    """Return the source's name for each name of the tower; those without one are left out.

    The tower's names lose their common prefix, and the source's prefix is the one under which most names are found.
    """
    common = common_prefix(targets)
    short = {name.removeprefix(common): name for name in targets}
    votes: Counter[str] = Counter()
    for name in source:
        parts = name.split(".")
        for start in range(len(parts)):
            suffix = ".".join(parts[start:])
            if suffix in short:
                votes[name.removesuffix(suffix)] += 1
    if not votes:
        return {}
    prefix = max(votes, key=lambda prefix: (votes[prefix], any(hint in prefix for hint in hints), -len(prefix)))
    return {name: prefix + suffix for suffix, name in short.items() if prefix + suffix in source}


def _require_all(
    part: str,
    tower: nn.Module,
    targets: Mapping[str, Tensor],
    names: Mapping[str, str],
    wrong: Sequence[str],
    source: Mapping[str, Tensor],
    key: str,
) -> None:
    """Raise ConfigError unless every floating-point tensor of the tower has a source of a fitting shape."""
    needed = [name for name, value in targets.items() if value.is_floating_point()]
    lacking = [name for name in needed if name not in names]
    kind = f"the {part} tower ({type(tower).__name__})"
    if len(lacking) == len(needed):
        raise ConfigError(f"{key} holds no weights of {kind}: it has {shown(list(source))}, not {shown(needed)}")
    faults = []
    if lacking:
        faults.append(f"it lacks {len(lacking)} of {number_of(len(needed), 'tensor')} ({shown(lacking)})")
    if wrong:
        faults.append(f"{len(wrong)} have another shape ({shown(wrong)})")
    if faults:
        raise ConfigError(f"{key} does not fit {kind}: {'; '.join(faults)}. Choose the encoder that has these weights")


def common_prefix(names: Iterable[str]) -> str:
    """Return the common prefix of dotted names, with its last dot."""
    common = os.path.commonprefix([f"{name.rpartition('.')[0]}." for name in names])
    return common[: common.rfind(".") + 1]


def shown(names: Sequence[str]) -> str:
    """Return the first names for a message, and the number of the others."""
    more = f", and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
