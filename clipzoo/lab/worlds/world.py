"""Generate the demo's dataset: training shards and held-out benchmark datasets. Existing files are reused.

clipzoo world
clipzoo world --root data/larger --train 100000 --image-size 96 --seed 1
clipzoo world --root data/popular --captions popular     pairs of objects whose captions have known probabilities
clipzoo world --root data/views --views                  with several captions, hard negatives, regions and groups

    <root>/train/00000.tar ...        training pairs in img2dataset's layout: jpg, txt, json (caption, size, scene)
    <root>/downstream/<dataset>/      held-out datasets in CLIP_benchmark's layout: shapes, colours, textures, counts,
                                      scenes; in ours: scenes_composition
    <root>/world.json                 parameters and digests; written last

A scene shows coloured, textured shapes on one of six backgrounds: a single one in one of three sizes, one to five
equal ones, or two side by side or stacked. The downstream datasets use their own random streams: their images are not
in the training split, but all shapes, colours, textures, counts and backgrounds are, also in combination.

A world is a pure function of its parameters: any number of processes writes the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property, partial
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from clipzoo.cli.arguments import Progress, number_in, output_folder
from clipzoo.config.schema import checked
from clipzoo.config.vocabulary import Probability, Processes, Range, Seed
from clipzoo.data.maps.engines import map_in_children
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets import tar
from clipzoo.evaluation.datasets.dataset import Example
from clipzoo.evaluation.datasets.tar import write_choice, write_classification, write_retrieval
from clipzoo.io import digest_of, ensure_folder
from clipzoo.lab.worlds import scenes
from clipzoo.lab.worlds.scenes import COLOURS, CONTRASTS, COUNTS, SHAPES, TEXTURES, Scene, encode_jpeg, named, render

IMAGE_SIZE = Annotated[int, Range(at_least=16, at_most=4096)]
WORLD_COUNT = Annotated[int, Range(at_least=1, at_most=10**8)]
CAPTIONS_PER_SCENE = 5
HARD_NEGATIVES_PER_SCENE = 3
# Captions of the retrieval split mention more than those of training: five of them must distinguish 500 scenes.
RETRIEVAL_DETAIL = 2.0
NATURAL = "natural"
Object = tuple[str, str]
"""Shape and colour."""
Floats = NDArray[np.float64]
CLASSIFICATION: Mapping[str, tuple[str, tuple[str, ...], str, tuple[str, ...]]] = {
    "shapes": ("shape", SHAPES, "single", ("a {c}", "a picture of a {c}", "one {c}")),
    "colours": ("colour", COLOURS, "single", ("something {c}", "a {c} shape", "a picture of a {c} object")),
    "textures": ("texture", TEXTURES, "single", ("a {c} shape", "a picture of a {c} thing", "one {c} object")),
    "counts": ("count", COUNTS, "group", ("{c} shapes", "a picture of {c} things", "there are {c} objects")),
}
"""Classification datasets: attribute, its values, kind of scene, templates."""
STREAMS = (
    "train",
    *(f"{name}/{split}" for name in CLASSIFICATION for split in ("train", "test")),
    "scenes",
    "composition",
)
OPENINGS = ("{}", "a picture of {}", "an image of {}", "this picture shows {}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("--root", type=output_folder, default=Path("data/demo"), help=f"output folder {shown}")
    add("--processes", type=number_in(Processes), default=os.cpu_count() or 1, help="default: all cores")
    for parameter in fields(WorldParameters):
        if meaning := parameter.metadata.get("meaning"):
            kind = number_in({"seed": Seed, "image_size": IMAGE_SIZE}.get(parameter.name, WORLD_COUNT))
            name = f"--{parameter.name.replace('_', '-')}"
            add(name, type=kind, default=parameter.default, help=f"{meaning} {shown}")
    add("--captions", choices=(NATURAL, *VARIANTS), default=NATURAL, help=f"content of the captions {shown}")
    views_help = "the .json of a training sample also has captions, hard, boxes and group (data=views)"
    add("--views", action="store_true", help=views_help)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    parameters = WorldParameters(**{field.name: getattr(options, field.name) for field in fields(WorldParameters)})
    progress = Progress("demo dataset", "images")
    generated = ensure_world(options.root, parameters, options.processes, progress)
    outcome = f"generated in {progress.seconds:.0f} s" if generated else "exists already"
    print(f"== demo dataset: {options.root} {outcome} ({parameters.train} training images)", flush=True)


def ensure_world(root: Path, parameters: WorldParameters, processes: int, progress: Callable[[int, int], None]) -> bool:
    """Generate the world at `root` unless it exists, complete and with the same parameters and code.

    An interrupted generation leaves nothing under `root`; a different world there is replaced.
    progress(images done, images in total) is called after every part. Returns True if the world was generated. Raises
    ConfigError if `root` has other content.
    """
    # Each writes a file or folder and returns its number of images; the longest first.
    writers: list[Callable[[Path], int]] = [
        *(partial(_write_classification, parameters, name) for name in CLASSIFICATION),
        *(partial(_write_shard, parameters, number) for number in range(-(-parameters.train // parameters.shard))),
        partial(_write_scenes, parameters),
        *[partial(_write_composition, parameters)] * bool(parameters.composition),
    ]
    total = len(CLASSIFICATION) * (parameters.probe + parameters.test) + parameters.train + parameters.scenes
    total += parameters.composition * (2 * len(CONTRASTS) - 1)

    def write(folder: Path) -> None:
        done, task = 0, methodcaller("__call__", folder)
        for images in map_in_children(task, writers, processes, 1):
            done += images
            progress(done, total)

    # The code of the package decides the bytes, too.
    sources = [Path(__file__).with_name("scenes.py"), Path(__file__), Path(tar.__file__)]
    recipe = {"parameters": asdict(parameters), "code": digest_of(*sources)}
    return ensure_folder(root, "world.json", recipe, write, "a generated world")


def _number(default: int, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class WorldParameters:
    """Parameters of a world; the command has an option for each, with the same default.

    captions: "natural", or a key of `VARIANTS`: the training and the retrieval split then show pairs of objects whose
    captions have known probabilities.
    views: the .json of a training sample also has several captions, hard negatives, regions and a group.
    composition: 0: without the compositional dataset.
    """

    seed: int = _number(0, "seed of the generated scenes")
    image_size: int = _number(64, "side of an image in pixels")
    train: int = _number(20_000, "number of training images")
    shard: int = _number(1000, "images per training shard")
    probe: int = _number(1000, "images for fitting linear probes, in each of four datasets")
    test: int = _number(500, "test images in each of four datasets")
    scenes: int = _number(500, "images of the retrieval split, with five captions each")
    captions: str = NATURAL
    views: bool = False
    composition: int = _number(100, "pairs of captions in each of five categories of the compositional dataset")

    def __post_init__(self) -> None:
        if self.views and self.captions != NATURAL:
            raise ConfigError(f"--views needs --captions natural, not {self.captions}")


def _write_shard(parameters: WorldParameters, number: int, folder: Path) -> int:
    from webdataset.writer import TarWriter  # imports torch

    count = min(parameters.shard, parameters.train - number * parameters.shard)
    path = folder / "train" / f"{number:05d}.tar"
    path.parent.mkdir(exist_ok=True)
    with TarWriter(str(path), mtime=0) as writer:
        for position in range(count):
            writer.write(training_sample(parameters, number, position))
    return count


def training_sample(parameters: WorldParameters, shard: int, position: int) -> dict[str, str | bytes]:
    """Return the members of a sample of a training shard."""
    random = _random(parameters, "train", shard * parameters.shard + position)
    if parameters.captions == NATURAL:
        scene = scenes.sample_scene(random)
        caption = scenes.write_caption(scene, random, detail=1.0)
    else:
        world = _enumerated(parameters.captions)
        place, column = world.draw(random)
        scene, caption = world.picture(place, random), world.captions[column]
    key, size = f"{shard:05d}{position:04d}", parameters.image_size
    facts: dict[str, object] = {"caption": caption, "key": key, "width": size, "height": size, "scene": asdict(scene)}
    image = encode_jpeg(render(scene, size, random))
    if parameters.views:
        # Drawn last: the images and first captions are those of a world without views.
        captions = dict.fromkeys([caption, *scenes.write_captions(scene, random, RETRIEVAL_DETAIL, CAPTIONS_PER_SCENE)])
        names = [named(thing.shape, thing.colour) for thing in scene.things]
        facts["captions"] = list(captions)[:CAPTIONS_PER_SCENE]
        facts["hard"] = scenes.write_hard_negatives(scene, random, HARD_NEGATIVES_PER_SCENE)
        facts["boxes"] = [[name, *thing.box] for name, thing in zip(names, scene.things, strict=True)]
        facts["group"] = " and ".join(sorted(set(names)))
    return {"__key__": key, "jpg": image, "txt": caption, "json": json.dumps(facts)}


def _write_classification(parameters: WorldParameters, name: str, folder: Path) -> int:
    """Write a classification dataset with equally many images of all classes, in turn."""
    attribute, values, kind, templates = CLASSIFICATION[name]

    def examples(split: str, count: int) -> Iterator[tuple[bytes, int]]:
        for index in range(count):
            label = index % len(values)
            random = _random(parameters, f"{name}/{split}", index)
            scene = scenes.sample_scene(random, kind, **{attribute: values[label]})
            yield encode_jpeg(render(scene, parameters.image_size, random)), label

    write_classification(
        folder / "downstream" / name, class_names=list(values), templates=list(templates), metric="top1",
        recipe=f"generated scenes, classified by {attribute}; train and test from separate random streams",
        splits={"train": examples("train", parameters.probe), "test": examples("test", parameters.test)},
    )  # fmt: skip
    return parameters.probe + parameters.test


def _write_scenes(parameters: WorldParameters, folder: Path) -> int:
    write_retrieval(
        folder / "downstream" / "scenes",
        recipe=f"generated scenes from a random stream of their own, {CAPTIONS_PER_SCENE} captions each",
        examples=(retrieval_example(parameters, index) for index in range(parameters.scenes)),
    )
    return parameters.scenes


def _write_composition(parameters: WorldParameters, folder: Path) -> int:
    """Write each contrast as examples of one image, and as a group of both images and captions if it has two."""
    images, captions, examples = list[tuple[Scene, int]](), list[str](), list[Example]()
    for number in range(parameters.composition * len(CONTRASTS)):
        category = CONTRASTS[number % len(CONTRASTS)]
        drawn, texts = scenes.sample_contrast(_random(parameters, "composition", 2 * number), category)
        rows, columns = tuple(range(len(images), len(images) + len(drawn))), (len(captions), len(captions) + 1)
        examples += [Example((row,), columns, frozenset({(0, place)}), category) for place, row in enumerate(rows)]
        if len(rows) == 2:
            examples.append(Example(rows, columns, frozenset({(0, 0), (1, 1)}), f"{category}_group"))
        images += [(scene, number) for scene in drawn]
        captions += texts

    def encoded(index: int) -> bytes:
        # Both images of a contrast have the same grain.
        scene, number = images[index]
        return encode_jpeg(render(scene, parameters.image_size, _random(parameters, "composition", 2 * number + 1)))

    recipe = f"generated scenes and captions that differ in one respect: {', '.join(CONTRASTS)}"
    write_choice(folder / "downstream" / "scenes_composition", recipe, captions, examples, encoded)
    return len(images)


def retrieval_example(parameters: WorldParameters, index: int) -> tuple[bytes, list[str]]:
    """Return the image and the captions of a scene of the retrieval split."""
    random = _random(parameters, "scenes", index)
    if parameters.captions == NATURAL:
        scene = scenes.sample_scene(random)
        captions = scenes.write_captions(scene, random, RETRIEVAL_DETAIL, CAPTIONS_PER_SCENE)
    else:
        world = _enumerated(parameters.captions)
        place, _ = world.draw(random)
        matched = list(world.matched[place])
        captions = [matched[index] for index in random.permutation(len(matched))[:CAPTIONS_PER_SCENE]]
        scene = world.picture(place, random)
    return encode_jpeg(render(scene, parameters.image_size, random)), captions


@cache
def _enumerated(variant: str) -> EnumeratedWorld:
    return EnumeratedWorld(len(SHAPES), len(COLOURS), VARIANTS[variant])


def _random(parameters: WorldParameters, stream: str, index: int) -> np.random.Generator:
    """Return the generator of one image; each stream has its own."""
    return np.random.default_rng([parameters.seed, STREAMS.index(stream), index])


@checked
@dataclass(frozen=True)
class CaptionSettings:
    """How captions of scenes are drawn.

    several: probability that a caption names both objects; otherwise it names either with probability 1/2.
    partial: probability that an object is named only by its colour or only by its shape, both equally likely.
    openings: number of equally likely openings, which make near-duplicates of a caption.
    popularity: exponent of Zipf's law of the objects; 0: all objects are equally frequent.
    unmatched: share of captions that are drawn for another scene, as among captions from the web; above 0 every PMI is
        finite.
    """

    several: Probability = 0.5
    partial: Probability = 0.2
    openings: Annotated[int, Range(at_least=1, at_most=4)] = 1
    popularity: float = 0.0
    unmatched: Probability = 0.05


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


@checked
@dataclass(frozen=True)
class EnumeratedWorld:
    """All scenes of the first `shapes` shapes and `colours` colours, with the captions that they can have."""

    shapes: Annotated[int, Range(at_least=2, at_most=10)]
    colours: Annotated[int, Range(at_least=2, at_most=10)]
    settings: CaptionSettings

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
    def matched(self) -> list[dict[str, float]]:
        """By scene: the captions that describe it, with their probabilities."""
        settings, tables = self.settings, list[dict[str, float]]()

        def names(item: Object) -> list[tuple[str, float]]:
            """Return the ways to name an object, with their probabilities."""
            shape, colour = item
            share = settings.partial
            return [(named(*item), 1 - share), (f"something {colour}", share / 2), (named(shape), share / 2)]

        def add(phrase: str, probability: float) -> None:
            for opening in OPENINGS[: settings.openings] if probability > 0 else ():
                caption = opening.format(phrase)
                tables[-1][caption] = tables[-1].get(caption, 0.0) + probability / settings.openings

        for scene in self.scenes:
            tables.append({})
            for first, second in (scene, scene[::-1]):
                for name, probability in names(first):
                    add(name, 0.5 * (1 - settings.several) * probability)
                    for other, other_probability in names(second):
                        add(f"{name} and {other}", 0.5 * settings.several * probability * other_probability)
        return tables

    @cached_property
    def captions(self) -> list[str]:
        """All captions that any scene can have."""
        return list(dict.fromkeys(caption for table in self.matched for caption in table))

    @cached_property
    def caption_given_scene(self) -> Floats:
        """p(caption | scene), [s, c]; an unmatched caption is drawn for a scene of the whole distribution."""
        matched = np.zeros((len(self.scenes), len(self.captions)))
        for row, table in zip(matched, self.matched, strict=True):
            row[[self._caption_places[caption] for caption in table]] = list(table.values())
        share = self.settings.unmatched
        return (1 - share) * matched + share * (self.scene_probability @ matched)

    @cached_property
    def pmi(self) -> Floats:
        """Pointwise mutual information in nats, [s, c]; -inf where a scene never has a caption."""
        with np.errstate(divide="ignore"):
            return np.log(self.caption_given_scene) - np.log(self.scene_probability @ self.caption_given_scene)

    @property
    def information(self) -> float:
        """Mutual information of scene and caption, in nats."""
        joint = self.scene_probability[:, None] * self.caption_given_scene
        return float((joint * np.where(joint > 0, self.pmi, 0.0)).sum())

    def draw(self, random: np.random.Generator, scene: int | None = None) -> tuple[int, int]:
        """Draw a scene, unless it is given, and a caption of it; return their indices."""
        numbers, share = len(self.scenes), self.scene_probability
        place = int(random.choice(numbers, p=share)) if scene is None else scene
        described = int(random.choice(numbers, p=share)) if random.random() < self.settings.unmatched else place
        captions, probabilities = zip(*self.matched[described].items(), strict=True)
        return place, self._caption_places[captions[random.choice(len(captions), p=probabilities)]]

    def picture(self, scene: int, random: np.random.Generator) -> Scene:
        """Draw the places and tilts of the objects of a scene; its render draws everything else."""
        return scenes.sample_quadrants(random, self.scenes[scene])

    @cached_property
    def _caption_places(self) -> dict[str, int]:
        return {caption: place for place, caption in enumerate(self.captions)}
