"""Content of a generated scene, in unit coordinates (x to the right, y down)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

SHAPES = ("circle", "square", "triangle", "star", "heart", "cross", "ring", "crescent", "diamond", "arrow")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEXTURES = ("plain", "striped", "dotted", "checkered", "outlined")
SIZES = ("small", "medium", "large")
COUNTS = ("one", "two", "three", "four", "five")
BACKGROUNDS = ("sand", "grass", "sky", "night", "snow", "brick")

# Radius of a thing by the kind of its scene; a single thing has one range per size.
SINGLE_RADIUS = {"small": (0.19, 0.22), "medium": (0.27, 0.3), "large": (0.36, 0.4)}
GROUP_RADIUS = (0.13, 0.155)
PAIR_RADIUS = (0.19, 0.22)
QUADRANT_RADIUS = (0.21, 0.23)
LARGEST_TILT = math.radians(12)


@dataclass(frozen=True)
class Thing:
    """A coloured, textured shape. x, y: centre; radius: of the enclosing circle; tilt: radians, clockwise."""

    shape: str
    colour: str
    texture: str
    size: str
    x: float
    y: float
    radius: float
    tilt: float


@dataclass(frozen=True)
class Scene:
    """kind: "single" (one thing), "group" (equal things) or "pair" (two different things, side by side or stacked)."""

    kind: str
    background: str
    things: tuple[Thing, ...]

    def facts(self) -> dict[str, object]:
        """Return the scene as plain values for JSON."""
        return asdict(self)


def sample_scene(random: np.random.Generator, kind: str | None = None, **fixed: str) -> Scene:
    """Draw a scene. fixed: shape, colour or texture of all things, or `count` (a word) of a group."""
    kind = kind or str(random.choice(["single", "group", "pair"], p=[0.6, 0.2, 0.2]))
    background = _choose(random, BACKGROUNDS)
    draw = {"single": _single, "group": _group, "pair": _pair}[kind]
    return Scene(kind, background, draw(random, fixed))


def sample_quadrants(
    random: np.random.Generator,
    objects: Sequence[tuple[str, str]],
    textures: Sequence[str] = TEXTURES,
    backgrounds: Sequence[str] = BACKGROUNDS,
) -> Scene:
    """Draw a scene of at most four things with given shapes and colours, in different quadrants of the image.

    textures, backgrounds: those that are drawn from.
    """
    quadrants = random.permutation(4)[: len(objects)]
    things = []
    for (shape, colour), quadrant in zip(objects, quadrants, strict=True):
        radius = random.uniform(*QUADRANT_RADIUS)
        y, x = np.array(divmod(int(quadrant), 2)) / 2 + 0.25 + random.uniform(-1, 1, 2) * (0.25 - radius)
        look = {"shape": shape, "colour": colour, "texture": _choose(random, tuple(textures))}
        things.append(_thing(random, look, "small", x, y, radius))
    return Scene("pair" if len(things) == 2 else "group", _choose(random, tuple(backgrounds)), tuple(things))


def _single(random: np.random.Generator, fixed: dict[str, str]) -> tuple[Thing, ...]:
    size = _choose(random, SIZES)
    radius = random.uniform(*SINGLE_RADIUS[size])
    x, y = random.uniform(radius, 1 - radius, 2)
    return (_thing(random, fixed, size, x, y, radius),)


def _group(random: np.random.Generator, fixed: dict[str, str]) -> tuple[Thing, ...]:
    """One to five things that differ only in place and tilt; at least two if the count is not fixed."""
    count = COUNTS.index(fixed["count"]) + 1 if "count" in fixed else int(random.integers(2, len(COUNTS) + 1))
    radius = random.uniform(*GROUP_RADIUS)
    centres = _separate_centres(random, count, radius)
    first = _thing(random, fixed, "small", *centres[0], radius)
    return (first, *(replace(first, x=x, y=y, tilt=_tilt(random)) for x, y in centres[1:]))


def _pair(random: np.random.Generator, fixed: dict[str, str]) -> tuple[Thing, ...]:
    """Two things that differ in shape and colour; the first is left of or above the second."""
    radius = random.uniform(*PAIR_RADIUS)
    along = random.uniform(radius, 0.5 - radius, 2) + np.array([0.0, 0.5])
    across = 0.5 + random.uniform(-1, 1, 2) * (0.3 - radius)
    places = list(zip(along, across, strict=True))
    if random.random() < 0.5:
        places = [(y, x) for x, y in places]
    first = _thing(random, fixed, "small", *places[0], radius)
    second = _thing(random, fixed, "small", *places[1], radius)
    while second.shape == first.shape or second.colour == first.colour:
        second = _thing(random, {}, "small", *places[1], radius)
    return first, second


def _separate_centres(random: np.random.Generator, count: int, radius: float) -> list[tuple[float, float]]:
    """Return `count` centres at least 2.1 radii apart; start again when there is no room for the next one."""
    while True:
        candidates = random.uniform(radius, 1 - radius, (10 * count, 2)).tolist()
        centres: list[tuple[float, float]] = []
        for x, y in candidates:
            if all(math.hypot(x - a, y - b) >= 2.1 * radius for a, b in centres):
                centres.append((x, y))
            if len(centres) == count:
                return centres


def _thing(random: np.random.Generator, fixed: dict[str, str], size: str, x: float, y: float, radius: float) -> Thing:
    return Thing(
        shape=fixed.get("shape") or _choose(random, SHAPES),
        colour=fixed.get("colour") or _choose(random, COLOURS),
        texture=fixed.get("texture") or _choose(random, TEXTURES),
        size=size,
        x=float(x),
        y=float(y),
        radius=float(radius),
        tilt=_tilt(random),
    )


def _tilt(random: np.random.Generator) -> float:
    return float(random.uniform(-LARGEST_TILT, LARGEST_TILT))


def _choose(random: np.random.Generator, words: tuple[str, ...]) -> str:
    return words[int(random.integers(len(words)))]
