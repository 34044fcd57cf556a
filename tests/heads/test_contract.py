"""Contract of all heads in conf/head; new YAML files are tested without registration."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from clipzoo.config import schema
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.distributed.world import World
from clipzoo.encoders.base import Encoder
from clipzoo.encoders.text import ClipTextTower
from clipzoo.heads.pairs import Scope
from clipzoo.model import Model
from clipzoo.types import Batch, Features, concatenate, map_embedding
from tests.support.heads import (
    CONF,
    HEADS,
    IMAGE_TOKENS,
    IMAGE_WIDTH,
    TEXT_WIDTH,
    build_head,
    every_answer,
    head_config,
    image_features,
    rows,
    scored,
    text_features,
    trimmed,
)
from tests.support.ranks import run_ranks

BF16_ERROR = 0.04
"""Largest change of a score, as a share of the scores' spread, when the encoder runs under bfloat16 autocast."""

every_head = pytest.mark.parametrize("name", HEADS)


@every_head
def test_every_sample_has_one_row_everywhere(name):
    head, image, text = build_head(name), image_features(4), text_features(3)
    image_embedding, text_embedding = head.embed_image(image), head.embed_text(text)
    assert (len(image_embedding), len(text_embedding)) == (4, 3)
    scores = head.score(image_embedding, text_embedding)
    assert scores.shape == (4, 3) and scores.isfinite().all()
    for where in ("before", "after"):
        probe = head.probe(image, where)
        assert probe.dim() == 2 and len(probe) == 4 and probe.isfinite().all()


@every_head
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_gradients_are_finite_for_any_size_of_features_and_reach_every_parameter(name, scale):
    head = build_head(name)
    image, text = (features.map(lambda tensor: scale * tensor) for features in (image_features(5), text_features(5)))
    similarity = head(image, text)
    sum((direction.log_sum_exp() - direction.positives()).mean() for direction in similarity.directions).backward()
    for key, parameter in head.named_parameters():
        assert not parameter.requires_grad or parameter.grad is not None, key
        assert parameter.grad is None or parameter.grad.isfinite().all(), key


@every_head
def test_score_of_blocks_is_the_whole_in_blocks(name):
    head = build_head(name)
    image, text = head.embed_image(image_features(7)), head.embed_text(text_features(5))
    whole = head.score(image, text)
    for rows_, columns in ((slice(0, 3), slice(0, 5)), (slice(3, 7), slice(2, 3))):
        block = head.score(
            map_embedding(lambda t, r=rows_: t[r], image), map_embedding(lambda t, c=columns: t[c], text)
        )
        torch.testing.assert_close(block, whole[rows_, columns], rtol=1e-12, atol=1e-12)


@every_head
def test_yaml_gives_every_argument_and_attributes_name_existing_objectives_and_scores_within_a_modality(name):
    assert list(schema.faults({"head": head_config(name)})) == []
    head, image, text = build_head(name), image_features(4), text_features(4)
    assert set(head.published_with) <= {path.stem for path in (CONF / "objective").glob("*.yaml")}
    similarity = head(image, text)
    for make in (similarity.within_image, similarity.within_text):
        assert (make is not None) == head.compares_within
    # Forward is embed, then similarity; rows are anchors.
    for scores in similarity.directions:
        assert scores.dense().shape == (4, 4)
        assert torch.equal(scores.positives(), scores.dense().diagonal())
    again = head.similarity(head.embed_image(image), head.embed_text(text))
    assert torch.equal(again.image_to_text.dense(), similarity.image_to_text.dense())


@every_head
def test_ensemble_of_one_prompt_changes_nothing_and_the_order_of_prompts_does_not_matter(name):
    head = build_head(name)
    image, text = head.embed_image(image_features(4)), head.embed_text(text_features(3))
    classes = [head.ensemble(map_embedding(lambda t, i=i: t[i : i + 1], text)) for i in range(3)]
    torch.testing.assert_close(head.score(image, concatenate(classes)), head.score(image, text), rtol=1e-13, atol=1e-13)
    scores = head.score(image, head.ensemble(text))
    assert scores.shape == (4, 1)
    turned = head.ensemble(map_embedding(lambda t: t.flip(0), text))
    torch.testing.assert_close(head.score(image, turned), scores, rtol=1e-12, atol=1e-12)


@every_head
def test_scores_stay_in_the_stated_range_for_any_parameters(name):
    for value in (-1e6, 0.3, 1e6):
        head = build_head(name)
        for parameter in head.parameters():
            if parameter.dim() == 0 and parameter.requires_grad:
                parameter.data.fill_(value)
        head.clamp_()
        image, text = (features.map(lambda tensor: 100 * tensor) for features in (image_features(6), text_features(6)))
        low, high = head.score_range
        scores = scored(head, image, text)
        slack = 1e-9 * (1 + scores.abs().max())
        assert scores.isfinite().all() and scores.min() >= low - slack and scores.max() <= high + slack


@every_head
def test_heads_read_tokens_and_padding_only_if_declared(name):
    head, text = build_head(name), text_features(5)
    embedding = head.embed_text(text)
    if not head.needs_tokens:
        assert torch.equal(head.embed_text(Features(text.pooled)), embedding)
        return
    other = text.tokens.where(text.mask[..., None], 7.0)
    image = head.embed_image(image_features(5))
    changed = head.score(image, head.embed_text(Features(text.pooled, other, text.mask)))
    assert torch.equal(changed, head.score(image, embedding)) != head.needs_padding


@every_head
def test_only_stochastic_heads_change_with_the_draw_and_draws_repeat(name):
    head, image, text = build_head(name), image_features(4), text_features(4)

    def scores(index: int, training: bool) -> Tensor:
        head.train(training)
        head.resample(index)
        return scored(head, image, text).detach()

    first = scores(0, True)
    assert torch.equal(scores(1, True), first) != head.stochastic
    assert torch.equal(scores(0, False), first) != head.stochastic
    assert torch.equal(scores(0, True), first)


@every_head
def test_saved_and_loaded_head_gives_identical_scores(name):
    head, image, text = build_head(name), image_features(4), text_features(4)
    for parameter in head.parameters():
        parameter.data.add_(0.01)
    head.resample(5)
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    file.seek(0)
    loaded = build_head(name)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    head.eval(), loaded.eval()
    expected = scored(head, image, text)
    assert torch.equal(scored(loaded, image, text), expected)


@pytest.fixture(scope="module")
def two_ranks(request) -> list[dict]:
    """The answers of the heads that are tested, on both ranks."""
    tests = [item for item in request.session.items if item.path == request.path and "two_ranks" in item.fixturenames]
    return run_ranks(2, _answers, [test.callspec.params["name"] for test in tests])


@pytest.mark.medium
@every_head
def test_two_ranks_give_the_values_and_gradients_of_one(name, two_ranks):
    (whole,) = [_answers([name])[name]]
    first, second = (rank[name] for rank in two_ranks)
    for direction in ("image_to_text", "text_to_image"):
        together = torch.cat([first[direction], second[direction]])
        torch.testing.assert_close(together, whole[direction], rtol=1e-10, atol=1e-12)
    for key, gradient in whole["gradients"].items():
        torch.testing.assert_close(first["gradients"][key], gradient, rtol=1e-9, atol=1e-11, msg=key)
    torch.testing.assert_close((first["loss"] + second["loss"]) / 2, whole["loss"], rtol=1e-12, atol=1e-12)


def _answers(names: list[str]) -> dict[str, dict]:
    """This rank's rows of both directions, its loss, and the gradients as DDP averages them."""
    samples = 6
    world = World.from_process_group()
    local = samples // world.size
    mine = slice(world.rank * local, (world.rank + 1) * local)
    answers = {}
    for name in names:
        head = build_head(name)
        head.resample(3)
        text = rows(text_features(samples), mine)
        # Ranks whose captions are trimmed to different lengths must still agree.
        similarity = head(
            rows(image_features(samples), mine), text if head.needs_padding else trimmed(text), Scope(world)
        )
        loss = every_answer(similarity)
        loss.backward()
        answers[name] = {
            "loss": loss.detach(),
            "image_to_text": similarity.image_to_text.dense().detach(),
            "text_to_image": similarity.text_to_image.dense().detach(),
            "gradients": {
                key: world.mean(parameter.grad)
                for key, parameter in head.named_parameters()
                if parameter.grad is not None
            },
        }
    return answers


class SmallEncoder(Encoder):
    """Patches [b, M, 9] and a CLIP text tower of one layer, context 8."""

    image_width, text_width, context_length = IMAGE_WIDTH, TEXT_WIDTH, 8

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Sequential(nn.Linear(9, IMAGE_WIDTH), nn.GELU(), nn.Linear(IMAGE_WIDTH, IMAGE_WIDTH))
        self.norm = nn.LayerNorm(IMAGE_WIDTH)
        self.captions = ClipTextTower(8, 49408, TEXT_WIDTH, 1, 2, False, True, ClipTokenizer.end_token, 1e-6)

    def image(self, image: Tensor) -> Features:
        tokens = self.norm(self.patches(image))
        return Features(tokens.mean(dim=1), tokens)

    def text(self, text: Tensor) -> Features:
        return self.captions(text)


CAPTIONS = [
    "a red circle",
    "",
    "two striped blue squares above a small green triangle on a wall",
    "a dog !",
    "one",
    "x",
]


@pytest.fixture(scope="module")
def encoder() -> SmallEncoder:
    return SmallEncoder()


@pytest.fixture(scope="module")
def batch() -> Batch:
    image = torch.randn(len(CAPTIONS), IMAGE_TOKENS, 9, generator=torch.Generator().manual_seed(0))
    return Batch(image, ClipTokenizer(8)(CAPTIONS), torch.arange(len(CAPTIONS)))


@every_head
def test_bfloat16_features_change_scores_little(name, encoder, batch):
    model = Model(encoder, build_head(name).float())
    exact = model(batch).image_to_text.dense()
    with torch.autocast("cpu", torch.bfloat16):
        similarity = model(batch)
    rounded = similarity.image_to_text.dense()
    assert rounded.dtype == torch.float32
    error = (rounded - exact).abs().max() / (exact.max() - exact.min())
    assert 0 < error < BF16_ERROR
    every_answer(similarity).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@every_head
def test_empty_and_truncated_captions_are_scored(name, encoder, batch):
    head = build_head(name)
    model = Model(copy.deepcopy(encoder).double(), head)
    assert batch.text[2, -1] == ClipTokenizer.end_token
    assert model.encoder.text(batch.text).mask.sum(dim=1).tolist() == [5, 2, 8, 5, 3, 3]
    scores = model.similarity(model.encode_image(batch.image.double()), model.encode_text(batch.text))
    assert scores.isfinite().all()
    # An empty caption is not confused with padding: it scores the same alone as beside longer ones.
    alone = model.similarity(model.encode_image(batch.image.double()), model.encode_text(batch.text[1:2]))
    torch.testing.assert_close(alone, scores[:, 1:2], rtol=1e-12, atol=1e-12)
