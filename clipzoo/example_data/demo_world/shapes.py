"""Signed distances to the outlines of shapes, negative inside, in units of the shape's radius.

Arguments are coordinates [h, w] in the same units: u points right, v points down, and the centre is (0, 0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _box(u: Array, v: Array, half_width: float, half_height: float) -> Array:
    return np.maximum(np.abs(u) - half_width, np.abs(v) - half_height)


def _star(u: Array, v: Array) -> Array:
    """Five points: the plane is folded onto the sector between a point and the adjacent notch."""
    sector = np.float32(np.pi / 5)
    angle = np.abs((np.arctan2(u, -v) + sector) % (2 * sector) - sector)
    radius = np.hypot(u, v)
    notch = 0.44 * np.array([np.cos(sector), np.sin(sector)], np.float32)
    edge = notch - np.array([1, 0], np.float32)
    normal = np.array([edge[1], -edge[0]], np.float32) / np.hypot(*edge)
    return (radius * np.cos(angle) - 1) * normal[0] + radius * np.sin(angle) * normal[1]


def _heart(u: Array, v: Array) -> Array:
    """A square standing on its corner, with a half disc on each of the upper sides."""
    half = 0.74
    side = np.abs(u)
    lower = (side + np.abs(v - 0.16) - half) * 0.7071
    lobes = np.hypot(side - half / 2, v - 0.16 + half / 2) - half * 0.7071
    return np.minimum(lower, lobes)


def _arrow(u: Array, v: Array) -> Array:
    """An upward arrow: a head over a shaft."""
    head = np.maximum(0.76 * np.abs(u) + 0.65 * (-v - 0.95), v - 0.05)
    return np.minimum(head, _box(u, v - 0.45, 0.27, 0.5))


DISTANCES: dict[str, Callable[[Array, Array], Array]] = {
    "circle": lambda u, v: np.hypot(u, v) - 0.9,
    "square": lambda u, v: _box(u, v, 0.76, 0.76),
    "triangle": lambda u, v: np.maximum(0.866 * np.abs(u) - 0.5 * (v - 0.1), v - 0.1) - 0.5,
    "star": _star,
    "heart": _heart,
    "cross": lambda u, v: np.minimum(_box(u, v, 0.3, 0.92), _box(u, v, 0.92, 0.3)),
    "ring": lambda u, v: np.abs(np.hypot(u, v) - 0.66) - 0.26,
    "crescent": lambda u, v: np.maximum(np.hypot(u + 0.1, v) - 0.92, 0.74 - np.hypot(u - 0.36, v)),
    "diamond": lambda u, v: (np.abs(u) / 0.62 + np.abs(v) - 1) * 0.527,
    "arrow": _arrow,
}
