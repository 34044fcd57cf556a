"""Worlds whose captions have known probabilities."""

from __future__ import annotations

import argparse
from dataclasses import replace
from fractions import Fraction
from math import log

import numpy as np
import pytest
from scipy import stats

from clipzoo.errors import ConfigError
from clipzoo.lab.worlds.world import (
    NATURAL,
    OPENINGS,
    VARIANTS,
    CaptionSettings,
    EnumeratedWorld,
    Object,
    WorldParameters,
    add_arguments,
    retrieval_example,
    training_sample,
)

SMALL = CaptionSettings(several=0.5, partial=0.25, openings=2, popularity=1.0, unmatched=0.125)


@pytest.mark.parametrize("settings", [SMALL, *VARIANTS.values()])
def test_probabilities_equal_those_counted_from_the_words_of_a_caption(settings: CaptionSettings) -> None:
    world = EnumeratedWorld(3, 2, settings)
    scenes = [Fraction(1)] * len(world.scenes)
    if settings.popularity:
        rank = {item: place for place, item in enumerate(world.objects, 1)}
        scenes = [Fraction(1, rank[first] * rank[second]) for first, second in world.scenes]
    chances = [weight / sum(scenes) for weight in scenes]
    for column, caption in enumerate(world.captions):
        matched = [chance_by_words(caption, scene, settings) for scene in world.scenes]
        base = sum(chance * value for chance, value in zip(chances, matched, strict=True))
        share = Fraction(settings.unmatched)
        given = [(1 - share) * value + share * base for value in matched]
        total = sum(chance * value for chance, value in zip(chances, given, strict=True))
        expected = [log(value / total) if value else -np.inf for value in given]
        assert world.pmi[:, column] == pytest.approx(expected, abs=1e-12)


def chance_by_words(caption: str, scene: tuple[Object, Object], settings: CaptionSettings) -> Fraction:
    """p(caption | scene) without unmatched captions, read off the words of the caption."""
    opening = next(text for text in reversed(OPENINGS) if caption.startswith(text.format("")))
    names = caption.removeprefix(opening.format("")).split(" and ")
    several, partial = Fraction(settings.several), Fraction(settings.partial)
    matches = [[chance_of_name(name, item, partial) for item in scene] for name in names]
    if len(names) == 1:
        chance = (1 - several) * sum(matches[0]) / 2
    else:
        chance = several * (matches[0][0] * matches[1][1] + matches[0][1] * matches[1][0]) / 2
    return chance / settings.openings


def chance_of_name(name: str, item: Object, partial: Fraction) -> Fraction:
    said = name.split()[1:]
    if not set(said) <= set(item):
        return Fraction(0)
    return 1 - partial if len(said) == 2 else partial / 2


@pytest.mark.parametrize("name", VARIANTS)
def test_captions_of_every_scene_have_total_probability_one(name: str) -> None:
    world = EnumeratedWorld(4, 3, VARIANTS[name])
    assert world.caption_given_scene.sum(1) == pytest.approx(1)
    assert (world.scene_probability @ world.caption_given_scene).sum() == pytest.approx(1)
    assert world.information > 0


def test_drawn_captions_have_their_probabilities() -> None:
    world, draws = EnumeratedWorld(2, 2, SMALL), 5000
    expected = draws * world.scene_probability[:, None] * world.caption_given_scene
    random, counts = np.random.default_rng(0), np.zeros_like(expected)
    for _ in range(draws):
        counts[world.draw(random)] += 1
    squares = (np.square(counts - expected) / expected).sum()
    assert squares < stats.chi2.isf(1e-4, expected.size - 1)


def test_unmatched_captions_make_every_pmi_finite() -> None:
    world = EnumeratedWorld(3, 3, SMALL)
    assert np.isfinite(world.pmi).all()
    assert not np.isfinite(replace(world, settings=replace(SMALL, unmatched=0.0)).pmi).all()


def test_captions_that_name_both_objects_completely_determine_their_scene() -> None:
    world = EnumeratedWorld(4, 4, VARIANTS["saturating"])
    assert world.information == pytest.approx(log(len(world.scenes)))


def test_the_image_of_a_scene_shows_its_objects() -> None:
    world = EnumeratedWorld(3, 3, SMALL)
    for scene in range(len(world.scenes)):
        things = world.picture(scene, np.random.default_rng(scene)).things
        assert {(thing.shape, thing.colour) for thing in things} == set(world.scenes[scene])
        assert abs(things[0].x - things[1].x) + abs(things[0].y - things[1].y) > 0.4


@pytest.mark.parametrize("name", ["several", "one"])
def test_splits_of_a_variant_hold_captions_of_their_scenes(name: str) -> None:
    parameters = WorldParameters(
        image_size=16, train=20, shard=20, probe=1, test=1, scenes=3, captions=name, composition=0
    )
    captions = [str(training_sample(parameters, 0, place)["txt"]) for place in range(20)]
    assert {caption.count(" and ") for caption in captions} == {int(name == "several")}
    _, described = retrieval_example(parameters, 0)
    assert len(set(described)) == len(described) == 5


def test_the_command_offers_all_variants() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name in (NATURAL, *VARIANTS):
        assert parser.parse_args(["--captions", name]).captions == name


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CaptionSettings(several=2), "several must be .* not 2"),
        (lambda: CaptionSettings(openings=5), "openings must be a whole number from 1 to 4, not 5"),
        (lambda: EnumeratedWorld(1, 2, SMALL), "shapes must be a whole number from 2 to 10, not 1"),
    ],
)
def test_settings_outside_their_range_are_refused(build, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()
