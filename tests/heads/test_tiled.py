"""Tiled scores equal the scores of the matrix; tests/objectives/test_ranks.py compares them on several ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from clipzoo.build import build_objective
from clipzoo.distributed.world import World
from clipzoo.heads.pairs import Scope
from clipzoo.heads.scores import automatic_tile, tiled_anchors, tiled_scores
from clipzoo.heads.vector import VectorHead
from clipzoo.types import Batch, Progress, Similarity
from scripts.compatibility import composed
from tests.support.heads import HEADS, build_head, every_answer, image_features, rows, text_features
from tests.support.largest_tensor import LargestTensor
from tests.support.objectives import loss_of
from tests.support.ranks import run_ranks
from tests.support.unit_vectors import answered, dense_scores, factors

SAMPLES = 12
NARROW = ["clip", "cloob", "distance"]
VECTOR_HEADS = [name for name in HEADS if isinstance(build_head(name), VectorHead)]


@pytest.mark.parametrize("tile", [1, 4, 7, 100])
@pytest.mark.parametrize(("samples", "scale"), [(2, 1.0), (7, 100.0), (23, 14.3), (16, 3000.0)])
def test_tiled_answers_and_gradients_are_those_of_the_matrix(samples, scale, tile):
    left, right = factors(samples, scale)
    exact, exact_gradients = answered(left, right, dense_scores)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        answers, gradients = answered(left.to(dtype), right.to(dtype), lambda *sides: tiled_scores(*sides, tile))
        torch.testing.assert_close(answers.double(), exact, rtol=tolerance, atol=tolerance * scale)
        for ours, expected in zip(gradients, exact_gradients, strict=True):
            assert (ours.double() - expected).norm() <= 10 * tolerance * expected.norm()


def test_a_single_pair_has_no_negatives():
    left, right = factors(1, 2.0)
    for scores in tiled_scores(left, right, 4):
        torch.testing.assert_close(scores.log_sum_exp(), scores.positives())
        assert scores.log_sum_exp(exclude_positive=True).item() == -math.inf
    _, gradients = answered(left, right, lambda *sides: tiled_scores(*sides, 4), exclude=(False,))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_scores_are_tiled_as_soon_as_a_ranks_matrix_takes_128_mebibytes():
    assert automatic_tile(4096, 8192) == 1024 and automatic_tile(4096, 8191) is None


def test_anchors_alone_are_the_first_direction():
    left, right = factors(9, 10.0)
    exact, exact_gradients = answered(left, right, lambda *sides: dense_scores(*sides)[:1])
    answers, gradients = answered(left, right, lambda *sides: [tiled_anchors(*sides, 4)])
    torch.testing.assert_close(answers, exact)
    torch.testing.assert_close(gradients, exact_gradients)


def test_no_tensor_is_larger_than_a_tile_or_the_vectors():
    left, right = factors(96, 10.0)
    with LargestTensor() as largest:
        answered(left, right, lambda *sides: tiled_scores(*sides, 16), dense=False)
    assert largest.elements <= max(16 * 16, 96 * 6)


@pytest.mark.parametrize("name", ["siglip objective.initial_scale=10.0", "dcl", "cyclip", "sogclr", "isogclr", "nuclr"])
def test_objectives_of_cosines_need_no_matrix(name):
    option, *changes = name.split()
    objective = build_objective(composed(f"+objective={option}", *changes)).double()
    objective.allocate(4 * 96)
    image, text = (side.requires_grad_() for side in factors(96, 1.0))
    similarity = Similarity(
        *tiled_scores(image, text, 16), lambda: tiled_anchors(image, image, 16), lambda: tiled_anchors(text, text, 16)
    )
    with LargestTensor() as largest:
        loss = objective(similarity, Batch(image, text, torch.arange(96)), Progress(0, 8, 4 * 96, 96)).total
        assert all(gradient.abs().sum() > 0 for gradient in torch.autograd.grad(loss, (image, text)))
    # Vectors, and the state of the dataset.
    assert largest.elements <= max(16 * 16, 2 * 96 * 5, 2 * 4 * 96)


@pytest.mark.parametrize("name", VECTOR_HEADS)
def test_vector_heads_give_the_same_results_in_tiles(name):
    head = build_head(name)
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    expected = every_answer(head(image_features(7), text_features(7)))
    expected_gradients = torch.autograd.grad(expected, parameters, allow_unused=True)
    answer = every_answer(head(image_features(7), text_features(7), Scope(tile=3)))
    gradients = torch.autograd.grad(answer, parameters, allow_unused=True)
    torch.testing.assert_close(answer, expected, rtol=1e-12, atol=1e-12)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert (gradient is None) == (expected is None)
        assert gradient is None or (gradient - expected).norm() <= 1e-10 * expected.norm()


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    return run_ranks(2, on_this_rank)


@pytest.mark.medium
def test_transposed_rows_are_the_rows_of_the_transpose(two_ranks):
    whole = torch.arange(36.0).view(6, 6)
    transposed, gradients = (
        torch.cat(parts) for parts in zip(*(rank["transposed"] for rank in two_ranks), strict=True)
    )
    torch.testing.assert_close(transposed, whole.mT)
    # Each entry's gradient comes back to its place: the weight given to it was its own value.
    torch.testing.assert_close(gradients, whole)


@pytest.mark.medium
@pytest.mark.parametrize("name", NARROW)
def test_embeddings_gathered_in_bf16_are_rounded_alike_with_and_without_tiles(name, two_ranks):
    exact = infonce(name, None)
    matrix, tiles = (sum(rank["narrow"][name, tile] for rank in two_ranks) / len(two_ranks) for tile in (None, 4))
    torch.testing.assert_close(tiles, matrix, rtol=1e-10, atol=1e-10)
    assert 1e-7 < abs(matrix - exact) < 2e-2 * abs(exact)


def on_this_rank() -> dict:
    world = World.from_process_group()
    narrow = replace(world, gather_dtype=torch.bfloat16)
    return {
        "transposed": _transposed(world),
        "narrow": {(name, tile): infonce(name, tile, narrow) for name in NARROW for tile in (None, 4)},
    }


def infonce(name: str, tile: int | None, world: World = World()) -> Tensor:
    """The loss of this rank's share of the samples."""
    count = SAMPLES // world.size
    mine = slice(world.rank * count, (world.rank + 1) * count)
    image, text = (rows(features, mine) for features in (image_features(SAMPLES), text_features(SAMPLES)))
    similarity = build_head(name)(image, text, Scope(world, tile))
    return loss_of(build_objective(composed("+objective=infonce")), similarity).total.detach()


def _transposed(world: World) -> tuple[Tensor, Tensor]:
    count = 6 // world.size
    first = world.rank * count
    mine = torch.arange(36.0).view(6, 6)[first : first + count].clone().requires_grad_()
    turned = world.transpose(mine)
    (gradient,) = torch.autograd.grad((turned * turned.detach()).sum(), mine)
    return turned.detach(), gradient
