"""The tiltings without normalisation against their formulas."""

from __future__ import annotations

import pytest
import torch

from clipzoo.errors import ConfigError
from tests.heads import assert_same_values_and_gradients, build_head, image_features, text_features

TEMPERATURE = 0.3
FORMULAS = {
    "inner_product": lambda u, v: sum(a * b for a, b in zip(u, v, strict=True)) / TEMPERATURE,
    "distance": lambda u, v: -sum((a - b) ** 2 for a, b in zip(u, v, strict=True)) / (2 * TEMPERATURE),
}
every_tilting = pytest.mark.parametrize("name", FORMULAS)


@every_tilting
def test_values_and_gradients_equal_the_formula(name):
    head, image, text = build_head(name, f"head.temperature={TEMPERATURE}"), image_features(3), text_features(4)
    rows = [
        torch.stack([FORMULAS[name](u, v) for v in text.pooled @ head.text_projection])
        for u in image.pooled @ head.image_projection
    ]
    scores = head.score(head.embed_image(image), head.embed_text(text))
    assert_same_values_and_gradients(head, scores, torch.stack(rows))


@every_tilting
def test_null_embedding_width_takes_the_encoders_own_vectors(name):
    head = build_head(name, "head.embed_width=null", "encoder.text_width=12")
    image = image_features(3)
    assert list(head.parameters()) == []
    assert torch.equal(head.embed_image(image), image.pooled) and torch.equal(head.probe(image, "after"), image.pooled)


@every_tilting
def test_null_embedding_width_needs_an_encoder_of_equal_widths(name):
    with pytest.raises(ConfigError, match="image 12, text 10"):
        build_head(name, "head.embed_width=null")


def test_distance_to_itself_is_zero_and_to_all_others_negative():
    head = build_head("distance")
    image = head.embed_image(image_features(5))
    scores = head.score(image, image)
    assert scores.diagonal().abs().max() < 1e-13
    assert (scores[~torch.eye(5, dtype=torch.bool)] < -0.1).all()
