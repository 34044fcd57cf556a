"""Scenes of two objects whose captions have known probabilities: the mutual information of every pair is exact.

A scene is an unordered pair of objects that differ in shape and colour. Its image is noise around the scene: places,
tilts, hues, grain and background vary, but the scene remains the same. So the pointwise mutual information of an image
and a caption is that of its scene and the caption,

    PMI(scene, caption) = log p(caption | scene) - log p(caption).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from clipzoo.example_data.demo_world.scene import COLOURS, SHAPES, Scene, sample_quadrants

Object = tuple[str, str]
"""Shape and colour."""
Floats = NDArray[np.float64]
OPENINGS = ("{}", "a picture of {}", "an image of {}", "this picture shows {}")


@dataclass(frozen=True)
class CaptionSettings:
    """How captions of scenes are drawn.

    several: probability that a caption names both objects; otherwise it names either with probability 1/2.
    partial: probability that an object is named by its colour alone or by its shape alone, each with half of it.
    openings: number of equally likely openings, which make near-duplicates of a caption.
    popularity: exponent of Zipf's law of the objects; 0: all objects are equally frequent.
    unmatched: share of captions that are drawn for another scene, as among captions from the web; above 0 every PMI is
        finite.
    """

    several: float = 0.5
    partial: float = 0.2
    openings: int = 1
    popularity: float = 0.0
    unmatched: float = 0.05

    def __post_init__(self) -> None:
        for name in ("several", "partial", "unmatched"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a probability, not {getattr(self, name)}")
        if not 1 <= self.openings <= len(OPENINGS):
            raise ValueError(f"openings is a number from 1 to {len(OPENINGS)}, not {self.openings}")


VARIANTS = {
    "mixed": CaptionSettings(),
    "several": CaptionSettings(several=1.0),
    "one": CaptionSettings(several=0.0),
    "popular": CaptionSettings(popularity=1.0),
    "duplicates": CaptionSettings(several=0.0, openings=len(OPENINGS)),
    "saturating": CaptionSettings(several=1.0, partial=0.0, unmatched=0.0),
}
"""Captions that name several objects or one, popular and rare objects, near-duplicate captions, and captions that
determine their scene: their positives saturate InfoNCE."""


@dataclass(frozen=True)
class EnumeratedWorld:
    """All scenes of the first `shapes` shapes and `colours` colours, with the captions that they can have."""

    shapes: int
    colours: int
    settings: CaptionSettings

    def __post_init__(self) -> None:
        for name, values in (("shapes", SHAPES), ("colours", COLOURS)):
            if not 2 <= getattr(self, name) <= len(values):
                raise ValueError(f"{name} is a number from 2 to {len(values)}, not {getattr(self, name)}")

    @cached_property
    def objects(self) -> list[Object]:
        """All objects, the most popular first."""
        pairs = list(itertools.product(SHAPES[: self.shapes], COLOURS[: self.colours]))
        # A fixed shuffle: popular objects have all shapes and colours.
        return [pairs[index] for index in np.random.default_rng(0).permutation(len(pairs))]

    @cached_property
    def scenes(self) -> list[tuple[Object, Object]]:
        """All pairs of objects that differ in shape and colour."""
        pairs = itertools.combinations(self.objects, 2)
        return [(first, second) for first, second in pairs if first[0] != second[0] and first[1] != second[1]]

    @cached_property
    def scene_probability(self) -> Floats:
        """p(scene), [s]: proportional to the product of the popularities of both objects."""
        ranks = {item: rank for rank, item in enumerate(self.objects, 1)}
        weights = np.array([float(ranks[first] * ranks[second]) for first, second in self.scenes])
        weights **= -self.settings.popularity
        return weights / weights.sum()

    @cached_property
    def captions(self) -> list[str]:
        """All captions that any scene can have."""
        return list(dict.fromkeys(caption for table in self._matched for caption in table))

    @cached_property
    def caption_given_scene(self) -> Floats:
        """p(caption | scene), [s, c]; an unmatched caption is drawn for a scene of the whole distribution."""
        matched = np.zeros((len(self.scenes), len(self.captions)))
        for row, table in zip(matched, self._matched, strict=True):
            for caption, probability in table.items():
                row[self._caption_places[caption]] = probability
        share = self.settings.unmatched
        return (1 - share) * matched + share * (self.scene_probability @ matched)

    @cached_property
    def caption_probability(self) -> Floats:
        """p(caption), [c]."""
        return self.scene_probability @ self.caption_given_scene

    @cached_property
    def pmi(self) -> Floats:
        """Pointwise mutual information in nats, [s, c]; -inf where a scene never has a caption."""
        with np.errstate(divide="ignore"):
            return np.log(self.caption_given_scene) - np.log(self.caption_probability)

    @property
    def information(self) -> float:
        """Mutual information of scene and caption, in nats."""
        joint = self.scene_probability[:, None] * self.caption_given_scene
        return float((joint * np.where(joint > 0, self.pmi, 0.0)).sum())

    def draw(self, random: np.random.Generator, scene: int | None = None) -> tuple[int, int]:
        """Draw a scene, unless it is given, and a caption of it; return their indices."""
        place = self._draw_scene(random) if scene is None else scene
        described = self._draw_scene(random) if random.random() < self.settings.unmatched else place
        captions, probabilities = zip(*self._matched[described].items(), strict=True)
        return place, self._caption_places[captions[random.choice(len(captions), p=probabilities)]]

    def matched_captions(self, scene: int) -> dict[str, float]:
        """Return the captions that describe a scene, with their probabilities."""
        return dict(self._matched[scene])

    def picture(self, scene: int, random: np.random.Generator) -> Scene:
        """Draw the places and tilts of the objects of a scene; its render draws everything else."""
        return sample_quadrants(random, self.scenes[scene], ("plain",), ("snow",))

    def _draw_scene(self, random: np.random.Generator) -> int:
        return int(np.searchsorted(self._cumulative, random.random() * self._cumulative[-1], side="right"))

    @cached_property
    def _cumulative(self) -> Floats:
        return np.cumsum(self.scene_probability)

    @cached_property
    def _caption_places(self) -> dict[str, int]:
        return {caption: place for place, caption in enumerate(self.captions)}

    @cached_property
    def _matched(self) -> list[dict[str, float]]:
        """By scene: the captions that describe it, with their probabilities."""
        return [_descriptions(scene, self.settings) for scene in self.scenes]


def _descriptions(scene: tuple[Object, Object], settings: CaptionSettings) -> dict[str, float]:
    """Return the captions of a scene with their probabilities, by going through all choices of the writer."""
    table: dict[str, float] = defaultdict(float)
    for first, second in (scene, scene[::-1]):
        for name, named in _names(first, settings.partial):
            _add(table, name, 0.5 * (1 - settings.several) * named, settings.openings)
            for other, also in _names(second, settings.partial):
                _add(table, f"{name} and {other}", 0.5 * settings.several * named * also, settings.openings)
    return dict(table)


def full_name(item: Object) -> str:
    """Return the name of an object with colour and shape, such as "a red circle"."""
    shape, colour = item
    return f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape}"


def _names(item: Object, partial: float) -> list[tuple[str, float]]:
    """Return the ways to name an object, with their probabilities."""
    shape, colour = item
    alone = f"{'an' if shape[0] in 'aeiou' else 'a'} {shape}"
    return [(full_name(item), 1 - partial), (f"something {colour}", partial / 2), (alone, partial / 2)]


def _add(table: dict[str, float], phrase: str, probability: float, openings: int) -> None:
    if probability > 0:
        for opening in OPENINGS[:openings]:
            table[opening.format(phrase)] += probability / openings
