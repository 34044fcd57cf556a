"""CLIP's head, and the factors of every head that is a product of vectors."""

from __future__ import annotations

import math

import pytest
import torch

from clipzoo.errors import ConfigError
from clipzoo.heads.vector import projection
from tests.support.heads import (
    HEADS,
    assert_same_values_and_gradients,
    build_head,
    image_features,
    scored,
    text_features,
)

VECTOR_HEADS = [name for name in HEADS if hasattr(build_head(name), "factors")]


def test_score_is_the_cosine_times_the_inverse_temperature_and_ensemble_the_normalised_mean():
    head, image, text = build_head("clip"), image_features(3), text_features(4)
    rows = []
    for x in image.pooled @ head.image_projection:
        products = [
            (x * y).sum() / (x.square().sum() * y.square().sum()).sqrt() for y in text.pooled @ head.text_projection
        ]
        rows.append(torch.stack(products) * head.log_scale.exp())
    scores = scored(head, image, text)
    assert_same_values_and_gradients(head, scores, torch.stack(rows))
    prompts = head.embed_text(text)
    mean = sum(prompts) / 4
    torch.testing.assert_close(head.ensemble(prompts)[0], mean / math.sqrt(mean.square().sum().item()))


def test_temperature_starts_at_seven_hundredths_and_is_clamped_and_projections_start_normal():
    head = build_head("clip")
    assert head.logs()["temperature"].item() == pytest.approx(0.07)
    for value, scale in ((9.0, 100.0), (-9.0, 1.0)):
        head.log_scale.data.fill_(value)
        head.clamp_()
        assert head.log_scale.exp().item() == pytest.approx(scale)
    drawn = projection(400, 500)
    assert drawn.std().item() == pytest.approx(400**-0.5, rel=0.02) and drawn.mean().abs() < 1e-3


@pytest.mark.parametrize("temperature", [0.009, 1.5])
def test_a_learnable_temperature_starts_within_its_bounds_and_a_fixed_one_has_none(temperature):
    with pytest.raises(ConfigError, match=rf"temperature={temperature}, max_scale=100"):
        build_head("clip", f"head.temperature={temperature}")
    fixed = build_head("clip", f"head.temperature={temperature}", "head.learnable_temperature=false")
    fixed.clamp_()
    assert fixed.logs()["temperature"].item() == pytest.approx(temperature)


def test_plain_cosines_learn_the_projections_alone():
    head = build_head("cosine")
    assert [key for key, parameter in head.named_parameters() if parameter.requires_grad] == [
        "image_projection",
        "text_projection",
    ]
    assert head.score_range == (-1.0, 1.0) and not head.learnable_temperature
    image = head.embed_image(image_features(3))
    torch.testing.assert_close(head.score(image, image).diagonal(), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("name", VECTOR_HEADS)
def test_factors_multiply_to_the_score_and_each_row_stands_alone(name):
    assert {name.split()[0] for name in HEADS} - {name.split()[0] for name in VECTOR_HEADS} == {"kme"}
    head = build_head(name)
    image, text = head.embed_image(image_features(4)), head.embed_text(text_features(3))
    left, right = head.factors(image, text)
    # Distances are computed in another order than the product of their factors.
    torch.testing.assert_close(left @ right.mT, head.score(image, text), rtol=1e-13, atol=1e-13)
    first_left, last_right = head.factors(image[:1], text[2:])
    assert torch.equal(first_left, left[:1]) and torch.equal(last_right, right[2:])
