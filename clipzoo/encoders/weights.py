"""Weights from elsewhere: names matched, positional embeddings resized, nothing filled by half."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.encoders.base import Tower
from clipzoo.errors import ConfigError, number_of

# Positional and token embeddings of another size.


POSITIONAL = re.compile(r"(^|[._])pos(itions?|itional)?([._]|$)")
TOKENS = re.compile(r"(token|word)_embeddings?\.weight$")
MOST_PREFIXES = 16
"""Largest number of class and register tokens before the grid of patches."""


def resized(name: str, value: Tensor, target: Tensor, is_image: bool, vocabulary: int | None) -> Tensor | None:
    """Return `value` in the shape of `target`, None if only positional and token embeddings may be resized.

    Image positions [..., n, w] are interpolated as a grid (bicubic, antialiased), class and register tokens kept.
    Text positions [L, w] are cut, or interpolated where the target has more.
    vocabulary: number of token embeddings of the text tower, without those of distinct pads; None if it has none.
    """
    if value.ndim != target.ndim or value.shape[-1] != target.shape[-1] or value.ndim < 2:
        return None
    if POSITIONAL.search(name):
        return _grid(value, target) if is_image else _sequence(value, target)
    if TOKENS.search(name) and vocabulary is not None and min(len(value), len(target)) >= vocabulary:
        rows = min(len(value), len(target))
        return torch.cat([value[:rows].to(target), target[rows:]])
    return None


def _sequence(value: Tensor, target: Tensor) -> Tensor | None:
    """[..., L, w] -> [..., L', w]. Fewer positions: the first ones keep their meaning."""
    length, width = target.shape[-2:]
    if value.shape[-2] >= length:
        return value[..., :length, :]
    lines = value.float().reshape(-1, *value.shape[-2:]).mT  # [k, w, L]
    stretched = functional.interpolate(lines, size=length, mode="linear")
    return stretched.mT.reshape(*value.shape[:-2], length, width)


def _grid(value: Tensor, target: Tensor) -> Tensor | None:
    """[..., p + g^2, w] -> [..., p + g'^2, w] with the same p; None if the numbers are not of this form."""
    before, after = value.shape[-2], target.shape[-2]
    prefixes = (p for p in range(min(before, after, MOST_PREFIXES)) if _is_square(before - p) and _is_square(after - p))
    prefix = next(prefixes, None)
    if prefix is None:
        return None
    old, new = math.isqrt(before - prefix), math.isqrt(after - prefix)
    grid = value[..., prefix:, :].float().reshape(-1, old, old, value.shape[-1]).permute(0, 3, 1, 2)
    stretched = functional.interpolate(grid, size=(new, new), mode="bicubic", antialias=True, align_corners=False)
    positions = stretched.permute(0, 2, 3, 1).reshape(*value.shape[:-2], new * new, value.shape[-1])
    return torch.cat([value[..., :prefix, :].float(), positions], dim=-2)


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


# Fill a tower with weights whose names have another prefix: `visual.trunk.` or `encoder.image_tower.trunk.`.


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
