"""Merged points approximate the score of KME-CLIP from below."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import normalize

from clipzoo.heads.kme import merged, spread
from clipzoo.ops.kme import kme_score_reference
from clipzoo.types import PointSet
from tests.support.heads import build_head, image_features, scored, text_features


def drawn(samples: int, count: int, seed: int = 0) -> PointSet:
    generator = torch.Generator().manual_seed(seed)
    points = normalize(torch.randn(samples, count, 6, generator=generator).double(), dim=-1)
    return PointSet(points, torch.randn(samples, count, generator=generator).double())


def test_total_weights_and_weighted_sums_are_kept():
    points = drawn(3, 11)
    few = merged(points, 4)
    assert few.points.shape == (3, 4, 6)
    for one, other in ((points, few),):
        torch.testing.assert_close(one.log_weights.logsumexp(1), other.log_weights.logsumexp(1))
        sums = [(part.log_weights.exp()[..., None] * part.points).sum(1) for part in (one, other)]
        torch.testing.assert_close(*sums)


def test_scores_are_never_higher_and_equal_where_nothing_is_merged():
    images, texts, gamma = drawn(5, 12), drawn(4, 3, seed=1), torch.tensor(2.0).double()
    exact = kme_score_reference(images.points, images.log_weights, texts.points, texts.log_weights, gamma)
    for count in (1, 3, 7, 12, 20):
        few = merged(images, count)
        scores = kme_score_reference(few.points, few.log_weights, texts.points, texts.log_weights, gamma)
        assert (scores <= exact + 1e-12).all()
        assert (count < 12) == bool((scores < exact - 1e-6).any())
        assert (count < 12) == bool(spread(few) > 1e-6)


def test_identical_points_merge_first_and_without_error():
    points = drawn(2, 4)
    twice = PointSet(points.points.repeat_interleave(2, dim=1), points.log_weights.repeat_interleave(2, dim=1))
    few = merged(twice, 4)
    torch.testing.assert_close(few.points, points.points)
    torch.testing.assert_close(few.log_weights, points.log_weights + math.log(2))


def test_absent_points_join_others_without_effect_and_gradients_stay_finite():
    points = drawn(2, 9)
    points.log_weights[0, 2:] = -math.inf
    points.log_weights[1, :] = -math.inf
    leaves = [tensor.requires_grad_() for tensor in (points.points, points.log_weights)]
    few = merged(PointSet(*leaves), 2)
    torch.testing.assert_close(few.log_weights[0].logsumexp(0), points.log_weights[0].logsumexp(0))
    assert (few.log_weights[1] == -math.inf).all()
    total = few.points.sum() + few.log_weights[0].exp().sum()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(total, leaves))


def test_the_head_merges_image_points_and_logs_a_bound_of_the_error():
    exact, head = build_head("kme"), build_head("kme", "head.merge=3")
    image, text = image_features(6), text_features(6)
    assert head.embed_image(image).points.shape[1] == 3
    error = scored(exact, image, text) - head.score(head.embed_image(image), head.embed_text(text))
    assert (error >= -1e-12).all() and error.max() > 0
    assert "merge_error" not in exact.logs() and head.logs()["merge_error"] > 0
