"""Identities of Gaussians; tests/golden_next compares them with the authors' code."""

from __future__ import annotations

import pytest
import torch

from clipzoo.heads.prolip import inclusion
from tests.support.heads import build_head, image_features, scored, text_features


def gaussian(mean: float, log_variance: float) -> torch.Tensor:
    return torch.tensor([[mean, log_variance]], dtype=torch.float64)


def test_without_variance_the_scores_are_those_of_clip():
    prolip, clip = build_head("prolip", "head.initial_log_variance=-30"), build_head("clip")
    for side in ("image", "text"):
        getattr(prolip, f"{side}_variance").weight.data.zero_()
        getattr(prolip, f"{side}_projection").data = getattr(clip, f"{side}_projection").data
    scores = [scored(head, image_features(4), text_features(5)) for head in (prolip, clip)]
    torch.testing.assert_close(*scores, rtol=1e-12, atol=1e-10)


def test_scores_are_minus_half_of_the_expected_squared_distance_plus_one():
    head = build_head("prolip", "head.initial_log_variance=-2")
    image, text = head.embed_image(image_features(1)), head.embed_text(text_features(1))
    drawn = torch.Generator().manual_seed(0)
    one, other = (
        mean + (log_variance / 2).exp() * torch.randn(200_000, 8, generator=drawn, dtype=torch.float64)
        for mean, log_variance in (image.chunk(2, dim=1), text.chunk(2, dim=1))
    )
    expected = 1 - (one - other).square().sum(dim=1).mean() / 2
    assert (head.score(image, text) / head.log_scale.exp()).item() == pytest.approx(expected.item(), rel=0.01)


@pytest.mark.parametrize("released", [False, True])
def test_a_wide_gaussian_includes_a_narrow_one_with_its_mean(released):
    narrow, wide = gaussian(0.3, -2.0), gaussian(0.3, 0.0)
    inside, outside = (inclusion(*pair, 1.0, 0.0, released) for pair in ((narrow, wide), (wide, narrow)))
    assert inside < inclusion(wide, wide, 1.0, 0.0, released) < outside
