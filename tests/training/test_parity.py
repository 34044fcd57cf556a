"""Ranks and micro-batches change no gradient, for every compatible pair of head and objective."""

from __future__ import annotations

import pytest
import torch

from clipzoo.distributed.world import World
from scripts.gradient_parity import (
    PARTS,
    bytes_of_encoder,
    compatible_pairs,
    difference,
    gradients,
    open_clip_gradients,
    training,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.medium

Pair = tuple[str, str]


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    # An objective reads only scores: two objectives are enough for the heads that take longest.
    return [pair for pair in compatible_pairs() if pair[0] not in ("flair", "llip") or pair[1] in ("siglip", "flair")]


@pytest.fixture(scope="module")
def some(pairs) -> list[Pair]:
    """Every head with InfoNCE or the objectives of its paper, every objective with CLIP or cosines."""
    return [pair for pair in pairs if pair[0] in ("clip", "cosine", "flair", "llip") or pair[1] == "infonce"]


@pytest.fixture(scope="module")
def alone(some):
    return {pair: gradients(pair, 1) for pair in some}


@pytest.fixture(scope="module")
def every_alone(pairs):
    return {pair: gradients(pair, 1) for pair in pairs}


@pytest.fixture(scope="module")
def two_ranks(some):
    return run_ranks(2, all_gradients, some, PARTS)


def all_gradients(pairs: list[Pair], parts: int):
    """Ours in `parts` micro-batches; open_clip's of the whole batch, and with the recommended flags in `parts`."""
    world = World.from_process_group()
    recommended = open_clip_gradients(parts, world, recommended=True)
    return {pair: gradients(pair, parts, world) for pair in pairs}, open_clip_gradients(1, world), recommended


def assert_equal(actual, expected):
    far = {pair: difference(actual[pair], expected[pair]) for pair in expected}
    assert max(far.values()) < 1e-10, {pair: value for pair, value in far.items() if not value < 1e-10}


def test_two_ranks_with_micro_batches_have_the_gradients_of_one_whole_batch(pairs, some, alone, two_ranks):
    assert all({pair[part] for pair in some} == {pair[part] for pair in pairs} for part in (0, 1))
    for actual, *_ in two_ranks:
        assert_equal(actual, alone)


@pytest.mark.parametrize("pairs_of", ["alone", pytest.param("every_alone", marks=pytest.mark.slow)])
def test_every_pair_has_gradients_in_both_towers_and_moves_its_temperature(request, pairs_of):
    alone = request.getfixturevalue(pairs_of)
    for pair, actual in alone.items():
        first = [actual[f"model.encoder.{view}_tower.0.weight"] for view in ("image", "text")]
        assert all(gradient.abs().max() > 1e-9 for gradient in first), pair
    assert all(alone["clip", "infonce"][name].abs() > 1e-6 for name in alone["clip", "infonce"] if "scale" in name)
    assert any("scale" in name for name in alone["clip", "infonce"])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parts"), [(1, PARTS), (2, 1), (2, PARTS), (4, 1), (4, PARTS)])
def test_any_ranks_and_micro_batches_have_the_gradients_of_one_whole_batch(pairs, every_alone, ranks, parts):
    assert len(pairs) > 100
    for actual, *_ in run_ranks(ranks, all_gradients, pairs, parts, seconds=280):
        assert_equal(actual, every_alone)


def test_the_comparison_sees_open_clips_smaller_encoder_gradients(two_ranks):
    """Its default flags: gradients of the towers are 1/ranks of what the loss has, the temperature's is whole."""
    expected, actual = open_clip_gradients(1), two_ranks[0][1]
    torch.testing.assert_close(actual["logit_scale"], expected["logit_scale"], rtol=1e-9, atol=0)
    for name in ("image_projection.weight", "text_projection.weight"):
        torch.testing.assert_close(2 * actual[name], expected[name], rtol=1e-9, atol=1e-12)


def test_open_clips_recommended_flags_are_exact_except_for_the_accumulated_temperature(two_ranks):
    """Every micro-batch adds the temperature's whole gradient."""
    expected, actual = open_clip_gradients(1), two_ranks[0][2]
    torch.testing.assert_close(actual["logit_scale"], PARTS * expected["logit_scale"], rtol=1e-9, atol=0)
    for name in ("image_projection.weight", "text_projection.weight"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-12)


def all_trainings(pairs: list[Pair], steps: int, groups: list[int | None]):
    """Trainings in micro-batches, in one process group, by the number of ranks that divide the weights."""
    world = World.from_process_group()
    return {group: {pair: training(pair, steps, PARTS, group, world) for pair in pairs} for group in groups}


def test_ranks_that_divide_the_weights_train_as_one_rank_does():
    pairs = [("clip", "infonce"), ("cosine", "nuclr"), ("kme", "infonce")]
    expected = {pair: training(pair, 5, 1, None) for pair in pairs}
    for actual in run_ranks(2, all_trainings, pairs, 5, [2]):
        assert_equal(actual[2], expected)


@pytest.fixture(scope="module")
def trained_alone(pairs):
    return {pair: training(pair, 5, 1, None) for pair in pairs}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "group"), [(2, None), (2, 2), (4, None), (4, 4), (4, 2)])
def test_any_pair_trains_as_on_one_rank(pairs, trained_alone, ranks, group):
    """With ddp, and with weights that groups of ranks divide."""
    for actual in run_ranks(ranks, all_trainings, pairs, 5, [group], seconds=800):
        assert_equal(actual[group], trained_alone)


def held_bytes(groups: list[int | None]):
    world = World.from_process_group()
    return {group: bytes_of_encoder(group, world) for group in groups}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_holds_its_share_of_weights_and_optimizer_state(ranks):
    """Of an encoder whose parameters each have a dimension that the ranks divide; others need up to one row more."""
    whole = bytes_of_encoder(None, World())
    for held in run_ranks(ranks, held_bytes, [None, ranks, 2]):
        assert held[None] == whole
        for group in (ranks, 2):
            assert whole / group <= held[group] <= (1 / group + 0.05) * whole
