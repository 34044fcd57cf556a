"""Retrieval compared with sorting, one query at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from clipzoo.errors import ConfigError
from clipzoo.evaluation.encoder import Transform
from clipzoo.evaluation.retrieval import retrieval
from clipzoo.evaluation.scoring import positions
from tests.support.evaluation_sets import IMAGE_SIZE, batch_encoder, gallery, model_of

HEADS = ["clip", "wpse", "kme", "cloob"]


@torch.no_grad()
def plain_scores(model, data) -> torch.Tensor:
    """[n, k], one image or caption at a time."""
    transform = Transform(IMAGE_SIZE, IMAGE_SIZE, "bicubic")
    tokenizer = batch_encoder().tokenizer
    images = [model.encode_image(transform(image)[None]) for image in data.images]
    texts = [model.encode_text(tokenizer([caption])) for caption in data.captions]
    return torch.tensor([[model.similarity(image, text).item() for text in texts] for image in images])


def share(hits: list[bool]) -> float:
    return 100 * sum(hits) / len(hits)


@pytest.mark.medium
@pytest.mark.parametrize("head", HEADS)
def test_recall_of_any_head_equals_sorting_one_query_at_a_time(head):
    model, data = model_of(head), gallery()
    result = retrieval(model, data, batch_encoder(batch_size=5), draws=1, paired=True)
    scores, owner = plain_scores(model, data), data.caption_image
    by_image = [row.argsort(descending=True, stable=True).tolist() for row in scores]
    by_text = [column.argsort(descending=True, stable=True).tolist() for column in scores.mT]
    for cut in (1, 5, 10):
        hits = [any(owner[text] == image for text in order[:cut]) for image, order in enumerate(by_image)]
        assert result.metrics["image_to_text"][f"recall_at_{cut}"] == pytest.approx(share(hits))
        hits = [owner[text] in order[:cut] for text, order in enumerate(by_text)]
        assert result.metrics["text_to_image"][f"recall_at_{cut}"] == pytest.approx(share(hits))
    own = [[text for text in order if owner[text] == image][0] for image, order in enumerate(by_image)]
    assert result.image_positions.tolist() == [order.index(text) for text, order in zip(own, by_image, strict=True)]
    assert result.retrieved.tolist() == [order[:10] for order in by_text]
    assert result.positions.tolist() == [order.index(owner[text]) for text, order in enumerate(by_text)]


def test_paired_recall_leaves_the_captions_siblings_out_of_the_gallery():
    model, data = model_of("clip"), gallery()
    metrics = retrieval(model, data, batch_encoder(), draws=1, paired=True).metrics
    scores = plain_scores(model, data)
    own = [[text for text, owner in enumerate(data.caption_image) if owner == image] for image in range(13)]
    galleries = [[captions[turn] for captions in own] for turn in range(3)]
    hits = [int(scores[image, texts].argmax()) == image for texts in galleries for image in range(13)]
    assert metrics["paired_image_to_text"]["recall_at_1"] == pytest.approx(share(hits))


def test_the_best_of_an_images_captions_counts():
    data = replace(gallery(images=2, captions=2), captions=["a", "b", "c", "d"], caption_image=[0, 1, 0, 1])
    model = model_of("clip")
    scores = plain_scores(model, data)
    metrics = retrieval(model, data, batch_encoder(), draws=1, paired=False).metrics
    expected = [data.caption_image[int(row.argmax())] == image for image, row in enumerate(scores)]
    assert metrics["image_to_text"]["recall_at_1"] == share(expected)


@torch.no_grad()
def test_equal_scores_are_in_the_order_of_their_columns_and_nan_is_refused():
    model, data = model_of("clip"), gallery()
    model.head.text_projection.zero_()
    metrics = retrieval(model, data, batch_encoder(), draws=1, paired=False).metrics
    assert metrics["text_to_image"]["recall_at_1"] == pytest.approx(share([owner == 0 for owner in data.caption_image]))
    first_owner = [image == data.caption_image[0] for image in range(13)]
    assert metrics["image_to_text"]["recall_at_1"] == pytest.approx(share(first_owner))
    model.head.text_projection.fill_(torch.nan)
    with pytest.raises(ConfigError, match="similarities are NaN"):
        retrieval(model, data, batch_encoder(), draws=1, paired=False)


def test_positions_agree_with_a_stable_sort_on_ties():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 4, (50, 9), generator=generator).double()
    column = torch.randint(0, 9, (50,), generator=generator)
    order = scores.argsort(dim=1, descending=True, stable=True)
    assert torch.equal(positions(scores, column), (order == column[:, None]).int().argmax(dim=1))
    assert torch.equal(positions(scores, scores.argmax(dim=1)), torch.zeros(50, dtype=torch.int64))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data.caption_image.pop(), "39 captions, but 38 entries in caption_image"),
        (lambda data: data.caption_image.__setitem__(0, 13), "has 13 images"),
        (lambda data: data.images.append(data.images[0]), "1 of 14 images have no caption"),
        (lambda data: (data.captions.append("more"), data.caption_image.append(0)), "3 to 4 captions.*eval.paired=fal"),
    ],
)
def test_captions_without_an_image_images_without_a_caption_and_uneven_pairs_are_named(change, expected):
    data = gallery()
    change(data)
    with pytest.raises(ValueError, match=expected):
        retrieval(model_of("clip"), data, batch_encoder(), draws=1, paired=True)
