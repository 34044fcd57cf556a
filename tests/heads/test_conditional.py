"""FLAIR's and LLIP's scores and FLAIR's loss against loops in float64; blocks, memory, ranks and ensembles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, logsigmoid

from clipzoo.distributed.world import World
from clipzoo.heads import conditional
from clipzoo.heads.flair import FlairHead
from clipzoo.heads.llip import LlipHead
from clipzoo.heads.pairs import Scope
from clipzoo.objectives.flair import Flair, selected_captions
from clipzoo.types import Batch, Features, Views, map_embedding
from tests.support.heads import (
    assert_same_values_and_gradients,
    build_head,
    image_features,
    rows,
    scored,
    text_features,
)
from tests.support.largest_tensor import LargestTensor
from tests.support.objectives import progress
from tests.support.ranks import run_ranks

HEADS = ["flair head.heads=4", "llip head.heads=4"]
every_head = pytest.mark.parametrize("name", HEADS)


def flair_score(head: FlairHead, image: Features, text: Features) -> Tensor:
    """Text-conditioned attention pooling of one image and one caption by torch's own attention."""
    caption = text.pooled @ head.text_projection  # [1, d]
    tokens = image.tokens[0] @ head.image_projection
    sides = head.query_norm(caption), head.key_norm(tokens), head.value_norm(tokens)
    pooled, _ = head.attention(*sides)
    return cosine_similarity(pooled, caption)


def llip_score(head: LlipHead, image: Features, text: Features) -> Tensor:
    mixed = []
    for query, key, value in zip(
        *(x.split(2, dim=1) for x in (head.query_projection, head.key_projection, head.value_projection)), strict=True
    ):
        exponents = (text.pooled @ query) @ (image.tokens[0] @ key).mT / head._attention_temperature
        mixed.append(exponents.softmax(dim=1) @ (image.tokens[0] @ value))
    return cosine_similarity(torch.cat(mixed, dim=1) @ head.output_projection, text.pooled @ head.text_projection)


@every_head
def test_scores_and_gradients_are_those_of_loops_over_pairs(name):
    head, image, text = build_head(name), image_features(4), text_features(5)
    single = flair_score if isinstance(head, FlairHead) else llip_score
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    loops = [
        [single(head, rows(image, slice(i, i + 1)), rows(text, slice(j, j + 1))) for j in range(5)] for i in range(4)
    ]
    oracle = torch.stack([torch.cat(row) for row in loops])
    assert_same_values_and_gradients(head, scored(head, image, text), oracle)


@every_head
def test_blocks_change_neither_values_nor_gradients_and_bound_the_memory(monkeypatch, name):
    head, image, text = build_head(name), image_features(9), text_features(11)
    images, captions = head.embed_image(image), head.embed_text(text)
    queries, targets = head.queries_and_targets(captions)
    dense = head.block(*head.keys_and_values(images), queries[None], targets[None])
    for elements in (1, 100, 10_000):
        monkeypatch.setitem(conditional.ELEMENTS, "cpu", elements)
        assert_same_values_and_gradients(head, head.score(images, captions), dense, 1e-12)
    monkeypatch.setitem(conditional.ELEMENTS, "cpu", 50)
    images, captions = (map_embedding(lambda x: x.detach().requires_grad_(), side) for side in (images, captions))
    with LargestTensor() as largest:
        head.score(images, captions).square().sum().backward()
    # Neither attention weights nor pooled vectors of all pairs: the images' points are the largest.
    assert largest.elements <= images.points.numel() < 9 * 11 * 8


@every_head
def test_scores_of_chosen_columns_are_those_of_the_matrix(monkeypatch, name):
    head = build_head(name)
    images, captions = head.embed_image(image_features(5)), head.embed_text(text_features(7))
    columns = torch.tensor([[0, 6, 3], [1, 1, 2], [5, 4, 3], [0, 1, 2], [6, 6, 6]])
    monkeypatch.setitem(conditional.ELEMENTS, "cpu", 60)
    whole = head.score(images, captions)
    torch.testing.assert_close(head.chosen(images, captions, columns), whole.gather(1, columns), rtol=1e-12, atol=1e-13)
    scores = head.similarity(images, captions[:5]).image_to_text
    torch.testing.assert_close(scores.at(columns % 5), whole.gather(1, columns % 5), rtol=1e-12, atol=1e-13)


@every_head
def test_masked_tokens_have_no_weight(name):
    head, image, text = build_head(name), image_features(3), text_features(4)
    masked = Features(image.pooled, image.tokens, torch.tensor([[True, True, False, True, False]] * 3))
    without = Features(image.pooled, image.tokens[:, [0, 1, 3]])
    torch.testing.assert_close(scored(head, masked, text), scored(head, without, text), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(head.probe(masked, "after"), head.probe(without, "after"), rtol=1e-13, atol=1e-13)


@every_head
def test_ensemble_of_prompts_with_one_direction_scores_like_each_of_them(name):
    head = build_head(name)
    captions = head.embed_text(text_features(1))
    scaled = map_embedding(lambda x: torch.cat([x, 2 * x, 3 * x]), captions)
    ensemble = head.ensemble(replace(scaled, log_weights=captions.log_weights.expand(3, -1)))
    torch.testing.assert_close(ensemble.points, 2 * captions.points, rtol=1e-13, atol=1e-13)


def test_llip_reads_the_first_tokens_of_the_image():
    head, image, text = build_head("llip head.image_tokens=3"), image_features(3), text_features(2)
    cut = Features(image.pooled, image.tokens[:, :3])
    assert torch.equal(scored(head, image, text), scored(head, cut, text))


def test_llip_with_one_token_is_the_cosine_of_two_linear_maps():
    head, image, text = build_head("llip"), image_features(3), text_features(4)
    one = Features(image.pooled, image.tokens[:, :1])
    left, right = (
        image.tokens[:, 0] @ head.value_projection @ head.output_projection,
        text.pooled @ head.text_projection,
    )
    expected = cosine_similarity(left[:, None], right[None], dim=2)
    torch.testing.assert_close(scored(head, one, text), expected, rtol=1e-12, atol=1e-13)


def test_flair_gives_no_weight_to_tokens_far_below_the_zero_key():
    """With keys that exclude all tokens the pooled vector is the output of the zero value: the output's bias."""
    head, image, text = build_head("flair"), image_features(3), text_features(4)
    captions = head.embed_text(text)
    queries, targets = head.queries_and_targets(captions)
    keys, values, shift = head.keys_and_values(head.embed_image(image))
    shift[:, :-1] = -math.inf
    head.attention.out_proj.bias.data.normal_(generator=torch.Generator().manual_seed(0))
    expected = cosine_similarity(head.attention.out_proj.bias[None], targets).expand(3, -1)
    scores = head.block(keys, values, shift, queries[None], targets[None])
    torch.testing.assert_close(scores, expected, rtol=1e-12, atol=1e-13)


# The loss: k captions an image, one random caption of every other image.


def captions_of(samples: int, captions: int) -> tuple[Features, Features, Batch]:
    ids = torch.arange(samples)
    views = Views(captions=captions)
    text = ids if captions == 1 else ids[:, None].expand(-1, captions)
    return image_features(samples), text_features(samples * captions), Batch(ids, text, ids, views=views)


def flair_answers(heads: list[str]) -> list[dict[str, Tensor]]:
    return [_flair_answer(head) for head in heads]


def _flair_answer(head: str) -> dict[str, Tensor]:
    """Loss and averaged gradients on this rank's share of six samples with three captions each."""
    world = World.from_process_group()
    image, text, batch = captions_of(6, 3)
    size = 6 // world.size
    local = slice(world.rank * size, (world.rank + 1) * size)
    texts = slice(3 * local.start, 3 * local.stop)
    model, objective = build_head(head), Flair(10.0, 100.0, -5.0, seed=3).double()
    share = batch.map(lambda x: x[local])
    similarity = model(rows(image, local), rows(text, texts), Scope(world, views=batch.views))
    loss = objective(similarity, share, progress(step=4)).total
    loss.backward()
    parameters = {**dict(model.named_parameters()), **dict(objective.named_parameters())}
    gradients = {name: world.mean(p.grad) for name, p in parameters.items() if p.grad is not None}
    return {"loss": world.mean(loss.detach()), **gradients}


def test_loss_is_that_of_loops_over_the_selected_pairs():
    image, text, batch = captions_of(4, 3)
    head, objective = build_head("flair"), Flair(10.0, 100.0, -5.0, seed=3).double()
    similarity = head(image, text, Scope(views=batch.views))
    loss = objective(similarity, batch, progress(step=4)).total
    columns, _ = selected_captions(batch, similarity, 3, 4)
    assert columns.shape == (4, 3 + 3)
    scores = scored(head, image, text)
    conditioned = pooled = 0
    for i in range(4):
        # All own captions, one of every other image.
        assert sorted((columns[i] // 3).tolist()) == sorted([i, i, *range(4)])
        assert {3 * i, 3 * i + 1, 3 * i + 2} <= set(columns[i].tolist())
        for column in columns[i].tolist():
            sign = 1 if column // 3 == i else -1
            conditioned -= logsigmoid(sign * (10 * scores[i, column] - 5)) / 6
        for column in range(12):
            sign = 1 if column // 3 == i else -1
            left, right = image.pooled[i] @ head.image_projection, text.pooled[column] @ head.text_projection
            pooled -= logsigmoid(sign * (10 * cosine_similarity(left, right, dim=0) - 5)) / 12
    torch.testing.assert_close(loss, (conditioned + pooled) / 2, rtol=1e-6, atol=0)


def test_captions_of_other_images_are_drawn_anew_in_each_step_and_equally_often():
    image, text, batch = captions_of(40, 3)
    similarity = build_head("flair")(image, text, Scope(views=batch.views))
    draws = [selected_captions(batch, similarity, 0, step)[0] for step in range(20)]
    assert torch.equal(draws[0], selected_captions(batch, similarity, 0, 0)[0])
    others = torch.stack([draw[:, 3:] % 3 for draw in draws])
    shares = others.flatten().bincount(minlength=3) / others.numel()
    assert (shares - 1 / 3).abs().max() < 0.02
    assert all(0.25 < (left == right).float().mean() < 0.42 for left, right in zip(others, others[1:], strict=False))


@pytest.mark.medium
def test_two_ranks_give_the_loss_and_gradients_of_one():
    names = ["flair", "cosine"]
    whole = flair_answers(names)
    for rank in run_ranks(2, flair_answers, names):
        for ours, expected in zip(rank, whole, strict=True):
            assert ours.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(ours[key], value, rtol=1e-10, atol=1e-13, msg=key)
