"""CLIP's head, and the factors of every head that is a product of vectors."""

from __future__ import annotations

import math

import pytest
import torch

from clipzoo.errors import ConfigError
from clipzoo.heads.vector import projection
from tests.support.heads import HEADS, assert_same_values_and_gradients, build_head, image_features, text_features

VECTOR_HEADS = [name for name in HEADS if hasattr(build_head(name), "factors")]


def test_score_is_the_cosine_times_the_inverse_temperature():
    head, image, text = build_head("clip"), image_features(3), text_features(4)
    rows = []
    for x in image.pooled @ head.image_projection:
        products = [
            (x * y).sum() / (x.square().sum() * y.square().sum()).sqrt() for y in text.pooled @ head.text_projection
        ]
        rows.append(torch.stack(products) * head.log_scale.exp())
    scores = head.score(head.embed_image(image), head.embed_text(text))
    assert_same_values_and_gradients(head, scores, torch.stack(rows))


def test_temperature_starts_at_seven_hundredths_and_is_clamped_to_one_hundredth():
    head = build_head("clip")
    assert head.logs()["temperature"].item() == pytest.approx(0.07)
    head.log_scale.data.fill_(9.0)
    head.clamp_()
    assert head.log_scale.exp().item() == pytest.approx(100)
    head.log_scale.data.fill_(-9.0)
    head.clamp_()
    assert head.log_scale.item() == 0.0


@pytest.mark.parametrize("temperature", [0.009, 1.5])
def test_a_learnable_temperature_starts_within_its_bounds_and_a_fixed_one_has_none(temperature):
    with pytest.raises(ConfigError, match=rf"temperature={temperature}, max_scale=100"):
        build_head("clip", f"head.temperature={temperature}")
    fixed = build_head("clip", f"head.temperature={temperature}", "head.learnable_temperature=false")
    fixed.clamp_()
    assert fixed.logs()["temperature"].item() == pytest.approx(temperature)


def test_projections_start_normal_with_the_inverse_root_of_their_input_width_as_deviation():
    drawn = projection(400, 500)
    assert drawn.std().item() == pytest.approx(400**-0.5, rel=0.02) and drawn.mean().abs() < 1e-3


def test_plain_cosines_learn_the_projections_alone():
    head = build_head("cosine")
    assert [key for key, parameter in head.named_parameters() if parameter.requires_grad] == [
        "image_projection",
        "text_projection",
    ]
    assert head.score_range == (-1.0, 1.0) and not head.learnable_temperature
    image = head.embed_image(image_features(3))
    torch.testing.assert_close(head.score(image, image).diagonal(), torch.ones(3, dtype=torch.float64))


def test_the_other_heads_are_not_products_of_vectors():
    assert {name.split()[0] for name in HEADS} - {name.split()[0] for name in VECTOR_HEADS} == {"kme"}


@pytest.mark.parametrize("name", VECTOR_HEADS)
def test_factors_multiply_to_the_score_and_each_row_stands_alone(name):
    head = build_head(name)
    image, text = head.embed_image(image_features(4)), head.embed_text(text_features(3))
    left, right = head.factors(image, text)
    # Distances are computed in another order than the product of their factors.
    torch.testing.assert_close(left @ right.mT, head.score(image, text), rtol=1e-13, atol=1e-13)
    first_left, last_right = head.factors(image[:1], text[2:])
    assert torch.equal(first_left, left[:1]) and torch.equal(last_right, right[2:])


def test_ensemble_is_the_normalised_mean_of_unit_vectors():
    head = build_head("clip")
    text = head.embed_text(text_features(3))
    mean = sum(text) / 3
    torch.testing.assert_close(head.ensemble(text)[0], mean / math.sqrt(mean.square().sum().item()))
