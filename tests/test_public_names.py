"""The names of `import clipzoo`, and embeddings as users handle them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import clipzoo
from clipzoo.build import build_model
from tests.support.experiments import composed_once
from tests.support.heads import build_head, image_features, text_features


def test_public_names_are_listed_and_exist():
    assert set(dir(clipzoo)) == {*clipzoo.__all__, "__version__"}
    assert all(getattr(clipzoo, name) is not None for name in clipzoo.__all__)


@pytest.fixture(scope="module")
def model() -> clipzoo.LoadedModel:
    config = composed_once("data.shards=none.tar", "encoder=tiny", "head.embed_width=16")
    return clipzoo.LoadedModel(build_model(config), config).eval()


@torch.no_grad()
def test_one_caption_is_one_row_as_text_in_a_list_and_as_ids(model):
    ids = model.tokenizer("a bird")
    assert ids.shape == (1, model.encoder.context_length) and torch.equal(ids, model.tokenizer(["a bird"]))
    expected = model.encode_text(ids)
    for text in ("a bird", ["a bird"], ("a bird",)):
        assert torch.equal(model.encode_text(text), expected)
    assert len(model.encode_text(["a bird", "a plane"])) == 2


@pytest.mark.parametrize("call", [lambda model: model.tokenizer([1]), lambda model: model.encode_text([["a bird"]])])
def test_captions_of_another_kind_are_refused(model, call):
    with pytest.raises(clipzoo.ConfigError, match="captions are a string or a list of strings, not (int|list)"):
        call(model)


@torch.no_grad()
def test_a_picture_is_given_as_an_image_or_a_path(model, tmp_path):
    path, image = tmp_path / "bird.png", Image.effect_noise((40, 30), 80).convert("RGB")
    image.save(path)
    pixels = model.transform(image)
    assert torch.equal(model.transform(path), pixels) and torch.equal(model.transform(str(path)), pixels)
    expected = model.encode_image(pixels.unsqueeze(0))
    for picture in (image, path, str(path), [path]):
        assert torch.equal(model.encode_image(picture), expected)


def test_what_is_no_picture_or_has_no_batch_is_refused(model, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(clipzoo.ConfigError, match=r"text\.png cannot be decoded as an image"):
        model.transform(tmp_path / "text.png")
    with pytest.raises(clipzoo.ConfigError, match=r"none\.png is missing"):
        model.encode_image("none.png")
    with pytest.raises(clipzoo.ConfigError, match="takes a PIL image or the path of one, not ndarray"):
        model.transform(np.zeros((3, 8, 8)))
    with pytest.raises(clipzoo.ConfigError, match="unsqueeze"):
        model.encode_image(torch.zeros(3, 32, 32, dtype=torch.uint8))
    with pytest.raises(clipzoo.ConfigError, match=r"token ids \[b, L\]"):
        model.encode_text(model.tokenizer("a bird")[0])


@pytest.mark.parametrize("name", ["clip", "kme", "wpse"])
def test_rows_of_embeddings_are_selected_and_concatenated(name):
    head = build_head(name).eval()
    with torch.no_grad():
        image, text = head.embed_image(image_features(5)), head.embed_text(text_features(4))
        scores = head.score(image, text)
        rows = torch.tensor([4, 0, 2])
        torch.testing.assert_close(head.score(image[rows], text[1:3]), scores[rows][:, 1:3])
        joined = clipzoo.concatenate([text[:1], text[1:]])
        torch.testing.assert_close(head.score(image, joined), scores)
