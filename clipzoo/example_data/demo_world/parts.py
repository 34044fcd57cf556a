"""Parts of the generated world, which any process can write: pure functions of the parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from clipzoo.evaluation.datasets.tar import write_classification, write_retrieval
from clipzoo.example_data.demo_world.caption import write_caption, write_captions
from clipzoo.example_data.demo_world.enumerated import VARIANTS, EnumeratedWorld
from clipzoo.example_data.demo_world.render import encode_jpeg, render
from clipzoo.example_data.demo_world.scene import COLOURS, COUNTS, SHAPES, TEXTURES, Scene, sample_scene

CAPTIONS_PER_SCENE = 5
# Captions of the retrieval split mention more than those of training: five of them must distinguish 500 scenes.
RETRIEVAL_DETAIL = 2.0
NATURAL = "natural"


@dataclass(frozen=True)
class WorldParameters:
    """Parameters of a world. image_size: side of the images in pixels; the other sizes are numbers of images.

    train: all training images. shard: images per training shard. probe, test: training and test images of each of the
    four classification datasets. scenes: images of the retrieval split.
    captions: "natural", or a variant of `enumerated.VARIANTS`: the training and the retrieval split then show pairs of
    objects whose captions have known probabilities.
    """

    seed: int
    image_size: int
    train: int
    shard: int
    probe: int
    test: int
    scenes: int
    captions: str = "natural"


class Part(Protocol):
    @property
    def images(self) -> int: ...

    def write(self, folder: Path) -> None:
        """Write this part under `folder`."""


@dataclass(frozen=True)
class TrainingShard:
    parameters: WorldParameters
    number: int

    @property
    def images(self) -> int:
        return min(self.parameters.shard, self.parameters.train - self.number * self.parameters.shard)

    def write(self, folder: Path) -> None:
        from webdataset.writer import TarWriter  # imports torch

        path = folder / "train" / f"{self.number:05d}.tar"
        path.parent.mkdir(exist_ok=True)
        with TarWriter(str(path), mtime=0) as writer:
            for position in range(self.images):
                writer.write(self._sample(position))

    def _sample(self, position: int) -> dict[str, str | bytes]:
        random = _random(self.parameters, "train", self.number * self.parameters.shard + position)
        scene, caption = _described_scene(self.parameters, random)
        key, size = f"{self.number:05d}{position:04d}", self.parameters.image_size
        facts = {"caption": caption, "key": key, "width": size, "height": size, "scene": scene.facts()}
        image = encode_jpeg(render(scene, size, random))
        return {"__key__": key, "jpg": image, "txt": caption, "json": json.dumps(facts)}


@dataclass(frozen=True)
class ClassificationPart:
    """A classification dataset with equally many images of all classes, in turn."""

    parameters: WorldParameters
    name: str

    # Name: attribute, its values, kind of scene, templates.
    DATASETS: ClassVar[dict[str, tuple[str, tuple[str, ...], str, tuple[str, ...]]]] = {
        "shapes": ("shape", SHAPES, "single", ("a {c}", "a picture of a {c}", "one {c}")),
        "colours": ("colour", COLOURS, "single", ("something {c}", "a {c} shape", "a picture of a {c} object")),
        "textures": ("texture", TEXTURES, "single", ("a {c} shape", "a picture of a {c} thing", "one {c} object")),
        "counts": ("count", COUNTS, "group", ("{c} shapes", "a picture of {c} things", "there are {c} objects")),
    }

    @property
    def images(self) -> int:
        return self.parameters.probe + self.parameters.test

    def write(self, folder: Path) -> None:
        attribute, values, _, templates = self.DATASETS[self.name]
        write_classification(
            folder / "downstream" / self.name,
            class_names=list(values),
            templates=list(templates),
            metric="top1",
            recipe=f"generated scenes, classified by {attribute}; train and test from separate random streams",
            splits={
                "train": self._examples("train", self.parameters.probe),
                "test": self._examples("test", self.parameters.test),
            },
        )

    def _examples(self, split: str, count: int) -> Iterator[tuple[bytes, int]]:
        attribute, values, kind, _ = self.DATASETS[self.name]
        for index in range(count):
            label = index % len(values)
            random = _random(self.parameters, f"{self.name}/{split}", index)
            scene = sample_scene(random, kind, **{attribute: values[label]})
            yield encode_jpeg(render(scene, self.parameters.image_size, random)), label


@dataclass(frozen=True)
class RetrievalPart:
    """The retrieval split: scenes of all kinds with five captions each."""

    parameters: WorldParameters

    @property
    def images(self) -> int:
        return self.parameters.scenes

    def write(self, folder: Path) -> None:
        write_retrieval(
            folder / "downstream" / "scenes",
            recipe=f"generated scenes from a random stream of their own, {CAPTIONS_PER_SCENE} captions each",
            examples=(self._example(index) for index in range(self.images)),
        )

    def _example(self, index: int) -> tuple[bytes, list[str]]:
        random = _random(self.parameters, "scenes", index)
        if self.parameters.captions == NATURAL:
            scene = sample_scene(random)
            captions = write_captions(scene, random, RETRIEVAL_DETAIL, CAPTIONS_PER_SCENE)
        else:
            world = _enumerated(self.parameters.captions)
            place, _ = world.draw(random)
            matched = list(world.matched_captions(place))
            captions = [matched[index] for index in random.permutation(len(matched))[:CAPTIONS_PER_SCENE]]
            scene = world.picture(place, random)
        return encode_jpeg(render(scene, self.parameters.image_size, random)), captions


def parts(parameters: WorldParameters) -> list[Part]:
    """Return all parts, the longest first."""
    datasets: list[Part] = [ClassificationPart(parameters, name) for name in ClassificationPart.DATASETS]
    shards: list[Part] = [
        TrainingShard(parameters, number) for number in range(-(-parameters.train // parameters.shard))
    ]
    return [*datasets, *shards, RetrievalPart(parameters)]


def _described_scene(parameters: WorldParameters, random: np.random.Generator) -> tuple[Scene, str]:
    """Draw a scene and a caption of it."""
    if parameters.captions == NATURAL:
        scene = sample_scene(random)
        return scene, write_caption(scene, random, detail=1.0)
    world = _enumerated(parameters.captions)
    place, caption = world.draw(random)
    return world.picture(place, random), world.captions[caption]


@cache
def _enumerated(variant: str) -> EnumeratedWorld:
    """Return the world of a variant with all shapes and colours."""
    return EnumeratedWorld(len(SHAPES), len(COLOURS), VARIANTS[variant])


_STREAMS = (
    "train",
    *(f"{name}/{split}" for name in ClassificationPart.DATASETS for split in ("train", "test")),
    "scenes",
)


def _random(parameters: WorldParameters, stream: str, index: int) -> np.random.Generator:
    """Return the generator of one image; each stream has its own."""
    return np.random.default_rng([parameters.seed, _STREAMS.index(stream), index])
