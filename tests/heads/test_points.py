"""Tokens as points of WPSE, KME-CLIP and FILIP: which ones there are, and what each pair contributes to the score."""

from __future__ import annotations

import pytest
import torch

from clipzoo.errors import ConfigError
from clipzoo.types import Features
from tests.support.heads import HEADS, build_head, image_features, scored, text_features

POINTS = [name for name in HEADS if name.startswith(("wpse", "kme", "filip"))]


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


@pytest.mark.parametrize("name", HEADS)
def test_other_heads_have_no_parts_and_no_memory(name):
    head = build_head(name)
    embedding = head.embed_text(text_features(3))
    assert (head.memory_weights(embedding, embedding) is None) == (name != "cloob")
    assert (head.score_parts(image_features(2), text_features(2)) is None) == (name not in POINTS)


@pytest.mark.parametrize("name", ["wpse", "kme"])
def test_image_points_are_the_first_tokens_that_are_not_masked_and_at_most_all(name):
    head, image, text = build_head(name), image_features(3), text_features(4)
    first = build_head(name, "head.image_points=2").embed_image(image)
    cut = head.embed_image(Features(image.pooled, image.tokens[:, :2]))
    assert torch.equal(head.score(first, head.embed_text(text)), head.score(cut, head.embed_text(text)))
    masked = Features(image.pooled, image.tokens, torch.tensor([[True, True, False, True, False]] * 3))
    without = Features(image.pooled, image.tokens[:, [0, 1, 3]])
    torch.testing.assert_close(scored(head, masked, text), scored(head, without, text), rtol=1e-13, atol=1e-13)
    for where in ("before", "after"):
        torch.testing.assert_close(head.probe(masked, where), head.probe(without, where), rtol=1e-13, atol=1e-13)
    with pytest.raises(ConfigError, match="head.image_points is 50, but the encoder has 5 tokens"):
        build_head(name, "head.image_points=50").embed_image(image)
    with pytest.raises(ConfigError, match="tokens"):
        head.embed_image(Features(image.pooled))
