"""Identities of hyperbolic distances; tests/golden_next compares them with the authors' code."""

from __future__ import annotations

import math

import pytest
import torch

from clipzoo.heads.meru import lift, tangent
from tests.support.heads import build_head, image_features, scored, text_features


def test_at_curvature_0_the_distance_is_that_of_the_l2_head():
    """The L2 head has -|u - v|^2 / (2 temperature), MERU -scale * |u - v|: equal up to scale and the square."""
    meru = build_head("meru", "head.curvature=1e-13", "head.learnable_curvature=false")
    flat = build_head("distance", "head.temperature=0.5")
    for side in ("image", "text"):
        alpha = getattr(meru, f"{side}_log_alpha").exp()
        getattr(flat, f"{side}_projection").data = alpha * getattr(meru, f"{side}_projection").data
    scores = [scored(head, image_features(6), text_features(5)) for head in (meru, flat)]
    torch.testing.assert_close((scores[0] / meru.log_scale.exp()).square(), -scores[1], rtol=1e-12, atol=1e-12)


def test_points_lie_on_the_hyperboloid_at_the_length_of_their_tangent_vectors():
    vectors, curvature = torch.randn(7, 4, dtype=torch.float64), torch.tensor(2.5).double()
    points = lift(vectors, curvature)
    times = (1 / curvature + points.square().sum(dim=1)).sqrt()
    distances = (curvature.sqrt() * times).acosh() / curvature.sqrt()
    torch.testing.assert_close(distances, vectors.norm(dim=1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tangent(points, curvature), vectors, rtol=1e-12, atol=1e-12)
    # A point farther than the largest radius is moved to it.
    far = lift(100 * vectors, curvature).norm(dim=1) * curvature.sqrt()
    torch.testing.assert_close(far, torch.full_like(far, 2.0**15))


def test_prompts_are_averaged_in_the_tangent_space():
    head = build_head("meru")
    prompts = head.embed_text(text_features(4))
    mean = (head.text_log_alpha.exp() * (text_features(4).pooled @ head.text_projection)).mean(dim=0, keepdim=True)
    torch.testing.assert_close(head.ensemble(prompts), lift(mean, head.curvature), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_points_have_a_finite_slope(dtype):
    head = build_head("meru").to(dtype)
    points = torch.randn(3, 8, dtype=dtype).requires_grad_()
    (slope,) = torch.autograd.grad(head.score(points, points.detach()).sum(), points)
    assert slope.isfinite().all()


def test_parameters_are_clamped():
    head = build_head("meru")
    for value, curvature in ((9.0, 10.0), (-9.0, 0.1)):
        for parameter in (head.log_curvature, head.image_log_alpha, head.log_scale):
            parameter.data.fill_(value)
        head.clamp_()
        logs = {name: log.item() for name, log in head.logs().items()}
        assert logs["curvature"] == pytest.approx(curvature)
    head.image_log_alpha.data.fill_(9.0), head.log_scale.data.fill_(9.0)
    head.clamp_()
    assert head.logs()["image_alpha"].item() == 1 and head.logs()["temperature"].item() == pytest.approx(0.01)
    for learnable in ("true", "false"):
        head = build_head("meru", "head.curvature=20", f"head.learnable_curvature={learnable}")
        head.clamp_()
        assert head.curvature.item() == pytest.approx(20) and math.isfinite(head.score_range[0])
