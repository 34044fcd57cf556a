"""Fill a tower with the weights of another model: match names under another prefix, resize positional embeddings.

Either all tensors of a tower are filled or none.
"""

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
from clipzoo.errors import ConfigError, first_names, number_of

POSITIONAL = re.compile(r"(^|[._])pos(itions?|itional)?([._]|$)")
TOKENS = re.compile(r"(token|word)_embeddings?\.weight$")
MOST_PREFIXES = 16
"""Largest number of class and register tokens before the grid of patches."""
HINTS = {"image": ("image", "visual", "vision"), "text": ("text",)}
"""Parts of a prefix that decide if both towers have the same names."""
Outcome = Literal["loaded", "resized", "kept", "left out"]


@dataclass(frozen=True)
class Row:
    """How one tensor was initialised. kept: the tower keeps its value. left out: the tower has no such tensor."""

    part: str
    outcome: Outcome
    tensor: str = ""
    shape: tuple[int, ...] = ()
    source: str = ""
    source_shape: tuple[int, ...] = ()


def fill_tower(
    part: Literal["image", "text"], tower: nn.Module, source: Mapping[str, Tensor], key: str, vocabulary: int | None
) -> list[Row]:
    """Copy every tensor of a tower from `source`, in place. key: for messages. vocabulary: see `resized`.

    Raises ConfigError, and copies nothing, if the source lacks a tensor of the tower or has it in another shape.
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
        if (origin := names.get(name)) is None:
            rows.append(Row(part, "kept", name, tuple(target.shape)))
            continue
        value = source[origin]
        fits = value.shape == target.shape
        fitted = value if fits else resized(name, value, target, part == "image", vocabulary)
        if fitted is None:
            wrong.append(f"{name} {list(value.shape)} instead of {list(target.shape)}")
            continue
        values[name] = fitted
        rows.append(Row(part, "loaded" if fits else "resized", name, tuple(target.shape), origin, tuple(value.shape)))

    # Every floating-point tensor needs a source of a fitting shape.
    needed = [name for name, value in targets.items() if value.is_floating_point()]
    lacking = [name for name in needed if name not in names]
    kind = f"the {part} tower ({type(tower).__name__})"
    if len(lacking) == len(needed):
        raise ConfigError(
            f"{key} holds no weights of {kind}: it has {first_names(list(source))}, not {first_names(needed)}"
        )
    faults = []
    if lacking:
        faults.append(f"it lacks {len(lacking)} of {number_of(len(needed), 'tensor')} ({first_names(lacking)})")
    if wrong:
        faults.append(f"{len(wrong)} have another shape ({first_names(wrong)})")
    if faults:
        raise ConfigError(f"{key} does not fit {kind}: {'; '.join(faults)}. Choose the encoder that has these weights")

    with torch.no_grad():
        for name, value in values.items():
            targets[name].copy_(value)
    return rows


def _correspondence(targets: Iterable[str], source: Mapping[str, Tensor], hints: Sequence[str]) -> dict[str, str]:
    """Return the source's name for each name of the tower; names without a source are left out.

    The tower's names lose their common prefix, and the source's prefix is the one under which most names are found.
    """
    common = common_prefix(targets)
    names_by_suffix = {name.removeprefix(common): name for name in targets}
    votes: Counter[str] = Counter()
    for name in source:
        parts = name.split(".")
        for start in range(len(parts)):
            suffix = ".".join(parts[start:])
            if suffix in names_by_suffix:
                votes[name.removesuffix(suffix)] += 1
    if not votes:
        return {}
    prefix = max(votes, key=lambda prefix: (votes[prefix], any(hint in prefix for hint in hints), -len(prefix)))
    return {name: prefix + suffix for suffix, name in names_by_suffix.items() if prefix + suffix in source}


def common_prefix(names: Iterable[str]) -> str:
    """Return the common prefix of dotted names, with its last dot."""
    common = os.path.commonprefix([f"{name.rpartition('.')[0]}." for name in names])
    return common[: common.rfind(".") + 1]


def resized(name: str, value: Tensor, target: Tensor, is_image: bool, vocabulary: int | None) -> Tensor | None:
    """Return a positional or token embedding in the shape of `target`; None for other tensors and unsuitable shapes.

    Image positions [..., n, w] are interpolated as a grid (bicubic, antialiased), class and register tokens kept.
    Text positions [L, w] are cut, because the first ones keep their meaning, or interpolated where the target has more.
    vocabulary: number of token embeddings of the text tower, without those of distinct pads; None if it has none.
    """
    if value.ndim != target.ndim or value.shape[-1] != target.shape[-1] or value.ndim < 2:
        return None
    *leading, before, width = value.shape
    after = target.shape[-2]
    if not POSITIONAL.search(name):
        if TOKENS.search(name) and vocabulary is not None and (rows := min(len(value), len(target))) >= vocabulary:
            return torch.cat([value[:rows].to(target), target[rows:]])
        return None
    if not is_image:
        if before >= after:
            return value[..., :after, :]
        lines = value.float().reshape(-1, before, width).mT  # [k, w, L]
        return functional.interpolate(lines, size=after, mode="linear").mT.reshape(*leading, after, width)

    # [..., p + g^2, w] -> [..., p + g'^2, w] with the same p, the smallest that leaves two squares.
    for prefix in range(min(before, after, MOST_PREFIXES)):
        old, new = math.isqrt(before - prefix), math.isqrt(after - prefix)
        if old**2 == before - prefix and new**2 == after - prefix:
            grid = value[..., prefix:, :].float().reshape(-1, old, old, width).permute(0, 3, 1, 2)
            stretched = functional.interpolate(grid, (new, new), mode="bicubic", antialias=True, align_corners=False)
            positions = stretched.permute(0, 2, 3, 1).reshape(*leading, new * new, width)
            return torch.cat([value[..., :prefix, :].float(), positions], dim=-2)
    return None
