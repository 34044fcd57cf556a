"""Planted copies of images are found, and other images are not."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from clipzoo.data.maps import duplicates
from clipzoo.data.maps.duplicates import Signatures, earlier_copies, near_pairs
from clipzoo.data.maps.samples import image_facts, image_schema
from clipzoo.data.tables.formats import arrow
from tests.support.textures import copies, jpeg, texture

COUNT = 300


def described(encoded: list[bytes]) -> tuple[np.ndarray, Signatures]:
    table = arrow().Table.from_pylist([image_facts(content, None) for content in encoded], schema=image_schema())
    return table["digest"].to_numpy(), Signatures.of(table)


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


def all_pairs(first: Signatures, second: Signatures) -> set[tuple[int, int]]:
    """`near_pairs` without hash tables: all windows of all images are compared with all whole images."""
    colours = np.abs(first.colour[:, None].astype(int) - second.colour).max(axis=2)
    whole = duplicates._coefficients(second.grey, duplicates.WHOLE)
    pairs = set()
    for window in duplicates.WINDOWS:
        cosines = duplicates._coefficients(first.grey, window) @ whole.T
        near = (cosines >= duplicates.LEAST_COSINE) & (colours <= duplicates.MOST_COLOUR)
        pairs |= set(map(tuple, np.argwhere(near).tolist()))
    return pairs


def test_hash_tables_find_what_a_comparison_of_all_images_finds(originals):
    planted = [content for seed in range(60) for content in copies(texture(seed), seed).values()]
    first, second = (described(encoded)[1] for encoded in (originals[:100], planted))
    expected, found = all_pairs(first, second), set(map(tuple, near_pairs(first, second).tolist()))
    assert found <= expected and len(found) >= 0.97 * len(expected) > 200


def test_images_without_structure_or_of_another_colour_are_no_copies():
    flat = [jpeg(texture(0).point(lambda value, level=level: level)) for level in (0, 1, 255)]
    red, blue, green = texture(1).split()
    colours = [jpeg(texture(1)), jpeg(Image.merge("RGB", (blue, green.point(lambda value: value // 3), red)))]
    digests, images = described([*flat, *colours])
    assert earlier_copies(digests, images)[1].tolist() == list(range(5))
    assert len(near_pairs(images, Signatures(images.grey[:0], images.colour[:0]))) == 0


def test_a_chain_of_copies_keeps_its_first_image_and_those_that_are_not_near_to_it():
    image = texture(3)
    width, height = image.size
    chain = [jpeg(image.crop((number * 4, 0, width, height))) for number in range(12)]
    digests, images = described(chain)
    _, first = earlier_copies(digests, images)
    kept = np.unique(first)
    assert 1 < len(kept) < len(chain) and (first[kept] == kept).all() and (first <= np.arange(len(chain))).all()
