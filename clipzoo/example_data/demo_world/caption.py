"""Captions of scenes in several phrasings. Like human captions, they mention some attributes and omit others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from clipzoo.example_data.demo_world.scene import COUNTS, Scene, Thing

_PLACES = {
    "sand": ("on the sand", "on a beach"),
    "grass": ("on the grass", "in a meadow"),
    "sky": ("in the sky", "in front of a blue sky"),
    "night": ("at night", "in the dark"),
    "snow": ("in the snow", "on white snow"),
    "brick": ("on a brick wall", "in front of bricks"),
}
_SIZES = {"small": ("small", "tiny", "little"), "medium": ("medium", "medium-sized"), "large": ("large", "big", "huge")}
_GENERIC_NOUNS = ("shape", "thing", "object")
_OPENINGS = ("{}", "{}", "{}", "a picture of {}", "an image of {}", "this picture shows {}")
_BESIDE = ("{} left of {}", "{} to the left of {}", "{1} right of {0}", "{1} to the right of {0}")
_STACKED = ("{} above {}", "{} over {}", "{1} below {0}", "{1} under {0}")
_TOGETHER = ("{} and {}", "{1} and {0}")

Item = TypeVar("Item")


def write_caption(scene: Scene, random: np.random.Generator, detail: float) -> str:
    """Return a caption of the scene.

    detail: factor on the probability that an attribute is mentioned; 1 in training.
    """
    writer = _Writer(random, detail)
    return {"single": writer.single, "group": writer.group, "pair": writer.pair}[scene.kind](scene)


def write_captions(scene: Scene, random: np.random.Generator, detail: float, count: int) -> list[str]:
    """Return `count` different captions of one scene."""
    captions: dict[str, None] = {}
    while len(captions) < count:
        captions[write_caption(scene, random, detail)] = None
    return list(captions)


@dataclass(frozen=True)
class _Writer:
    random: np.random.Generator
    detail: float

    def single(self, scene: Scene) -> str:
        thing = scene.things[0]
        number = "one" if self._chance(0.2) else "a"
        phrase = self._noun_phrase(thing, number, size=self._mentions(0.2))
        if self._mentions(0.2):
            phrase = f"{phrase} {_position(thing)}"
        return self._with_opening(self._with_place(phrase, scene), "there is {}")

    def group(self, scene: Scene) -> str:
        number = COUNTS[len(scene.things) - 1]
        phrase = self._noun_phrase(scene.things[0], number, size=False)
        if self._chance(0.15):
            phrase = f"a group of {phrase}"
        return self._with_opening(self._with_place(phrase, scene), "there is {}" if number == "one" else "there are {}")

    def pair(self, scene: Scene) -> str:
        first, second = scene.things
        beside = abs(second.x - first.x) > abs(second.y - first.y)
        relations = (_BESIDE if beside else _STACKED) if self._mentions(0.85) else _TOGETHER
        phrases = (self._noun_phrase(thing, "a", size=False) for thing in (first, second))
        return self._with_opening(self._with_place(self._choose(relations).format(*phrases), scene), "there is {}")

    def _noun_phrase(self, thing: Thing, number: str, size: bool) -> str:
        """Mention at least one of colour, texture and shape."""
        plural = number not in ("a", "one")
        colour, texture, shape = self._mentions(0.5), self._mentions(0.3), self._mentions(0.95)
        if not (colour or texture or shape):
            colour, texture, shape = np.eye(3, dtype=bool)[self.random.integers(3)]
        if number == "a" and colour and not (texture or shape or size) and self._chance(0.5):
            return f"something {thing.colour}"
        noun = _plural(thing.shape) if plural else thing.shape
        if not shape:
            noun = self._choose(_GENERIC_NOUNS) + ("s" if plural else "")
        after = ""
        if colour and self._chance(0.15):
            colour, after = False, f" in {thing.colour}"
        elif texture and self._chance(0.15):
            texture, after = False, f" that {'are' if plural else 'is'} {thing.texture}"
        words = [thing.texture] * bool(texture) + [thing.colour] * bool(colour)
        if len(words) == 2 and self._chance(0.3):
            words = words[::-1]
        if size:
            words.insert(0, self._choose(_SIZES[thing.size]))
        words.append(noun)
        article = "an" if number == "a" and words[0][0] in "aeiou" else number
        return f"{article} {' '.join(words)}{after}"

    def _with_place(self, phrase: str, scene: Scene) -> str:
        if not self._mentions(0.25):
            return phrase
        place = self._choose(_PLACES[scene.background])
        return f"{place}, {phrase}" if self._chance(0.2) else f"{phrase} {place}"

    def _with_opening(self, phrase: str, there: str) -> str:
        if phrase.split()[0] in ("on", "in", "at", "under"):
            return phrase
        return self._choose((*_OPENINGS, there)).format(phrase)

    def _mentions(self, weight: float) -> bool:
        return self._chance(min(1.0, weight * self.detail))

    def _chance(self, probability: float) -> bool:
        return bool(self.random.random() < probability)

    def _choose(self, items: tuple[Item, ...]) -> Item:
        return items[int(self.random.integers(len(items)))]


def _position(thing: Thing) -> str:
    """Describe the third of the image, in each direction, that holds the thing."""
    down = ("top", "middle", "bottom")[min(2, int(3 * thing.y))]
    across = ("left", "centre", "right")[min(2, int(3 * thing.x))]
    if (down, across) == ("middle", "centre"):
        return "in the middle"
    if down == "middle":
        return f"on the {across}"
    if across == "centre":
        return f"at the {down}"
    return f"in the {down} {across}"


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")
