"""FILIP's maxima in tiles against loops in float64 and the reference implementation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipzoo.ops import filip
from clipzoo.ops.filip import filip_scores, filip_scores_reference, position_type
from clipzoo.ops.tiles import without_padding
from tests.support.largest_tensor import LargestTensor
from tests.support.token_sets import by_loops, differentiated, token_sets

SHAPES = [(1, 1, 1, 1, 1), (3, 5, 7, 2, 11), (5, 1, 2, 9, 3), (7, 13, 11, 17, 19), (2, 300, 3, 4, 8)]
"""n, M, k, L, d."""

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@every_shape
@pytest.mark.parametrize("ragged", [False, True], ids=["full", "ragged"])
def test_scores_and_gradients_are_those_of_loops_and_of_the_reference(shape, ragged):
    sets = token_sets(shape, ragged)
    exact, exact_gradients = differentiated(by_loops, sets)
    for score in (filip_scores, filip_scores_reference):
        scores, gradients = differentiated(score, sets)
        torch.testing.assert_close(scores, exact, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(gradients, exact_gradients, rtol=1e-12, atol=1e-13)
    single = tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in sets)
    scores, _ = differentiated(filip_scores, single)
    torch.testing.assert_close(scores, tuple(score.float() for score in exact), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tile", [1, 7, 40])
def test_tiles_change_neither_values_nor_gradients_and_bound_the_memory(monkeypatch, tile):
    images, points, texts, words, width = 9, 4, 11, 6, 3
    sets = token_sets((images, points, texts, words, width), ragged=True)
    whole, gradients = differentiated(filip_scores, sets)
    monkeypatch.setattr(filip, "tile_side", lambda: tile)
    with LargestTensor() as largest:
        tiled, tiled_gradients = differentiated(filip_scores, sets)
    torch.testing.assert_close(tiled, whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(tiled_gradients, gradients, rtol=1e-12, atol=1e-13)
    # A tile may exceed its bound by half a sample on each side; the positions of the maxima are held whole.
    assert largest.elements <= max((tile + points) * (tile + words), images * texts * words)
    assert largest.elements < images * points * texts * words / 2


def test_padding_and_sets_without_points_have_no_effect_and_no_gradient():
    image, image_mask, text, text_mask = token_sets((4, 5, 6, 3, 8), ragged=False)
    alone, gradients = differentiated(filip_scores, (image, image_mask, text, text_mask))
    padded = torch.nn.functional.pad(image, (0, 0, 2, 3), value=9.0)
    mask = torch.nn.functional.pad(image_mask, (2, 3))
    scores, padded_gradients = differentiated(filip_scores, (padded, mask, text, text_mask))
    torch.testing.assert_close(scores, alone, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(padded_gradients[0][:, 2:-3], gradients[0], rtol=1e-13, atol=1e-13)
    assert padded_gradients[0][:, :2].abs().sum() == padded_gradients[0][:, -3:].abs().sum() == 0
    for empty in ([0], [2, 5], [5]):
        without = text_mask.index_fill(0, torch.tensor(empty), False)
        rest = [row for row in range(6) if row not in empty]
        scores, gradients = differentiated(filip_scores, (image, image_mask, text, without))
        for direction, expected in zip(scores, alone, strict=True):
            torch.testing.assert_close(direction[:, rest], expected[:, rest], rtol=1e-13, atol=1e-13)
            assert (direction[:, empty] == 0).all()
        assert (gradients[1][empty] == 0).all() and gradients[0].isfinite().all()


def test_nan_propagates_and_backward_can_be_called_twice():
    image, image_mask, text, text_mask = token_sets((3, 4, 5, 2, 6), ragged=True)
    image.requires_grad_()
    total = sum(score.square().sum() for score in filip_scores(image, image_mask, text, text_mask))
    first = torch.autograd.grad(total, image, retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(total, image))
    broken = image.detach().clone()
    broken[0, 0] = math.nan
    assert all(score[0].isnan().all() for score in filip_scores(broken, image_mask, text, text_mask))


def test_kept_positions_are_one_byte_for_sets_of_256_points():
    for points, dtype in ((256, torch.uint8), (257, torch.int16)):
        image = normalize(torch.randn(1, points, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
        mask = torch.ones(1, points, dtype=torch.bool)
        assert position_type(without_padding(mask, [points], image)[0]) == dtype
        # The last point is the largest for a text equal to it.
        to_text, to_image = filip_scores(image, mask, image[:, -1:], mask[:, -1:])
        torch.testing.assert_close(to_image, torch.ones(1, 1))
        assert to_text < 1


def test_half_precision_is_scored_in_fp32():
    sets: tuple[Tensor, ...] = token_sets((3, 4, 5, 2, 6), ragged=True)
    half = tuple(tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in sets)
    scores, gradients = differentiated(filip_scores, half)
    assert scores[0].dtype == torch.float32 and gradients[0].dtype == torch.bfloat16
