"""CLOOB against a transcription of its formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clipzoo.heads.cloob import CloobHead
from tests.support.heads import build_head, image_features, text_features

BETA, INVERSE_TEMPERATURE = 8.0, 30.0


def with_embeddings(name: str, *overrides: str) -> tuple[CloobHead, Tensor, Tensor]:
    head = build_head(name, *overrides)
    return head, head.embed_image(image_features(5)), head.embed_text(text_features(5))


def unit(vector: Tensor) -> Tensor:
    return vector / (vector * vector).sum().sqrt()


def retrieved(query: Tensor, memory: list[Tensor]) -> Tensor:
    """Eq. 9 and 10 with the normalisation of the released code."""
    energies = [torch.exp(BETA * (query * stored).sum()) for stored in memory]
    return unit(sum(energy * stored for energy, stored in zip(energies, memory, strict=True)) / sum(energies))


def info_loob(anchors: list[Tensor], positives: list[Tensor]) -> Tensor:
    losses = []
    for i, anchor in enumerate(anchors):
        positive = torch.exp(INVERSE_TEMPERATURE * (anchor * positives[i]).sum())
        others = sum(
            torch.exp(INVERSE_TEMPERATURE * (anchor * positive).sum()) for j, positive in enumerate(positives) if j != i
        )
        losses.append(-torch.log(positive / others))
    return sum(losses) / len(losses)


def test_loss_and_gradient_equal_the_transcribed_formulas():
    """Eq. A139: the second term is anchored on the text, V_y; a sum of two terms, scaled by the temperature."""
    head, image, text = with_embeddings("cloob")
    x, y = list(image), list(text)
    u_x, u_y = [retrieved(query, x) for query in x], [retrieved(query, x) for query in y]
    v_x, v_y = [retrieved(query, y) for query in x], [retrieved(query, y) for query in y]
    expected = (info_loob(u_x, u_y) + info_loob(v_y, v_x)) / INVERSE_TEMPERATURE

    similarity = head(image_features(5), text_features(5))
    # The directions are not transposes of each other.
    assert (similarity.image_to_text.dense() - similarity.text_to_image.dense().mT).abs().max() > 0.1
    loss = (
        sum((side.log_sum_exp(exclude_positive=True) - side.positives()).mean() for side in similarity.directions)
        / INVERSE_TEMPERATURE
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    gradients, expected_gradients = (torch.autograd.grad(value, list(head.parameters())) for value in (loss, expected))
    for left, right in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def test_scores_within_a_modality_compare_patterns_retrieved_from_it():
    head, image, text = with_embeddings("cloob")
    similarity = head.similarity(image, text)
    for make, own in ((similarity.within_image, image), (similarity.within_text, text)):
        patterns = [retrieved(query, list(own)) for query in own]
        expected = torch.stack([torch.stack([INVERSE_TEMPERATURE * (a * b).sum() for b in patterns]) for a in patterns])
        torch.testing.assert_close(make().dense(), expected, rtol=1e-12, atol=1e-12)


def test_evaluation_and_training_without_hopfield_compare_plain_embeddings():
    head, image, text = with_embeddings("cloob", "head.hopfield=false")
    expected = torch.stack([torch.stack([INVERSE_TEMPERATURE * (x * y).sum() for y in text]) for x in image])
    torch.testing.assert_close(build_head("cloob").eval().score(image, text), expected, rtol=1e-13, atol=1e-13)
    similarity = head.similarity(image, text)
    torch.testing.assert_close(similarity.image_to_text.dense(), expected)
    torch.testing.assert_close(similarity.text_to_image.dense(), expected.mT)


def test_beta_zero_retrieves_the_mean_pattern_and_large_beta_the_nearest_stored_one():
    every_score = build_head("cloob", "head.beta=0.0")(image_features(5), text_features(5)).image_to_text.dense()
    torch.testing.assert_close(every_score, torch.full_like(every_score, INVERSE_TEMPERATURE))
    head, image, text = with_embeddings("cloob", "head.beta=1e5")
    expected = INVERSE_TEMPERATURE * image @ image[(text @ image.mT).argmax(dim=1)].mT
    torch.testing.assert_close(head.similarity(image, text).image_to_text.dense(), expected)


@pytest.mark.parametrize("name", ["cloob", "cloob head.hopfield=false"])
def test_temperature_is_fixed(name):
    head = build_head(name)
    assert not head.learnable_temperature and head.score_range == (-INVERSE_TEMPERATURE, INVERSE_TEMPERATURE)
    assert {key for key, _ in head.named_parameters()} == {"image_projection", "text_projection"}


def test_plain_embeddings_are_compared_until_retrieval_starts():
    image, text = image_features(6), text_features(6)
    plain, from_the_start = build_head("cloob head.hopfield=false"), build_head("cloob")
    head = build_head("cloob", "head.hopfield_start=10")
    for step, same in ((0, plain), (9, plain), (10, from_the_start)):
        head.resample(step)
        assert torch.equal(*(one(image, text).image_to_text.dense() for one in (head, same)))
    assert not torch.equal(*(one(image, text).image_to_text.dense() for one in (from_the_start, plain)))


def test_the_weights_of_cloobs_memory_retrieve_what_training_compares():
    head = build_head("cloob")
    images, texts = head.embed_image(image_features(6)), head.embed_text(text_features(6))
    weights = head.memory_weights(texts, images)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(6, dtype=torch.float64))
    retrieved = torch.nn.functional.normalize(weights @ images, dim=1)
    own = torch.nn.functional.normalize(head.memory_weights(images, images) @ images, dim=1)
    torch.testing.assert_close(head.score(own, retrieved), head.similarity(images, texts).image_to_text.dense())
