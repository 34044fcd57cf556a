"""KME-CLIP against loops, against decimal arithmetic, and against CLIP where proposition 2 makes them one."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from clipzoo.heads import kme
from clipzoo.heads.kme import log_softplus, merged, spread
from clipzoo.ops import kme as kme_reference
from clipzoo.types import Features, PointSet
from tests.support.heads import (
    assert_same_values_and_gradients,
    build_head,
    image_features,
    scored,
    text_features,
    trimmed,
)


@pytest.mark.parametrize("points", ["all", "caption"])
def test_values_and_gradients_equal_loops_over_pairs_of_points(points):
    head = build_head("kme", f"head.text_points={points}")
    image, text = image_features(2), text_features(3)
    scores = scored(head, image, text)

    def weighted(side, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        vectors = [token @ side.projection for token in tokens]
        weights = [torch.log(1 + torch.exp(token @ side.weight_projection[:, 0])) for token in tokens]
        return [(w, v / (v * v).sum().sqrt()) for w, v in zip(weights, vectors, strict=True)]

    gamma = torch.log(1 + torch.exp(head.raw_gamma))
    rows = []
    for tokens in image.tokens:
        row = []
        for words, mask in zip(text.tokens, text.mask, strict=True):
            right = weighted(head.text, words[mask] if points == "caption" else words)
            pairs = [
                w * w2 * torch.exp(-gamma * ((v - u) ** 2).sum())
                for w, v in weighted(head.image, tokens)
                for w2, u in right
            ]
            row.append(torch.log(sum(pairs)))
        rows.append(torch.stack(row))
    assert_same_values_and_gradients(head, scores, torch.stack(rows))


@pytest.mark.parametrize("temperature", [0.01, 0.07, 1.0])
def test_one_point_of_weight_one_is_clip_up_to_a_constant(temperature):
    """Proposition 2: with gamma = 1 / (2 temperature) the score is (cosine - 1) / temperature."""
    head = build_head("kme", "head.image_points=1", f"head.gamma={0.5 / temperature}")
    clip = build_head("clip", f"head.temperature={temperature}")
    image, text = (
        with_weight_one(head.image, image_features(4).pooled),
        with_weight_one(head.text, text_features(5).pooled),
    )
    clip.image_projection, clip.text_projection = head.image.projection, head.text.projection
    scores = scored(head, image, text)
    inner_products = scored(clip, image, text)
    # Both scales begin in float32.
    torch.testing.assert_close(scores + 1 / temperature, inner_products, rtol=1e-5, atol=1e-5)
    scale = 2 * head.gamma
    torch.testing.assert_close(scores + scale, inner_products * scale / clip.log_scale.exp(), rtol=0, atol=1e-11)


def with_weight_one(side, pooled: Tensor) -> Features:
    """Features of one token a sample whose last entry makes softplus(token . p) = 1."""
    side.weight_projection.data.zero_()
    side.weight_projection.data[-1] = math.log(math.e - 1)
    token = torch.cat([pooled[:, :-1], torch.ones_like(pooled[:, :1])], dim=1)
    return Features(token, token[:, None])


@pytest.mark.parametrize("kme_score", [kme.kme_score, kme_reference.kme_score_reference], ids=["head", "reference"])
@pytest.mark.parametrize("gamma", [1e-3, 1e-1, 7.142857142857143, 1e2, 1e3, 1e5])
def test_score_is_right_to_1e_9_for_any_gamma_and_any_weight(gamma, kme_score):
    """Against 130 decimals. Weights reach from e^-200 to 300."""
    tokens, tokens2 = image_features(2).tokens[..., :10], text_features(3).tokens
    points, points2 = (torch.nn.functional.normalize(tensor, dim=-1) for tensor in (tokens, tokens2))
    raw, raw2 = torch.linspace(-200, 300, 10).double().view(2, 5), torch.linspace(5, -30, 18).double().view(3, 6)
    scores = kme_score(points, log_softplus(raw), points2, log_softplus(raw2), torch.tensor(gamma).double())
    with localcontext() as context:
        context.prec = 130
        exact_gamma = Decimal(torch.tensor(gamma).double().item())
        expected = [
            [decimal_score(v, a, u, a2, exact_gamma) for u, a2 in zip(points2, raw2, strict=True)]
            for v, a in zip(points, raw, strict=True)
        ]
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def decimal_score(points: Tensor, raw: Tensor, points2: Tensor, raw2: Tensor, gamma: Decimal) -> float:
    total = Decimal(0)
    for v, a in zip(points.tolist(), raw.tolist(), strict=True):
        for u, a2 in zip(points2.tolist(), raw2.tolist(), strict=True):
            squared = sum((Decimal(x) - Decimal(y)) ** 2 for x, y in zip(v, u, strict=True))
            weights = (1 + Decimal(a).exp()).ln() * (1 + Decimal(a2).exp()).ln()
            total += weights * (-gamma * squared).exp()
    return float(total.ln())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-7), (torch.float64, 1e-15)])
def test_log_softplus_is_exact_and_has_its_gradient_everywhere(dtype, tolerance):
    raw = torch.tensor([-1e4, -400, -104.5, -87, -21, -20, -19.9, -1, 0, 1, 19, 21, 39, 41, 100, 1e4], dtype=dtype)
    raw.requires_grad_()
    ours = log_softplus(raw)
    ours.sum().backward()
    with localcontext() as context:
        context.prec = 250
        exact = [Decimal(a) for a in raw[1:].tolist()]
        softplus = [(1 + a.exp()).ln() for a in exact]
        expected = [float(term.ln()) for term in softplus]
        slopes = [float(1 / (1 + (-a).exp()) / term) for a, term in zip(exact, softplus, strict=True)]
    torch.testing.assert_close(ours[1:], torch.tensor(expected, dtype=dtype), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(raw.grad[1:], torch.tensor(slopes, dtype=dtype), rtol=5 * tolerance, atol=tolerance)
    assert ours[0].item() == -1e4 and raw.grad[0].item() == 1


@pytest.mark.parametrize("gamma", [1e-3, 0.5, 7.142857142857143, 30.0, 1e5])
def test_gamma_has_its_initial_value_clips_scale_by_default_and_stays_positive_and_finite(gamma):
    head, default = build_head("kme", f"head.gamma={gamma}"), build_head("kme")
    assert head.gamma.item() == pytest.approx(gamma, rel=1e-6)
    assert default.gamma.item() == pytest.approx(1 / (2 * 0.07))
    # Its steps are those of the paper's parameter.
    (slope,) = torch.autograd.grad(default.gamma, default.raw_gamma)
    assert slope.item() == pytest.approx(1, abs=1e-3)
    for step in (-50.0, -1.0, 1e6):
        head.raw_gamma.data.fill_(step)
        assert 0 < head.gamma.item() < math.inf


def test_neither_padding_nor_points_of_weight_zero_change_a_score():
    head, text = build_head("kme", "head.text_points=caption"), text_features(4)
    text = Features(text.pooled[:3], text.tokens[:3], text.mask[:3])
    image = head.embed_image(image_features(2))
    short, long = head.score(image, head.embed_text(trimmed(text))), head.score(image, head.embed_text(text))
    torch.testing.assert_close(short, long, rtol=0, atol=1e-13)
    padded = head.score(image.padded(9), head.embed_text(text).padded(11))
    torch.testing.assert_close(padded, long, rtol=0, atol=1e-13)


def test_ensemble_is_the_log_mean_exp_of_the_prompts_scores_and_a_modality_is_compared_with_itself():
    head = build_head("kme", "head.text_points=caption")
    image, prompts = head.embed_image(image_features(4)), head.embed_text(text_features(3))
    expected = head.score(image, prompts).exp().mean(dim=1, keepdim=True).log()
    torch.testing.assert_close(head.score(image, head.ensemble(prompts)), expected, rtol=0, atol=1e-12)
    similarity = head.similarity(image[:3], prompts)
    assert torch.equal(similarity.within_image().dense(), head.score(image[:3], image[:3]))
    assert torch.equal(similarity.within_text().dense(), head.score(prompts, prompts))


def test_probe_before_the_projection_is_the_weighted_sum_of_the_tokens():
    head, image = build_head("kme"), image_features(3)
    weights = torch.log(1 + torch.exp(image.tokens @ head.image.weight_projection[:, 0]))
    expected = torch.einsum("bm,bmw->bw", weights, image.tokens)
    torch.testing.assert_close(head.probe(image, "before"), expected)
    torch.testing.assert_close(
        head.probe(image, "after"), torch.einsum("bm,bmd->bd", weights, head.embed_image(image).points)
    )


# Merged points approximate the score from below.


def drawn(samples: int, count: int, seed: int = 0) -> PointSet:
    generator = torch.Generator().manual_seed(seed)
    points = torch.nn.functional.normalize(torch.randn(samples, count, 6, generator=generator).double(), dim=-1)
    return PointSet(points, torch.randn(samples, count, generator=generator).double())


def test_total_weights_and_weighted_sums_are_kept():
    points = drawn(3, 11)
    few = merged(points, 4)
    assert few.points.shape == (3, 4, 6)
    torch.testing.assert_close(points.log_weights.logsumexp(1), few.log_weights.logsumexp(1))
    sums = [(part.log_weights.exp()[..., None] * part.points).sum(1) for part in (points, few)]
    torch.testing.assert_close(*sums)


def test_scores_are_never_higher_and_equal_where_nothing_is_merged():
    images, texts, gamma = drawn(5, 12), drawn(4, 3, seed=1), torch.tensor(2.0).double()
    exact = kme_reference.kme_score_reference(images.points, images.log_weights, texts.points, texts.log_weights, gamma)
    for count in (1, 3, 7, 12, 20):
        few = merged(images, count)
        scores = kme_reference.kme_score_reference(few.points, few.log_weights, texts.points, texts.log_weights, gamma)
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
