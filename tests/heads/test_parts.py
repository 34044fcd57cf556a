"""What the points of a pair contribute to its score, and what a memory retrieves."""

from __future__ import annotations

import pytest
import torch

from tests.support.heads import HEADS, build_head, image_features, scored, text_features

POINTS = [name for name in HEADS if name.startswith(("wpse", "kme"))]


@pytest.mark.parametrize("name", [*POINTS, "kme head.merge=2"])
def test_the_parts_of_a_score_sum_to_it(name):
    head, image, text = build_head(name).eval(), image_features(4), text_features(4)
    parts = head.score_parts(image, text)
    scores = scored(head, image, text).diagonal()
    torch.testing.assert_close(parts.score, scores, rtol=1e-10, atol=1e-10)
    assert parts.values.shape == (4, parts.image_weights.shape[1], parts.text_weights.shape[1])


@pytest.mark.parametrize("name", ["wpse head.text_points=caption", "kme head.text_points=caption"])
def test_padding_has_no_part(name):
    text = text_features(4)
    parts = build_head(name).eval().score_parts(image_features(4), text)
    assert torch.equal(parts.values.abs().sum(dim=1) > 0, text.mask)
    assert torch.equal(parts.text_weights != 0, text.mask)


def test_merged_points_share_the_term_of_their_group_by_weight():
    head, image, text = build_head("kme head.merge=2"), image_features(3), text_features(3)
    parts = head.score_parts(image, text)
    per_weight = parts.values.sum(dim=2) / parts.image_weights
    # Different values, up to rounding.
    assert [len({f"{value:.9g}" for value in row.tolist()}) for row in per_weight] == [2, 2, 2]


def test_the_weights_of_cloobs_memory_retrieve_what_training_compares():
    head = build_head("cloob")
    images, texts = head.embed_image(image_features(6)), head.embed_text(text_features(6))
    weights = head.memory_weights(texts, images)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(6, dtype=torch.float64))
    retrieved = torch.nn.functional.normalize(weights @ images, dim=1)
    own = torch.nn.functional.normalize(head.memory_weights(images, images) @ images, dim=1)
    torch.testing.assert_close(head.score(own, retrieved), head.similarity(images, texts).image_to_text.dense())


@pytest.mark.parametrize("name", HEADS)
def test_other_heads_have_no_parts_and_no_memory(name):
    head = build_head(name)
    embedding = head.embed_text(text_features(3))
    assert (head.memory_weights(embedding, embedding) is None) == (name != "cloob")
    assert (head.score_parts(image_features(2), text_features(2)) is None) == (name not in POINTS)
