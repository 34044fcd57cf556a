"""Scenes of coloured, textured shapes: how they are drawn at random, rendered and described in captions."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SHAPES = ("circle", "square", "triangle", "star", "heart", "cross", "ring", "crescent", "diamond", "arrow")
TEXTURES = ("plain", "striped", "dotted", "checkered", "outlined")
COUNTS = ("one", "two", "three", "four", "five")

# Radius of a thing by the kind of its scene; a single thing has one range per size.
SINGLE_RADIUS = {"small": (0.19, 0.22), "medium": (0.27, 0.3), "large": (0.36, 0.4)}
GROUP_RADIUS = (0.13, 0.155)
PAIR_RADIUS = (0.19, 0.22)
QUADRANT_RADIUS = (0.21, 0.23)
LARGEST_TILT = math.radians(12)
_SIZES = {"small": ("small", "tiny", "little"), "medium": ("medium", "medium-sized"), "large": ("large", "big", "huge")}
_GENERIC_NOUNS = ("shape", "thing", "object")
_OPENINGS = ("{}", "{}", "{}", "a picture of {}", "an image of {}", "this picture shows {}")
_BESIDE = ("{} left of {}", "{} to the left of {}", "{1} right of {0}", "{1} to the right of {0}")
_STACKED = ("{} above {}", "{} over {}", "{1} below {0}", "{1} under {0}")
_TOGETHER = ("{} and {}", "{1} and {0}")
CONTRASTS = ("attribute", "relation", "order", "count", "negation")
Item = TypeVar("Item")
_PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (214, 32, 36),
    "orange": (250, 134, 18),
    "yellow": (248, 222, 40),
    "green": (36, 160, 56),
    "blue": (38, 76, 212),
    "purple": (126, 42, 166),
    "pink": (246, 138, 190),
    "brown": (122, 72, 34),
    "black": (22, 22, 24),
    "white": (246, 246, 246),
}
COLOURS = tuple(_PALETTE)
# Phrases for the place, colour at the top and bottom of the image, and strength of the grain.
_BACKGROUNDS = {
    "sand": (("on the sand", "on a beach"), (222, 200, 158), (200, 174, 128), 10.0),
    "grass": (("on the grass", "in a meadow"), (128, 156, 100), (92, 122, 70), 14.0),
    "sky": (("in the sky", "in front of a blue sky"), (146, 186, 222), (206, 224, 238), 4.0),
    "night": (("at night", "in the dark"), (34, 36, 64), (58, 54, 90), 4.0),
    "snow": (("in the snow", "on white snow"), (216, 222, 230), (232, 234, 238), 5.0),
    "brick": (("on a brick wall", "in front of bricks"), (166, 126, 112), (148, 108, 96), 8.0),
}
Array = NDArray[Any]


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

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom edge in shares of the image."""
        left, top = max(0.0, self.x - self.radius), max(0.0, self.y - self.radius)
        return left, top, min(1.0, self.x + self.radius), min(1.0, self.y + self.radius)


@dataclass(frozen=True)
class Scene:
    """kind: "single" (one thing), "group" (equal things) or "pair" (two different things, side by side or stacked)."""

    kind: str
    background: str
    things: tuple[Thing, ...]


def sample_scene(random: np.random.Generator, kind: str | None = None, **fixed: str) -> Scene:
    """Draw a scene. fixed: shape, colour or texture of all things, or `count` (a word) of a group."""
    kind = kind or str(random.choice(["single", "group", "pair"], p=[0.6, 0.2, 0.2]))
    background = _choose(random, [*_BACKGROUNDS])
    if kind == "single":
        size = _choose(random, [*SINGLE_RADIUS])
        radius = random.uniform(*SINGLE_RADIUS[size])
        things = [_thing(random, fixed, size, random.uniform(radius, 1 - radius, 2), radius)]
    elif kind == "group":
        # One to five things that differ only in place and tilt; at least two if the count is not fixed.
        count = COUNTS.index(fixed["count"]) + 1 if "count" in fixed else int(random.integers(2, len(COUNTS) + 1))
        radius = random.uniform(*GROUP_RADIUS)
        # Centres at least 2.1 radii apart; start again if the next position does not fit.
        centres: list[tuple[float, float]] = []
        while len(centres) < count:
            centres = []
            for x, y in random.uniform(radius, 1 - radius, (10 * count, 2)).tolist():
                if len(centres) < count and all(math.hypot(x - a, y - b) >= 2.1 * radius for a, b in centres):
                    centres.append((x, y))
        first = _thing(random, fixed, "small", centres[0], radius)
        things = [first, *(replace(first, x=x, y=y, tilt=_tilt(random)) for x, y in centres[1:])]
    else:
        # Two things that differ in shape and colour; the first is left of or above the second.
        radius = random.uniform(*PAIR_RADIUS)
        along = random.uniform(radius, 0.5 - radius, 2) + np.array([0.0, 0.5])
        across = 0.5 + random.uniform(-1, 1, 2) * (0.3 - radius)
        places = np.stack((along, across) if random.random() >= 0.5 else (across, along), axis=1)
        first, second = (_thing(random, fixed, "small", place, radius) for place in places)
        while second.shape == first.shape or second.colour == first.colour:
            second = _thing(random, {}, "small", places[1], radius)
        things = [first, second]
    return Scene(kind, background, tuple(things))


def sample_quadrants(random: np.random.Generator, objects: Sequence[tuple[str, str]]) -> Scene:
    """Draw a scene of at most four plain things with given shapes and colours, in different quadrants, on snow."""
    quadrants = random.permutation(4)[: len(objects)]
    things = []
    for (shape, colour), quadrant in zip(objects, quadrants, strict=True):
        radius = random.uniform(*QUADRANT_RADIUS)
        y, x = np.array(divmod(int(quadrant), 2)) / 2 + 0.25 + random.uniform(-1, 1, 2) * (0.25 - radius)
        things.append(_thing(random, {"shape": shape, "colour": colour, "texture": "plain"}, "small", (x, y), radius))
    return Scene("pair" if len(things) == 2 else "group", "snow", tuple(things))


def _thing(
    random: np.random.Generator, fixed: dict[str, str], size: str, place: Iterable[float], radius: float
) -> Thing:
    shape = fixed.get("shape") or _choose(random, SHAPES)
    colour = fixed.get("colour") or _choose(random, COLOURS)
    texture = fixed.get("texture") or _choose(random, TEXTURES)
    x, y = map(float, place)
    return Thing(shape, colour, texture, size, x, y, float(radius), _tilt(random))


def _tilt(random: np.random.Generator) -> float:
    return float(random.uniform(-LARGEST_TILT, LARGEST_TILT))


def _choose(random: np.random.Generator, items: Sequence[Item]) -> Item:
    return items[int(random.integers(len(items)))]


def write_caption(scene: Scene, random: np.random.Generator, detail: float) -> str:
    """Return a caption of the scene.

    detail: factor on the probability that an attribute is mentioned; 1 in training.
    """
    first, *others = scene.things

    def mentions(weight: float) -> bool:
        return bool(random.random() < min(1.0, weight * detail))

    if scene.kind == "single":
        number = "one" if random.random() < 0.2 else "a"
        phrase = _noun_phrase(random, first, number, mentions, size=mentions(0.2))
        if mentions(0.2):
            # The third of the image, in each direction, that holds the thing.
            down = ("top", "middle", "bottom")[min(2, int(3 * first.y))]
            across = ("left", "centre", "right")[min(2, int(3 * first.x))]
            if down == "middle":
                place = "in the middle" if across == "centre" else f"on the {across}"
            else:
                place = f"at the {down}" if across == "centre" else f"in the {down} {across}"
            phrase = f"{phrase} {place}"
    elif scene.kind == "group":
        number = COUNTS[len(others)]
        phrase = _noun_phrase(random, first, number, mentions, size=False)
        if random.random() < 0.15:
            phrase = f"a group of {phrase}"
    else:
        number = "a"
        is_horizontal = abs(others[0].x - first.x) > abs(others[0].y - first.y)
        relations = (_BESIDE if is_horizontal else _STACKED) if mentions(0.85) else _TOGETHER
        relation = _choose(random, relations)
        phrase = relation.format(*(_noun_phrase(random, thing, "a", mentions, size=False) for thing in scene.things))
    if mentions(0.25):
        place = _choose(random, _BACKGROUNDS[scene.background][0])
        phrase = f"{place}, {phrase}" if random.random() < 0.2 else f"{phrase} {place}"
    if phrase.split()[0] in ("on", "in", "at", "under"):
        return phrase
    there = "there is {}" if number in ("a", "one") else "there are {}"
    return _choose(random, (*_OPENINGS, there)).format(phrase)


def write_captions(scene: Scene, random: np.random.Generator, detail: float, count: int) -> list[str]:
    captions: dict[str, None] = {}
    while len(captions) < count:
        captions[write_caption(scene, random, detail)] = None
    return list(captions)


def write_hard_negatives(scene: Scene, random: np.random.Generator, count: int) -> list[str]:
    """Return `count` different captions that are wrong in one respect.

    The colours or shapes of a pair are swapped, or the things of a single scene or group, or the first thing of a pair,
    have a colour or shape that nothing in the scene has. The captions mention all shapes and colours.
    """
    captions: dict[str, None] = {}
    while len(captions) < count:
        attribute, values = (("colour", COLOURS), ("shape", SHAPES))[int(random.integers(2))]
        present = [getattr(thing, attribute) for thing in scene.things]
        changed = present[::-1]
        if scene.kind != "pair" or random.random() < 0.5:
            other = _choose(random, [value for value in values if value not in present])
            changed = [other, present[1]] if scene.kind == "pair" else [other] * len(present)
        things = (replace(thing, **{attribute: value}) for thing, value in zip(scene.things, changed, strict=True))
        captions[write_caption(replace(scene, things=tuple(things)), random, detail=2.0)] = None
    return list(captions)


def sample_contrast(random: np.random.Generator, category: str) -> tuple[list[Scene], tuple[str, str]]:
    """Draw scenes and two captions that differ in only one respect; caption k is true of scene k and of no other.

    category: one of `CONTRASTS`. The things of a pair have each other's colour (attribute) or place (relation), the
    number of equal things differs (count), or a word negates a colour (negation). The second caption has no scene if it
    is the first one in a wrong order of words (order). The captions of attribute, relation and order have the same
    words: a bag of words cannot tell them apart.
    """
    scene = sample_scene(random, {"count": "group", "negation": "single"}.get(category, "pair"))
    first, second = scene.things[0], scene.things[-1]
    names = [named(thing.shape, thing.colour) for thing in (first, second)]
    things: tuple[Thing, ...] = (replace(first, x=second.x, y=second.y), replace(second, x=first.x, y=first.y))
    is_horizontal = abs(second.x - first.x) > abs(second.y - first.y)
    relation = _choose(random, _BESIDE if is_horizontal else _STACKED)
    texts = relation.format(*names), relation.format(*names[::-1])
    if category == "order":
        while texts[1] in (texts[0], relation.format(*names[::-1])):
            texts = texts[0], " ".join(random.permutation(texts[0].split()))
        return [scene], texts
    if category == "attribute":
        things = replace(first, colour=second.colour), replace(second, colour=first.colour)
        texts = " and ".join(names), " and ".join(named(thing.shape, thing.colour) for thing in things)
    elif category == "count":
        things = scene.things[1:]
        plural = f"{first.colour} {first.shape}{'es' if first.shape.endswith('s') else 's'}"
        single = f"one {first.colour} {first.shape}"
        texts = f"{COUNTS[len(things)]} {plural}", f"{COUNTS[len(things) - 1]} {plural}" if len(things) > 1 else single
    elif category == "negation":
        things = (replace(first, colour=_choose(random, [colour for colour in COLOURS if colour != first.colour])),)
        texts = f"{named(first.shape)} that is {first.colour}", f"{named(first.shape)} that is not {first.colour}"
    return [scene, replace(scene, things=things)], texts


def named(*words: str) -> str:
    """Return the name of a thing from its shape and attributes, such as "a red circle"."""
    return f"{'an' if words[-1][0] in 'aeiou' else 'a'} {' '.join(words[::-1])}"


def _noun_phrase(
    random: np.random.Generator, thing: Thing, number: str, mentions: Callable[[float], bool], size: bool
) -> str:
    """Mention at least one of colour, texture and shape. mentions: draws whether something of a weight is mentioned."""
    plural = number not in ("a", "one")
    colour, texture, shape = mentions(0.5), mentions(0.3), mentions(0.95)
    if not (colour or texture or shape):
        colour, texture, shape = np.eye(3, dtype=bool)[random.integers(3)]
    if number == "a" and colour and not (texture or shape or size) and random.random() < 0.5:
        return f"something {thing.colour}"
    noun = thing.shape if shape else _choose(random, _GENERIC_NOUNS)
    if plural:
        noun += "es" if noun.endswith("s") else "s"
    after = ""
    if colour and random.random() < 0.15:
        colour, after = False, f" in {thing.colour}"
    elif texture and random.random() < 0.15:
        texture, after = False, f" that {'are' if plural else 'is'} {thing.texture}"
    words = [thing.texture] * bool(texture) + [thing.colour] * bool(colour)
    if len(words) == 2 and random.random() < 0.3:
        words = words[::-1]
    if size:
        words.insert(0, _choose(random, _SIZES[thing.size]))
    words.append(noun)
    article = "an" if number == "a" and words[0][0] in "aeiou" else number
    return f"{article} {' '.join(words)}{after}"


def render(scene: Scene, size: int, random: np.random.Generator) -> Array:
    """Return the image, uint8 [size, size, 3]. random: draws grain, exact hues and the phase of textures."""
    # A vertical gradient with grain and the marks of the place.
    _, top, bottom, strength = _BACKGROUNDS[scene.background]
    height = np.linspace(0, 1, size, dtype=np.float32)[:, None, None]
    canvas = np.array(top, np.float32) * (1 - height) + np.array(bottom, np.float32) * height
    canvas = canvas + random.normal(0, 6, 3).astype(np.float32)
    canvas = canvas + random.standard_normal((size, size, 1), np.float32) * strength
    if scene.background == "night":
        rows, columns = random.integers(0, size, (2, max(4, size * size // 260)))
        canvas[rows, columns] = 225
    elif scene.background == "brick":
        # Joints of a wall of about seven courses.
        course, joint = max(6, size // 7), max(1, size // 60)
        y, x = np.mgrid[:size, :size] + random.integers(0, course, 2)[:, None, None]
        shifted = x + (y // course % 2) * course
        canvas[(y % course < joint) | (shifted % (2 * course) < joint)] += 46
    elif scene.background == "grass":
        blades = random.standard_normal((size // 8 + 1, size), np.float32) * 10
        canvas += np.repeat(blades, 8, axis=0)[:size, :, None]
    tint = random.normal(0, 7, 3)
    for thing in scene.things:
        _paint(canvas, thing, size, tint, random)
    return np.clip(canvas, 0, 255).astype(np.uint8)


def _paint(canvas: Array, thing: Thing, size: int, tint: Array, random: np.random.Generator) -> None:
    """Blend a thing into the canvas, with a rim that contrasts with the background."""
    reach = thing.radius * 1.12 + 2 / size
    columns, rows = (
        slice(max(0, int((centre - reach) * size)), min(size, int((centre + reach) * size) + 1))
        for centre in (thing.x, thing.y)
    )
    y, x = np.mgrid[rows, columns].astype(np.float32)
    x, y = ((x + 0.5) / size - thing.x) / thing.radius, ((y + 0.5) / size - thing.y) / thing.radius
    cosine, sine = np.cos(np.float32(thing.tilt)), np.sin(np.float32(thing.tilt))
    u, v = cosine * x + sine * y, cosine * y - sine * x
    pixels = thing.radius * size
    distance = DISTANCES[thing.shape](u, v)

    def coverage(distance: Array) -> Array:
        """Return the fraction of a pixel that is inside, from the distance of its centre to the edge."""
        return np.clip(0.5 - distance * pixels, 0, 1)

    def wave(turns: Array) -> Array:
        """Return a square wave of period 1 with soft edges."""
        return np.clip(0.5 + np.sin(2 * np.pi * turns) * pixels * 0.12, 0, 1)

    # Amount of the second shade, [h, w] in [0, 1].
    amount, phase, pitch = np.zeros_like(u), random.uniform(0, 1, 2).astype(np.float32), 0.5
    if thing.texture == "striped":
        amount = wave((u + v) * 1.5 + phase[0])
    elif thing.texture == "dotted":
        across, down = (((w / pitch + shift) % 1 - 0.5) * pitch for w, shift in zip((u, v), phase, strict=True))
        amount = coverage(np.hypot(across, down) - 0.155)
    elif thing.texture == "checkered":
        a, b = wave(u * 1.3 + phase[0]), wave(v * 1.3 + phase[1])
        amount = a + b - 2 * a * b
    elif thing.texture == "outlined":
        amount = 1 - coverage(distance + 0.15)
    main = np.array(_PALETTE[thing.colour], np.float32) + tint.astype(np.float32)
    # The second shade of a texture is a shade of the same colour, because captions name a single one.
    second = main * 0.45 if sum(_PALETTE[thing.colour]) > 240 else main + (255 - main) * 0.55
    paint = main + (second - main) * amount[:, :, None]

    patch = canvas[rows, columns]
    rim_shade = np.float32(40) if float(patch.mean()) > 110 else np.float32(200)
    patch += (rim_shade - patch) * (0.7 * coverage(distance - 1.6 / pixels))[:, :, None]
    patch += (paint - patch) * coverage(distance)[:, :, None]


def encode_jpeg(pixels: Array) -> bytes:
    """Encode pixels, uint8 [h, w, 3], as JPEG."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=88)
    return stream.getvalue()


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
    "arrow": lambda u, v: np.minimum(
        np.maximum(0.76 * np.abs(u) + 0.65 * (-v - 0.95), v - 0.05), _box(u, v - 0.45, 0.27, 0.5)
    ),
}
