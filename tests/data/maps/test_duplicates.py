"""Planted copies of images are found, and other images are not."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageDraw

from clipzoo.data.maps import duplicates
from clipzoo.data.maps.duplicates import are_copies, earlier_copies, near_pairs, pictures
from clipzoo.data.maps.samples import image_facts, image_schema
from clipzoo.data.tables.formats import arrow
from tests.support.textures import copies, jpeg, texture

COUNT = 300


def described(encoded: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    table = arrow().Table.from_pylist([image_facts(content, None) for content in encoded], schema=image_schema())
    return table["digest"].to_numpy(), pictures(table)


@pytest.fixture(scope="module")
def originals() -> list[bytes]:
    return [jpeg(texture(seed)) for seed in range(COUNT)]


@pytest.mark.medium
def test_planted_copies_are_found_and_at_most_one_percent_of_other_images(originals):
    planted = [copies(texture(seed), seed) for seed in range(0, COUNT, 3)]
    # All exact copies, and the near ones of all kinds.
    encoded = [*originals, *originals[::5], *(content for kinds in planted for content in kinds.values())]
    digests, images = described(encoded)
    equal, first = earlier_copies(digests, images)
    exact = slice(COUNT, COUNT + len(originals[::5]))
    assert equal[exact].tolist() == first[exact].tolist() == list(range(0, COUNT, 5))
    assert (equal[:COUNT] == np.arange(COUNT)).all() and (first[:COUNT] != np.arange(COUNT)).mean() <= 0.01
    kinds = list(planted[0])
    found = first[exact.stop :].reshape(len(planted), len(kinds)) == np.arange(0, COUNT, 3)[:, None]
    assert found.mean() >= 0.95, dict(zip(kinds, found.mean(axis=0), strict=True))


def all_pairs(first: np.ndarray, second: np.ndarray) -> set[tuple[int, int]]:
    """`near_pairs` without hash tables: all windows of all images are compared with all whole images."""
    grey, other = duplicates._grey(first), duplicates._grey(second)
    whole = duplicates._coefficients(other, duplicates.WHOLE)
    cosines = np.stack([duplicates._coefficients(grey, window) @ whole.T for window in duplicates.WINDOWS])
    pairs = np.argwhere(cosines.max(axis=0) >= duplicates.LEAST_COSINE)
    best = np.array(duplicates.WINDOWS)[cosines.argmax(axis=0)[tuple(pairs.T)]]
    return set(map(tuple, pairs[are_copies(first[pairs[:, 0]], second[pairs[:, 1]], best)].tolist()))


def test_hash_tables_find_what_a_comparison_of_all_images_finds(originals):
    planted = [content for seed in range(60) for content in copies(texture(seed), seed).values()]
    first, second = (described(encoded)[1] for encoded in (originals[:100], planted))
    expected, found = all_pairs(first, second), set(map(tuple, near_pairs(first, second).tolist()))
    assert found <= expected and len(found) >= 0.97 * len(expected) > 200


def test_a_candidate_is_aligned_with_the_part_that_the_other_image_shows():
    """The search begins at another window, and finds crops of any size and place; other places are no copies."""
    random, image = np.random.default_rng(0), texture(7, (480, 360))
    boxes = [(random.uniform(0, 40), random.uniform(0, 30), random.uniform(440, 480), random.uniform(330, 360))
             for _ in range(20)]  # fmt: skip
    crops = [jpeg(image.crop(box)) for box in boxes]
    first, second = described([jpeg(image)])[1], described(crops)[1]
    centre = np.array([(0.05, 0.05, 0.9)] * 20)
    assert are_copies(first.repeat(20, axis=0), second, centre).mean() >= 0.9
    assert not are_copies(first.repeat(20, axis=0), second[:, ::-1], centre).any()


def test_drawings_of_one_composition_with_other_details_are_no_copies():
    def scene(colour: str, left: int) -> bytes:
        image = Image.new("RGB", (64, 64), "khaki")
        draw = ImageDraw.Draw(image)
        draw.rectangle((0, 40, 63, 63), "darkgreen")
        draw.rectangle((6, 14, 30, 50), "navy")
        draw.ellipse((left, 20, left + 14, 34), colour)
        return jpeg(image, 95)

    _, images = described([scene("red", 40), scene("purple", 40), scene("red", 46), scene("red", 40)])
    assert earlier_copies(np.arange(4, dtype=np.uint64), images)[1].tolist() == [0, 1, 2, 0]


def test_images_without_structure_or_of_another_colour_are_no_copies():
    flat = [jpeg(texture(0).point(lambda value, level=level: level)) for level in (0, 1, 255)]
    red, blue, green = texture(1).split()
    colours = [jpeg(texture(1)), jpeg(Image.merge("RGB", (blue, green.point(lambda value: value // 3), red)))]
    digests, images = described([*flat, *colours])
    assert earlier_copies(digests, images)[1].tolist() == list(range(5))
    assert len(near_pairs(images, images[:0])) == 0


def test_a_chain_of_copies_keeps_its_first_image_and_those_that_are_not_near_to_it():
    image = texture(3)
    width, height = image.size
    chain = [jpeg(image.crop((number * 4, 0, width, height))) for number in range(12)]
    digests, images = described(chain)
    _, first = earlier_copies(digests, images)
    kept = np.unique(first)
    assert 1 < len(kept) < len(chain) and (first[kept] == kept).all() and (first <= np.arange(len(chain))).all()
