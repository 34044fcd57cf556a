"""Towers of open_clip's models: open_clip itself is the judge."""

from __future__ import annotations

import open_clip
import pytest
import torch

from clipzoo.encoders.base import encode_by_length
from clipzoo.encoders.open_clip import OpenClipImage, OpenClipText
from clipzoo.encoders.towers import Towers
from clipzoo.errors import ConfigError
from clipzoo.exports.open_clip import as_ours
from tests.support.open_clip_models import FAMILIES, LARGE, captions_of, small_model, write_hugging_face_config


def by_size(family):
    return pytest.param(family, marks=pytest.mark.slow if family in LARGE else pytest.mark.medium)


@pytest.mark.parametrize("family", map(by_size, FAMILIES))
def test_features_of_every_family_are_those_of_open_clip(family, tmp_path):
    name, peer = small_model(family, tmp_path)
    model = as_ours(name, peer)[0].double().eval()
    peer = peer.double()
    size = model.encoder.image_size
    image, text = torch.randn(2, 3, size, size, dtype=torch.float64), captions_of(peer)
    head = model.head
    with torch.no_grad():
        features = {"image": model.encoder.image_tower(image), "text": model.encoder.text(text)}
        expected = {"image": peer.encode_image(image, normalize=False), "text": peer.encode_text(text, normalize=False)}
        for view, own in features.items():
            bias = getattr(head, f"{view}_bias")
            embedded = own.pooled @ getattr(head, f"{view}_projection") + (0 if bias is None else bias)
            torch.testing.assert_close(embedded, expected[view], rtol=0, atol=1e-10)
            assert own.tokens is None or own.tokens.shape[-1] == own.pooled.shape[-1]
        torch.testing.assert_close(model.encoder.pooled_text(text), features["text"].pooled, rtol=0, atol=1e-10)
        pooled = model.encoder.image_tower.pooled(image)
        torch.testing.assert_close(pooled, features["image"].pooled, rtol=0, atol=1e-10)
        if not model.needs_padding:
            trimmed = model.encoder.text(text[:, :16])
            torch.testing.assert_close(trimmed.pooled, features["text"].pooled, rtol=0, atol=1e-10)
            lengths = torch.tensor([4, 6, 8, 10]).repeat(16)
            grouped = encode_by_length(model.encoder.text, text.repeat(16, 1), lengths, tokens=False)
            torch.testing.assert_close(grouped.pooled, features["text"].pooled.repeat(16, 1), rtol=0, atol=1e-10)
    assert model.encoder.image_tower.layers() and model.encoder.text_tower.layers()


def test_an_unknown_model_and_an_unknown_option_are_one_message_with_the_nearest_names():
    with pytest.raises(ConfigError, match="open_clip has no model ViT-B16; did you mean ViT-B-16 or "):
        OpenClipImage("ViT-B16", None, {})
    with pytest.raises(ConfigError, match="image.options.patch_drop: .* no such option; did you mean patch_dro"):
        OpenClipImage("RN50", None, {"patch_drop": 0.5})


def test_an_image_size_a_context_length_and_options_reach_the_trunks():
    with torch.device("meta"):
        encoder = Towers(OpenClipImage("ViT-B-32", 64, {}), OpenClipText("ViT-B-32", 20, {}))
        facts = encoder.facts()
        assert (facts["image_size"], facts["context_length"], facts["tokenizer"]["context_length"]) == (64, 20, 20)
        dropped = OpenClipImage("convnext_tiny", None, {"timm_drop_path": 0.5}).trunk.stages[-1].blocks[-1]
        assert OpenClipImage("ViT-B-32", None, {"patch_dropout": 0.5}).trunk.patch_dropout.prob == 0.5
    assert encoder.image_tower.trunk.positional_embedding.shape[0] == 5 and dropped.drop_path.drop_prob == 0.5


@pytest.mark.slow
def test_every_model_of_the_registry_is_built_on_the_meta_device(tmp_path):
    """Their tokenizers and their models of transformers are named by the hub: the latter come from a folder here."""
    built, count = [], len(open_clip.list_models())
    for name in open_clip.list_models():
        settings = open_clip.get_model_config(name)["text_cfg"]
        source, options = settings.get("hf_model_name"), {}
        if source:
            options = {"hf_model_name": write_hugging_face_config(source, tmp_path)}
        with torch.device("meta"):
            encoder = Towers(OpenClipImage(name, None, {}), OpenClipText(name, None, options), name)
        facts = encoder.facts()
        assert all(parameter.is_meta for parameter in encoder.parameters())
        size = open_clip.get_model_config(name)["vision_cfg"].get("image_size", 224)
        assert (facts["image_size"], facts["context_length"]) == (size, settings.get("context_length", 77)), name
        built.append(name)
    assert len(built) == count >= 135
