"""Generated world: reproducible bytes, atomic generation, and captions that agree with their scenes."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import ChoiceDataset, ClassificationDataset, RetrievalDataset
from clipzoo.evaluation.datasets.tar import open_tar_dataset
from clipzoo.io import WriteError
from clipzoo.lab.worlds.scenes import (
    COLOURS,
    COUNTS,
    SHAPES,
    TEXTURES,
    Array,
    Scene,
    Thing,
    render,
    sample_contrast,
    sample_scene,
    write_caption,
    write_captions,
    write_hard_negatives,
)
from clipzoo.lab.worlds.world import WorldParameters, ensure_world
from tests.support import damage
from tests.support.disks import small_disk

SMALL = WorldParameters(seed=3, image_size=32, train=20, shard=8, probe=20, test=10, scenes=6, composition=0)
CLASSES = {"shapes": SHAPES, "colours": COLOURS, "textures": TEXTURES, "counts": COUNTS}


def make(root: Path, parameters: WorldParameters = SMALL, processes: int = 1) -> bool:
    return ensure_world(root, parameters, processes, lambda done, total: None)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def scenes(count: int, kind: str | None = None) -> list[Scene]:
    return [sample_scene(np.random.default_rng([7, index]), kind) for index in range(count)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world") / "demo"
    assert make(root)
    return root


@pytest.mark.medium
def test_two_processes_write_the_same_bytes_as_one(small: Path, tmp_path: Path) -> None:
    make(tmp_path / "again", processes=2)
    assert files(tmp_path / "again") == files(small)


@pytest.mark.medium
@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_world_with_a_damaged_file_is_generated_again(small: Path, tmp_path: Path, kind) -> None:
    root = tmp_path / "demo"
    shutil.copytree(small, root)
    for name in ("world.json", "train/00000.tar", "downstream/shapes/classnames.txt"):
        kind(root / name)
    assert make(root) and files(root) == files(small) and not make(root)


def test_a_disk_too_small_for_the_world_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="64k") as disk:
        with pytest.raises(WriteError, match="could not write .*: No space left on device"):
            make(disk / "demo")
        assert not (disk / "demo").exists()


def test_views_add_captions_hard_negatives_regions_and_a_group_to_the_same_images(small: Path, tmp_path: Path) -> None:
    make(tmp_path / "views", dataclasses.replace(SMALL, views=True))
    plain, rich = members_of(small / "train/00000.tar"), members_of(tmp_path / "views/train/00000.tar")
    for name, content in rich.items():
        assert name.endswith(".json") or content == plain[name]
        if name.endswith(".json"):
            before, facts = json.loads(plain[name]), json.loads(content)
            assert {key: facts[key] for key in before} == before
            assert facts["captions"][0] == facts["caption"] and len(set(facts["captions"])) == 5
            assert len(set(facts["hard"])) == 3 and len(facts["boxes"]) == len(facts["scene"]["things"])
            for (text, left, top, right, bottom), thing in zip(facts["boxes"], facts["scene"]["things"], strict=True):
                assert 0 <= left < thing["x"] < right <= 1 and 0 <= top < thing["y"] < bottom <= 1
                assert text.split()[1:] == [thing["colour"], thing["shape"]] and text in facts["group"]
    with pytest.raises(ConfigError, match="--views needs --captions natural, not one"):
        dataclasses.replace(SMALL, views=True, captions="one")


@pytest.mark.parametrize("kind", ["single", "group", "pair"])
def test_hard_negatives_name_a_colour_and_shape_that_the_scene_does_not_combine(kind: str) -> None:
    for number, scene in enumerate(scenes(40, kind)):
        random = np.random.default_rng(number)
        present = {(thing.colour, thing.shape) for thing in scene.things}
        true = set(write_captions(scene, random, 2.0, 8))
        for caption in write_hard_negatives(scene, random, 3):
            # Without the place, which may have a colour: "on white snow", "in front of a blue sky".
            named = caption.replace("white snow", "").replace("blue sky", "").replace("crosses", "cross")
            words = re.findall(r"[a-z]+", named)
            shapes = [
                shape for word in words if (shape := word if word in SHAPES else word.removesuffix("s")) in SHAPES
            ]
            colours = [word for word in words if word in COLOURS]
            assert caption not in true and len(shapes) == len(colours) > 0
            assert not set(zip(colours, shapes, strict=True)) <= present, caption


def members_of(shard: Path) -> dict[str, bytes]:
    with tarfile.open(shard) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def test_another_seed_changes_every_image(small: Path, tmp_path: Path) -> None:
    make(tmp_path / "other", dataclasses.replace(SMALL, seed=4))
    before, after = files(small), files(tmp_path / "other")
    assert before.keys() == after.keys()
    assert not {name for name in before if name.endswith(".tar") and before[name] == after[name]}


def test_a_complete_world_is_reused_and_additional_files_are_not_touched(small: Path) -> None:
    (small / "train/index").write_text("a cache")
    times = {path: path.stat().st_mtime_ns for path in small.rglob("*")}
    assert not make(small)
    assert times == {path: path.stat().st_mtime_ns for path in small.rglob("*")}
    (small / "train/index").unlink()


def test_an_interrupted_generation_leaves_no_files_and_can_be_repeated(tmp_path: Path, small: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    root = tmp_path / "demo"
    with pytest.raises(KeyboardInterrupt):
        ensure_world(root, SMALL, 1, interrupt)
    assert not root.exists()
    assert make(root)
    assert files(root) == files(small)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["demo"]


def test_other_parameters_replace_the_world(tmp_path: Path) -> None:
    make(tmp_path / "demo")
    assert make(tmp_path / "demo", dataclasses.replace(SMALL, train=9))
    assert json.loads((tmp_path / "demo/world.json").read_text())["parameters"]["train"] == 9
    assert sorted(path.name for path in (tmp_path / "demo/train").iterdir()) == ["00000.tar", "00001.tar"]


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="something else"):
        make(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_training_shards_have_the_members_of_img2dataset(small: Path) -> None:
    keys = []
    for shard in sorted((small / "train").glob("*.tar")):
        with tarfile.open(shard) as archive:
            members = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
            assert {member.mtime for member in archive} == {0}
        for key in sorted({name.split(".")[0] for name in members}):
            facts = json.loads(members[f"{key}.json"])
            image = Image.open(io.BytesIO(members[f"{key}.jpg"]))
            assert facts["key"] == key
            assert facts["caption"] == members[f"{key}.txt"].decode()
            assert (facts["width"], facts["height"]) == image.size and image.format == "JPEG"
            keys.append(key)
    assert keys == [f"0000{shard}000{row}" for shard in range(3) for row in range(8) if 8 * shard + row < 20]


def test_held_out_datasets_have_equally_many_images_per_class_and_no_training_image(small: Path) -> None:
    images = Counter()
    for tar in small.rglob("*.tar"):
        with tarfile.open(tar) as archive:
            images.update(archive.extractfile(member).read() for member in archive if member.name.endswith("jpg"))  # type: ignore[union-attr]
    assert images.total() == 20 + 4 * (20 + 10) + 6 and set(images.values()) == {1}
    for name, classes in CLASSES.items():
        dataset = open_tar_dataset(small / "downstream", name)
        assert isinstance(dataset, ClassificationDataset) and tuple(dataset.class_names) == classes
        labels = Counter(dataset.splits["test"][index][1] for index in range(10))
        assert labels == dict.fromkeys(range(len(classes)), 10 // len(classes))


def test_retrieval_scenes_have_five_different_captions(small: Path) -> None:
    dataset = open_tar_dataset(small / "downstream", "scenes")
    assert isinstance(dataset, RetrievalDataset)
    assert dataset.caption_image == [index for index in range(6) for _ in range(5)]
    assert all(len(set(dataset.captions[start : start + 5])) == 5 for start in range(0, 30, 5))


def test_captions_mention_only_attributes_of_the_scene() -> None:
    for index, scene in enumerate(scenes(600)):
        for text in write_captions(scene, np.random.default_rng(index), 1.0, 2):
            words = re.findall(r"[a-z]+", re.sub(r"blue sky|white snow", "", text))
            singular = {word.removesuffix("es") if word == "crosses" else word.removesuffix("s") for word in words}
            mentioned = {
                "colour": set(words) & set(COLOURS),
                "texture": set(words) & set(TEXTURES),
                "shape": ({*words} | singular) & set(SHAPES),
            }
            for attribute, values in mentioned.items():
                assert values <= {getattr(thing, attribute) for thing in scene.things}, text
            assert any(mentioned.values()), text
            numbers = [COUNTS.index(word) + 1 for word in words if word in COUNTS]
            assert numbers in ([], [len(scene.things)]), text


def test_relations_in_captions_agree_with_the_positions_of_the_things() -> None:
    words = {"left of": (0, 1), "right of": (0, -1), "above": (1, 1), "over": (1, 1), "below": (1, -1),
             "under": (1, -1)}  # fmt: skip
    checked = 0
    for index, scene in enumerate(scenes(400, "pair")):
        text = write_caption(scene, np.random.default_rng(index), 2.0)
        relation = [word for word in words if f" {word} " in text]
        if len(relation) != 1 or text.startswith("under"):
            continue
        before, after = text.split(f" {relation[0]} ")
        first, second = (next(thing for thing in scene.things if thing.shape in part) for part in (before, after))
        axis, sign = words[relation[0]]
        assert sign * ((second.x, second.y)[axis] - (first.x, first.y)[axis]) > 0, text
        checked += first is not second
    assert checked > 200


def test_captions_fit_the_context_length_of_the_demo() -> None:
    tokenizer = ClipTokenizer(32)
    texts = [write_caption(scene, np.random.default_rng(index), 2.0) for index, scene in enumerate(scenes(1000))]
    assert max(len(tokenizer.encode(text)) for text in texts) <= 30


def test_things_are_inside_the_image_and_do_not_overlap() -> None:
    for scene in scenes(400):
        for thing in scene.things:
            assert thing.radius <= thing.x <= 1 - thing.radius and thing.radius <= thing.y <= 1 - thing.radius
        if scene.kind == "group":
            for first in scene.things:
                gaps = [np.hypot(first.x - other.x, first.y - other.y) for other in scene.things if other is not first]
                assert min(gaps) > first.radius + scene.things[0].radius


def painted(thing: str, colour: str, seed: int, size: int = 64, texture: str = "plain", place: str = "snow") -> Array:
    """Return the pixels [size, size, 3] of a large thing."""
    scene = Scene("single", place, (Thing(thing, colour, texture, "large", 0.5, 0.5, 0.4, 0.0),))
    return render(scene, size, np.random.default_rng(seed))


def silhouette(shape: str) -> Array:
    """Return the pixels [64, 64] that a black thing covers on sand; its rim is brighter."""
    return painted(shape, "black", 0, place="sand").max(axis=-1) < 65


def test_silhouettes_of_different_shapes_differ_and_symmetric_ones_are_symmetric() -> None:
    masks = {shape: silhouette(shape) for shape in SHAPES}
    for shape, mask in masks.items():
        assert 0.05 < mask.mean() < 0.6
        for other in set(SHAPES) - {shape}:
            assert (mask & masks[other]).sum() / (mask | masks[other]).sum() < 0.85, (shape, other)
        if shape != "crescent":
            assert (mask != mask[:, ::-1]).sum() <= 0.03 * mask.sum(), shape
        if shape in ("circle", "square", "cross", "ring", "diamond"):
            assert (mask != mask[::-1]).sum() <= 0.03 * mask.sum(), shape
    # The circle's radius is 0.9 of the thing's.
    assert masks["circle"].sum() == pytest.approx(np.pi * (0.9 * 0.4 * 64) ** 2, rel=0.04)


def test_the_painted_colour_is_nearest_to_the_named_one() -> None:
    def middle(colour: str, seed: int) -> Array:
        return painted("square", colour, seed, size=48)[18:30, 18:30].mean(axis=(0, 1))

    means = {colour: middle(colour, 1) for colour in COLOURS}
    for index in range(30):
        for colour in COLOURS:
            patch = middle(colour, 100 + index)
            assert min(means, key=lambda other: np.abs(patch - means[other]).max()) == colour


def test_only_plain_things_have_a_single_shade() -> None:
    for texture in TEXTURES:
        patch = painted("square", "red", 2, texture=texture)[14:50, 14:50].mean(axis=-1)
        assert (patch.std() > 15) == (texture != "plain"), texture


def contrasts(category: str, count: int = 60) -> list[tuple[list[Scene], tuple[str, str]]]:
    return [sample_contrast(np.random.default_rng([11, index]), category) for index in range(count)]


@pytest.mark.parametrize("category", ["attribute", "relation", "order"])
def test_a_bag_of_words_cannot_tell_the_captions_of_a_swap_apart(category: str) -> None:
    for _, (right, wrong) in contrasts(category):
        assert right != wrong and Counter(right.split()) == Counter(wrong.split())


@pytest.mark.parametrize("category", ["attribute", "relation", "order", "count", "negation"])
def test_each_caption_of_a_contrast_is_true_of_its_scene_only(category: str) -> None:
    for pair, captions in contrasts(category):
        assert len(pair) == (1 if category == "order" else 2)
        for place, caption in enumerate(captions):
            assert [is_true(caption, scene, category) for scene in pair] == [row == place for row in range(len(pair))]


def is_true(caption: str, scene: Scene, category: str) -> bool:
    """Read a caption of a contrast by its words alone."""
    named = re.findall(rf"an? ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})", caption)
    present = {(thing.colour, thing.shape): thing for thing in scene.things}
    if category == "attribute":
        return len(named) == 2 and set(named) == set(present)
    if category == "count":
        number, colour, shapes = caption.split()
        one = re.sub("(?<=cross)es$|(?<!cros)s$", "", shapes)
        return number == COUNTS[len(scene.things) - 1] and set(present) == {(colour, one)}
    if category == "negation":
        article, shape, _, _, *rest = caption.split()
        assert article == ("an" if shape == "arrow" else "a") and shape == scene.things[0].shape
        return (scene.things[0].colour == rest[-1]) == (len(rest) == 1)
    relation = re.fullmatch(r"(an? \w+ \w+) (left of|to the left of|right of|to the right of|above|over|below|under) "
                            r"(an? \w+ \w+)", caption)  # fmt: skip
    if relation is None or len(named) != 2 or not set(named) <= set(present):
        return False
    first, second = (present[name] for name in named)
    along = "x" if "left" in relation[2] or "right" in relation[2] else "y"
    sign = 1 if relation[2].split()[-1] in ("above", "over") or "left" in relation[2] else -1
    return sign * (getattr(second, along) - getattr(first, along)) > 0


@pytest.mark.medium
def test_the_compositional_dataset_leaves_the_other_files_as_they_are(small: Path, tmp_path: Path) -> None:
    make(tmp_path / "more", dataclasses.replace(SMALL, composition=4))
    before, after = files(small), files(tmp_path / "more")
    added = {name for name in after if name.startswith("downstream/scenes_composition/")}
    assert {name: after[name] for name in after.keys() - added - {"world.json"}} == {
        name: before[name] for name in before.keys() - {"world.json"}
    }
    dataset = open_tar_dataset(tmp_path / "more/downstream", "scenes_composition")
    assert isinstance(dataset, ChoiceDataset) and len(dataset.images) == 4 * 9
    assert Counter(example.category for example in dataset.examples) == {
        **{name: 8 for name in ("attribute", "relation", "count", "negation")}, "order": 4,
        **{f"{name}_group": 4 for name in ("attribute", "relation", "count", "negation")},
    }  # fmt: skip
    assert all(example.pairs == {(0, 0), (1, 1)} for example in dataset.examples if example.category.endswith("_group"))
