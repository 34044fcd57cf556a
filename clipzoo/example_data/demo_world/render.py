"""Scenes to pixels.

Shapes are signed distances, so that edges are anti-aliased and textures follow the shape.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from PIL import Image

from clipzoo.example_data.demo_world.scene import Scene, Thing
from clipzoo.example_data.demo_world.shapes import DISTANCES, Array

_PALETTE = {
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
# Colour at the top and bottom of the image, and strength of the grain.
_BACKGROUNDS = {
    "sand": ((222, 200, 158), (200, 174, 128), 10.0),
    "grass": ((128, 156, 100), (92, 122, 70), 14.0),
    "sky": ((146, 186, 222), (206, 224, 238), 4.0),
    "night": ((34, 36, 64), (58, 54, 90), 4.0),
    "snow": ((216, 222, 230), (232, 234, 238), 5.0),
    "brick": ((166, 126, 112), (148, 108, 96), 8.0),
}
JPEG_QUALITY = 88


def render(scene: Scene, size: int, random: np.random.Generator) -> Array:
    """Return the image, uint8 [size, size, 3]. random: draws grain, exact hues and the phase of textures."""
    canvas = _background(scene.background, size, random)
    tint = random.normal(0, 7, 3)
    for thing in scene.things:
        _paint(canvas, thing, size, tint, random)
    return np.clip(canvas, 0, 255).astype(np.uint8)


def encode_jpeg(pixels: Array) -> bytes:
    """Encode pixels, uint8 [h, w, 3], as JPEG."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=JPEG_QUALITY)
    return stream.getvalue()


def _background(name: str, size: int, random: np.random.Generator) -> Array:
    """Return a vertical gradient with grain and the marks of the place, float32 [size, size, 3]."""
    top, bottom, strength = _BACKGROUNDS[name]
    height = np.linspace(0, 1, size, dtype=np.float32)[:, None, None]
    canvas = np.array(top, np.float32) * (1 - height) + np.array(bottom, np.float32) * height
    canvas = canvas + random.normal(0, 6, 3).astype(np.float32)
    grain = random.standard_normal((size, size), np.float32) * strength
    canvas = canvas + grain[:, :, None]
    if name == "night":
        rows, columns = random.integers(0, size, (2, max(4, size * size // 260)))
        canvas[rows, columns] = 225
    elif name == "brick":
        canvas[_mortar(size, random)] += 46
    elif name == "grass":
        blades = random.standard_normal((size // 8 + 1, size), np.float32) * 10
        canvas += np.repeat(blades, 8, axis=0)[:size, :, None]
    return canvas


def _mortar(size: int, random: np.random.Generator) -> Array:
    """Return the joints of a brick wall of about seven courses, bool [size, size]."""
    course, joint = max(6, size // 7), max(1, size // 60)
    y, x = np.mgrid[:size, :size] + random.integers(0, course, 2)[:, None, None]
    shifted = x + (y // course % 2) * course
    return (y % course < joint) | (shifted % (2 * course) < joint)


def _paint(canvas: Array, thing: Thing, size: int, tint: Array, random: np.random.Generator) -> None:
    """Blend a thing into the canvas, with a rim that contrasts with the background."""
    reach = thing.radius * 1.12 + 2 / size
    left, right = _span(thing.x, reach, size)
    top, bottom = _span(thing.y, reach, size)
    y, x = np.mgrid[top:bottom, left:right].astype(np.float32)
    x, y = ((x + 0.5) / size - thing.x) / thing.radius, ((y + 0.5) / size - thing.y) / thing.radius
    cosine, sine = np.cos(np.float32(thing.tilt)), np.sin(np.float32(thing.tilt))
    u, v = cosine * x + sine * y, cosine * y - sine * x
    pixels = thing.radius * size
    distance = DISTANCES[thing.shape](u, v)

    main = np.array(_PALETTE[thing.colour], np.float32) + tint.astype(np.float32)
    # The second shade of a texture is a shade of the same colour, because captions name a single one.
    second = main * 0.45 if sum(_PALETTE[thing.colour]) > 240 else main + (255 - main) * 0.55
    amount = _TEXTURES[thing.texture](u, v, distance, pixels, random.uniform(0, 1, 2).astype(np.float32))
    paint = main + (second - main) * amount[:, :, None]

    patch = canvas[top:bottom, left:right]
    rim_shade = np.float32(40) if float(patch.mean()) > 110 else np.float32(200)
    rim = (0.7 * _coverage(distance - 1.6 / pixels, pixels))[:, :, None]
    patch += (rim_shade - patch) * rim
    patch += (paint - patch) * _coverage(distance, pixels)[:, :, None]


def _span(centre: float, reach: float, size: int) -> tuple[int, int]:
    return max(0, int((centre - reach) * size)), min(size, int((centre + reach) * size) + 1)


def _coverage(distance: Array, pixels: float) -> Array:
    """Return the fraction of a pixel that is inside, from the distance of its centre to the edge."""
    return np.clip(0.5 - distance * pixels, 0, 1)


def _dotted(u: Array, v: Array, distance: Array, pixels: float, phase: Array) -> Array:
    pitch = 0.5
    across, down = ((u / pitch + phase[0]) % 1 - 0.5) * pitch, ((v / pitch + phase[1]) % 1 - 0.5) * pitch
    return _coverage(np.hypot(across, down) - 0.155, pixels)


def _checkered(u: Array, v: Array, distance: Array, pixels: float, phase: Array) -> Array:
    a, b = _wave(u * 1.3 + phase[0], pixels), _wave(v * 1.3 + phase[1], pixels)
    return a + b - 2 * a * b


def _wave(turns: Array, pixels: float) -> Array:
    """Return a square wave of period 1 with soft edges."""
    return np.clip(0.5 + np.sin(2 * np.pi * turns) * pixels * 0.12, 0, 1)


# Amount of the second shade, [h, w] in [0, 1]. phase: [2], shifts the pattern.
_TEXTURES: dict[str, Callable[[Array, Array, Array, float, Array], Array]] = {
    "plain": lambda u, v, distance, pixels, phase: np.zeros_like(u),
    "striped": lambda u, v, distance, pixels, phase: _wave((u + v) * 1.5 + phase[0], pixels),
    "dotted": _dotted,
    "checkered": _checkered,
    "outlined": lambda u, v, distance, pixels, phase: 1 - _coverage(distance + 0.15, pixels),
}
