"""The parts a generated world is made of: each is a function of the parameters alone and runs in any process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from clipzoo.demo_world.caption import write_caption, write_captions
from clipzoo.demo_world.render import encode_jpeg, render
from clipzoo.demo_world.scene import COLOURS, COUNTS, SHAPES, TEXTURES, sample_scene
from clipzoo.evaluation.datasets.tar_writer import write_classification, write_retrieval

CAPTIONS_PER_SCENE = 5
# Captions of the retrieval split tell more than those of training: five of them shall tell one scene from 500 others.
RETRIEVAL_DETAIL = 2.0


@dataclass(frozen=True)
class World:
    """The parameters of a world. Sizes count images; image_size is the side of the pictures in pixels.

    probe, test: of each of the four classification sets. scenes: of the retrieval split.
    """

    seed: int
    image_size: int
    train: int
    shard: int
    probe: int
    test: int
    scenes: int


class Part(Protocol):
    @property
    def images(self) -> int: ...

    def make(self, folder: Path) -> int:
        """Write this part under `folder`; returns its number of images."""


@dataclass(frozen=True)
class TrainShard:
    world: World
    number: int

    @property
    def images(self) -> int:
        return min(self.world.shard, self.world.train - self.number * self.world.shard)

    def make(self, folder: Path) -> int:
        from webdataset.writer import TarWriter  # imports torch

        path = folder / "train" / f"{self.number:05d}.tar"
        path.parent.mkdir(exist_ok=True)
        with TarWriter(str(path), mtime=0) as writer:
            for position in range(self.images):
                writer.write(self._sample(position))
        return self.images

    def _sample(self, position: int) -> dict[str, Any]:
        random = _random(self.world, "train", self.number * self.world.shard + position)
        scene = sample_scene(random)
        caption = write_caption(scene, random, detail=1.0)
        key, size = f"{self.number:05d}{position:04d}", self.world.image_size
        facts = {"caption": caption, "key": key, "width": size, "height": size, "scene": scene.facts()}
        picture = encode_jpeg(render(scene, size, random))
        return {"__key__": key, "jpg": picture, "txt": caption, "json": json.dumps(facts)}


@dataclass(frozen=True)
class LabelledSet:
    """A classification set: every class equally often, in turn."""

    world: World
    name: str

    # Name: the attribute, its values, the kind of scene, the templates.
    SETS: ClassVar[dict[str, tuple[str, tuple[str, ...], str, tuple[str, ...]]]] = {
        "shapes": ("shape", SHAPES, "single", ("a {c}", "a picture of a {c}", "one {c}")),
        "colours": ("colour", COLOURS, "single", ("something {c}", "a {c} shape", "a picture of a {c} object")),
        "textures": ("texture", TEXTURES, "single", ("a {c} shape", "a picture of a {c} thing", "one {c} object")),
        "counts": ("count", COUNTS, "group", ("{c} shapes", "a picture of {c} things", "there are {c} objects")),
    }

    @property
    def images(self) -> int:
        return self.world.probe + self.world.test

    def make(self, folder: Path) -> int:
        attribute, values, _, templates = self.SETS[self.name]
        write_classification(
            folder / "downstream" / self.name,
            class_names=list(values),
            templates=list(templates),
            metric="top1",
            recipe=f"generated scenes, classified by {attribute}; train and test from separate random streams",
            splits={
                "train": self._examples("train", self.world.probe),
                "test": self._examples("test", self.world.test),
            },
        )
        return self.images

    def _examples(self, split: str, count: int) -> Iterator[tuple[bytes, int]]:
        attribute, values, kind, _ = self.SETS[self.name]
        for index in range(count):
            label = index % len(values)
            random = _random(self.world, f"{self.name}/{split}", index)
            scene = sample_scene(random, kind, **{attribute: values[label]})
            yield encode_jpeg(render(scene, self.world.image_size, random)), label


@dataclass(frozen=True)
class CaptionedScenes:
    """The retrieval split: scenes of all kinds, five captions each."""

    world: World

    @property
    def images(self) -> int:
        return self.world.scenes

    def make(self, folder: Path) -> int:
        write_retrieval(
            folder / "downstream" / "scenes",
            recipe=f"generated scenes from a random stream of their own, {CAPTIONS_PER_SCENE} captions each",
            examples=(self._example(index) for index in range(self.images)),
        )
        return self.images

    def _example(self, index: int) -> tuple[bytes, list[str]]:
        random = _random(self.world, "scenes", index)
        scene = sample_scene(random)
        captions = write_captions(scene, random, RETRIEVAL_DETAIL, CAPTIONS_PER_SCENE)
        return encode_jpeg(render(scene, self.world.image_size, random)), captions


def parts(world: World) -> list[Part]:
    """All parts, the longest first."""
    sets: list[Part] = [LabelledSet(world, name) for name in LabelledSet.SETS]
    shards: list[Part] = [TrainShard(world, number) for number in range(-(-world.train // world.shard))]
    return [*sets, *shards, CaptionedScenes(world)]


_STREAMS = ("train", *(f"{name}/{split}" for name in LabelledSet.SETS for split in ("train", "test")), "scenes")


def _random(world: World, stream: str, index: int) -> np.random.Generator:
    """The stream's numbers for one image."""
    return np.random.default_rng([world.seed, _STREAMS.index(stream), index])
