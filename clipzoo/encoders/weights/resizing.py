"""Positional and token embeddings of another size."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor
from torch.nn import functional

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
