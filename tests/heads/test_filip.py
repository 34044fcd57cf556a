"""FILIP's head: the direction of its score, ensembles of prompts, padding and cost."""

from __future__ import annotations

import pytest
import torch

from clipzoo.types import Features, concatenate, map_embedding
from tests.support.heads import build_head, image_features, scored, text_features
from tests.support.token_sets import by_loops


def test_both_directions_are_those_of_loops_and_score_is_that_of_image_anchors():
    head, image, text = build_head("filip"), image_features(5), text_features(5)
    left, right = head.embed_image(image), head.embed_text(text)
    loops = by_loops(left.points, left.log_weights == 0, right.points, right.log_weights == 0)
    to_text, to_image = (head.log_scale.exp() * matrix for matrix in loops)
    similarity = head.similarity(left, right)
    torch.testing.assert_close(similarity.image_to_text.dense(), to_text, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(similarity.text_to_image.dense(), to_image.mT, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(head.score(left, right), to_text, rtol=1e-12, atol=1e-12)


def test_score_of_an_ensemble_is_the_mean_score_of_its_prompts():
    head, image, text = build_head("filip"), image_features(4), text_features(7)
    images, texts = head.embed_image(image), head.embed_text(text)
    groups = [slice(0, 3), slice(3, 4), slice(4, 7)]
    classes = [head.ensemble(map_embedding(lambda x, g=group: x[g], texts)) for group in groups]
    # Classes of different numbers of prompts, padded to the largest and by five further positions.
    together = concatenate(classes)
    together = together.padded(together.points.shape[1] + 5)
    each = head.score(images, texts)
    expected = torch.stack([each[:, group].mean(dim=1) for group in groups], dim=1)
    torch.testing.assert_close(head.score(images, together), expected, rtol=1e-12, atol=1e-12)


def test_longer_padding_and_masked_image_tokens_change_nothing():
    head, image, text = build_head("filip"), image_features(3), text_features(4)
    longer = Features(
        text.pooled,
        torch.nn.functional.pad(text.tokens, (0, 0, 0, 4), value=3.0),
        torch.nn.functional.pad(text.mask, (0, 4)),
    )
    torch.testing.assert_close(scored(head, image, longer), scored(head, image, text), rtol=1e-13, atol=1e-13)
    masked = Features(image.pooled, image.tokens, torch.tensor([[True, True, False, True, False]] * 3))
    without = Features(image.pooled, image.tokens[:, [0, 1, 3]])
    torch.testing.assert_close(scored(head, masked, text), scored(head, without, text), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(head.probe(masked, "after"), head.probe(without, "after"), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("where", ["before", "after"])
def test_probe_has_the_width_of_its_side_of_the_projection(where):
    head, image = build_head("filip"), image_features(3)
    assert head.probe(image, where).shape == (3, {"before": 12, "after": 8}[where])
