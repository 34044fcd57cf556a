"""The tiled KME score against its reference implementation and float64 sums over all pairs of points."""

from __future__ import annotations

import logging
import math
import sys

import pytest
import torch

from clipzoo.ops import kme, tiles
from clipzoo.ops.kme import kme_score
from tests.support.largest_tensor import LargestTensor
from tests.support.point_sets import all_pairs, differentiated, point_sets

SHAPES = [(1, 1, 1, 1, 1), (3, 5, 7, 2, 11), (5, 1, 2, 9, 3), (7, 13, 11, 17, 19), (16, 31, 8, 29, 64)]
"""n, M, k, M', d."""
GAMMAS = [1e-3, 0.1, 7.14, 20.7, 20.9, 50.0, 1e3]
"""Both sides of the bound between the two ways through a tile."""

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_gamma = pytest.mark.parametrize("gamma", GAMMAS)


@every_shape
@every_gamma
@pytest.mark.parametrize("ragged", [False, True], ids=["full", "ragged"])
def test_fp32_score_and_gradients_are_those_of_float64_sums(shape, gamma, ragged):
    sets = point_sets(shape, gamma, ragged)
    exact, exact_gradients = differentiated(all_pairs, sets)
    scores, gradients = differentiated(kme_score, tuple(tensor.float() for tensor in sets))
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)
    for ours, expected in zip(gradients, exact_gradients, strict=True):
        assert (ours.double() - expected).norm() <= 1e-4 * expected.norm() + 1e-30


@every_shape
@every_gamma
def test_fp64_score_and_gradients_equal_the_reference_implementation(shape, gamma):
    sets = point_sets(shape, gamma, ragged=True)
    exact, exact_gradients = differentiated(kme.kme_score_reference, sets)
    scores, gradients = differentiated(kme_score, sets)
    torch.testing.assert_close(scores, exact, rtol=1e-12, atol=1e-12)
    for ours, expected in zip(gradients, exact_gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gamma", [7.14, 1e3])
@pytest.mark.parametrize("tile", [1, 7, 40])
def test_tiles_change_neither_values_nor_gradients_and_bound_the_memory(monkeypatch, gamma, tile):
    sets = point_sets((9, 4, 11, 6, 3), gamma, ragged=True)
    whole, gradients = differentiated(kme_score, sets)
    monkeypatch.setattr(kme, "_TILE", tile)
    with LargestTensor() as largest:
        tiled, tiled_gradients = differentiated(kme_score, sets)
    torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tiled_gradients, gradients, rtol=1e-10, atol=1e-12)
    # A tile may exceed its bound by half a sample on each side; scores and points are held whole.
    assert largest.elements <= max((tile + 4) * (tile + 6), 9 * 11, 11 * 6 * 3)


@pytest.mark.parametrize("gamma", [7.14, 1e3])
def test_padding_points_have_no_effect_and_no_gradient(gamma):
    points, log_weights, *text, scale = point_sets((4, 5, 6, 3, 8), gamma, ragged=False)
    alone, gradients = differentiated(kme_score, (points, log_weights, *text, scale))
    padded = torch.nn.functional.pad(points, (0, 0, 2, 3), value=0.3)
    padded_weights = torch.nn.functional.pad(log_weights, (2, 3), value=-math.inf)
    scores, padded_gradients = differentiated(kme_score, (padded, padded_weights, *text, scale))
    torch.testing.assert_close(scores, alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(padded_gradients[0][:, 2:-3], gradients[0], rtol=1e-10, atol=1e-12)
    assert padded_gradients[0][:, :2].abs().sum() == padded_gradients[1][:, -3:].abs().sum() == 0


@pytest.mark.parametrize("gamma", [7.14, 1e3])
def test_set_without_points_scores_minus_infinity_with_finite_gradients(gamma):
    points, log_weights, text, text_weights, scale = point_sets((4, 5, 6, 3, 8), gamma, ragged=True)
    empty = log_weights.clone(), text_weights.clone()
    empty[0][2], empty[1][0] = -math.inf, -math.inf
    scores, gradients = differentiated(kme_score, (points, empty[0], text, empty[1], scale))
    assert (scores[2] == -math.inf).all() and (scores[:, 0] == -math.inf).all()
    kept = torch.tensor([0, 1, 3]), torch.arange(1, 6)
    rest = points[kept[0]], log_weights[kept[0]], text[kept[1]], text_weights[kept[1]], scale
    torch.testing.assert_close(scores[kept[0]][:, kept[1]], kme_score(*rest), rtol=1e-12, atol=1e-12)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("gamma", [7.14, 50.0, 1e4])
def test_shares_of_a_score_add_up_to_one_whatever_its_exponents(gamma):
    """More weight for all points of an image is as much more in its scores, though exponents of 1e4 keep few digits."""
    sets = [tensor.float() for tensor in point_sets((6, 7, 5, 4, 16), gamma, ragged=False)]
    weights = sets[1].requires_grad_()
    (shares,) = torch.autograd.grad(kme_score(*sets).sum(), weights)
    torch.testing.assert_close(shares.sum(dim=1), torch.full((6,), 5.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("gamma", [7.14, 1e3])
def test_identical_points_of_a_sample_are_computed_once_with_the_same_score_and_gradients(gamma):
    points, log_weights, text, text_weights, scale = point_sets((4, 5, 6, 3, 8), gamma, ragged=True)
    repeated = torch.cat([text, text[:, :2], text[:, 1:2]], dim=1)
    weights = torch.cat([text_weights, text_weights[:, :2] + 1, torch.zeros(6, 1)], dim=1)
    sets = points, log_weights, repeated, weights, scale
    exact, exact_gradients = differentiated(all_pairs, sets)
    scores, gradients = differentiated(kme_score, sets)
    torch.testing.assert_close(scores, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, exact_gradients, rtol=1e-9, atol=1e-11)
    lengths = kme.pack(repeated, weights).layout.lengths
    assert all(length <= 3 for length in lengths) and sum(lengths) < int((weights > -math.inf).sum())
    # Points that share only their first coordinates stay apart.
    alike = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0))
    alike[:, 1, :16] = alike[:, 0, :16]
    assert kme.pack(alike, torch.zeros(2, 3)).layout.lengths == [3, 3]


@pytest.mark.parametrize("gamma", [7.14, 50.0])
def test_backward_can_be_called_twice_and_nan_propagates_to_the_score(gamma):
    sets = [tensor.requires_grad_() for tensor in point_sets((3, 4, 5, 2, 6), gamma, ragged=True)]
    total = kme_score(*sets).sum()
    first = torch.autograd.grad(total, sets, retain_graph=True)
    assert all(torch.equal(*pair) for pair in zip(first, torch.autograd.grad(total, sets), strict=True))
    for broken in range(4):
        sets = [tensor.clone() for tensor in point_sets((3, 4, 5, 2, 6), gamma, ragged=False)]
        sets[broken][0, 0] = math.nan
        assert kme_score(*sets).isnan().any()


def test_score_of_one_point_of_weight_one_is_the_scaled_cosine_minus_one():
    """KME-CLIP, proposition 2."""
    points, _, text, _, _ = point_sets((3, 1, 4, 1, 5), 1.0, ragged=False)
    scores = kme_score(points, torch.zeros(3, 1).double(), text, torch.zeros(4, 1).double(), torch.tensor(3.0).double())
    torch.testing.assert_close(scores, 6 * (points[:, 0] @ text[:, 0].mT - 1), rtol=1e-13, atol=1e-13)


def test_gradient_of_gamma_is_accurate_for_nearly_coinciding_points():
    """Its two terms then cancel but for one part in a million."""
    generator = torch.Generator().manual_seed(0)
    points = torch.nn.functional.normalize(torch.randn(4, 3, 16, generator=generator, dtype=torch.float64), dim=-1)
    near = torch.nn.functional.normalize(points + 1e-3 * torch.randn(4, 3, 16, generator=generator), dim=-1)
    weights = torch.zeros(4, 3, dtype=torch.float64)
    sets = points, weights, near, weights, torch.tensor(100.0, dtype=torch.float64)
    _, exact = differentiated(all_pairs, sets)
    _, gradients = differentiated(kme_score, sets)
    torch.testing.assert_close(gradients[-1], exact[-1], rtol=1e-8, atol=0)


def test_half_precision_is_scored_in_fp32():
    sets = tuple(tensor.bfloat16() for tensor in point_sets((3, 4, 5, 2, 6), 7.0, ragged=True))
    scores, gradients = differentiated(kme_score, sets)
    assert scores.dtype == torch.float32 and gradients[0].dtype == torch.bfloat16
    exact, _ = differentiated(all_pairs, tuple(tensor.double() for tensor in sets))
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)


def test_products_are_true_fp32_without_global_settings():
    before = torch.get_float32_matmul_precision()
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(70, 301, generator=generator), torch.randn(90, 301, generator=generator)
    bias = torch.randn(90, generator=generator)
    exact = left.double() @ right.double().mT
    for ours, expected in (
        (tiles.product(left, right), exact),
        (tiles.product(left, right, bias), exact + bias),
        (tiles.product(left.mT.contiguous().mT, right), exact),
        (tiles.product(left, right.mT.contiguous().mT), exact),
    ):
        assert (ours - expected).abs().max() < 1e-6 * exact.abs().max()
    assert torch.get_float32_matmul_precision() == before


def test_double_precision_and_a_gpu_without_triton_log_a_warning(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        assert tiles.backend.__wrapped__("kme", "cuda", torch.float64) is kme
        assert "no kernels for torch.float64" in caplog.text
        caplog.clear()
        monkeypatch.setitem(sys.modules, "clipzoo.ops.triton_kme", None)
        assert tiles.backend.__wrapped__("kme", "cuda", torch.float32) is kme
    assert "slower than Triton's" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "side"),
    [
        ([], 1280),
        (["1024K", "32M", "unknown", ""], 1280),
        (["16M", "32K"], 896),
        (["1M"], 640),
        (["260M"], 1280),
    ],
)
def test_a_tile_takes_a_fifth_of_the_largest_cache_that_linux_reports_within_bounds(sizes, side, tmp_path):
    for index, size in enumerate(sizes):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert tiles.tile_side(tmp_path) == side
