"""SigLIP's models go to transformers' SiglipModel and back: transformers and open_clip are the judges."""

from __future__ import annotations

import json

import open_clip
import pytest
import torch
from safetensors.torch import load_file

import clipzoo
from clipzoo.build import build_model
from clipzoo.errors import ConfigError
from clipzoo.exports.open_clip import as_ours
from clipzoo.heads.vector import ClipHead
from clipzoo.loading import LoadedModel
from tests.support.exported import assert_equal_states, captions, loaded, pictures
from tests.support.siglip_models import write_open_clip_siglip, write_siglip

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model that transformers wrote, and the same model exported by clipzoo."""
    root = tmp_path_factory.mktemp("siglip")
    write_siglip(root / "theirs")
    clipzoo.export(clipzoo.from_transformers(root / "theirs"), root / "ours", "transformers")
    return root / "theirs", root / "ours"


@torch.no_grad()
def pair_logits(model, images, texts):
    pixels = torch.stack([model.transform(image) for image in images])
    return model.pair_logits(model.encode_image(pixels), model.encode_text(model.tokenizer(texts)))


def test_a_siglip_model_goes_through_clipzoo_unchanged(folders):
    theirs, ours = folders
    assert_equal_states(*(load_file(folder / "model.safetensors") for folder in folders))
    stated, again = (json.loads((folder / "config.json").read_text()) for folder in (theirs, ours))
    for part in ("vision_config", "text_config"):
        kept = again[part].keys() & stated[part].keys() - {"bos_token_id", "eos_token_id", "pad_token_id"}
        assert {"hidden_size", "num_hidden_layers", "hidden_act"} <= kept
        assert {key: stated[part][key] for key in kept} == {key: again[part][key] for key in kept}


def test_pixels_are_those_of_transformers_own_image_processor_of_pictures(folders):
    """Both sides are resized; the processor of tensors differs from that of pictures by rounding."""
    model = clipzoo.from_transformers(folders[0])
    processor = transformers.SiglipImageProcessorPil.from_pretrained(folders[0])
    for image in pictures(7):
        pixels = torch.as_tensor(processor(image, return_tensors="pt")["pixel_values"][0])
        torch.testing.assert_close(127.5 * (pixels + 1), model.transform(image).float(), rtol=0, atol=1e-3)


def test_a_siglip_model_is_published_with_its_scale_and_bias(folders, tmp_path):
    model = clipzoo.from_transformers(folders[1])
    clipzoo.export(model, tmp_path / "hub", "hub")
    back = clipzoo.load(tmp_path / "hub")
    assert back.config["pair"] == model.config["pair"] and back.transform.resize_mode == "squash"
    images, texts = torch.randn(3, 48), torch.randn(2, 48)
    assert torch.equal(back.pair_logits(images, texts), model.pair_logits(images, texts))


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    """open_clip's SigLIP with a small text tower, its exports, and the model in clipzoo."""
    root = tmp_path_factory.mktemp("open_clip")
    name, peer = write_open_clip_siglip("ViT-B-16-SigLIP", root / "model")
    ours = LoadedModel(*as_ours(name, peer)).eval()
    clipzoo.export(ours, root / "there", "transformers")
    clipzoo.export(ours, root / "back", "open_clip")
    return peer, ours, root


@pytest.mark.slow
def test_a_siglip_model_of_open_clip_goes_through_clipzoo_unchanged(siglip):
    peer, ours, root = siglip
    weights = load_file(root / "back" / "open_clip_model.safetensors")
    assert_equal_states(dict(peer.state_dict()), weights)
    tokenizer = open_clip.get_tokenizer(f"local-dir:{root / 'back'}")
    texts = [caption.replace("<end_of_text>", "") for caption in captions(9)]
    assert torch.equal(tokenizer(texts), ours.tokenizer(texts))


@pytest.mark.slow
def test_siglip_model_has_the_logits_of_open_clip_and_of_clipzoo(siglip):
    peer, ours, root = siglip
    theirs = transformers.SiglipModel.from_pretrained(root / "there").eval()
    processor = transformers.AutoProcessor.from_pretrained(root / "there")
    images, texts = pictures(7), captions(9)
    inputs = processor(text=texts, images=images, return_tensors="pt", padding="max_length", truncation=True)
    assert torch.equal(inputs["input_ids"], ours.tokenizer(texts))
    with torch.no_grad():
        expected = peer.get_logits(inputs["pixel_values"], inputs["input_ids"])[0]
        torch.testing.assert_close(theirs(**inputs).logits_per_image, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pair_logits(ours, images, texts), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.slow
def test_a_trained_image_projection_goes_to_open_clip_and_is_refused_by_siglip_model(siglip, tmp_path):
    _, ours, _ = siglip
    head = {**ours.config["head"], "image_projection": True}
    config = {**ours.config, "head": head}
    model = LoadedModel(build_model(config), config).eval()
    with pytest.raises(ConfigError, match="SiglipModel has no place for it .head.image_projection is not the identity"):
        clipzoo.export(model, tmp_path / "there", "transformers")
    assert not (tmp_path / "there").exists()
    clipzoo.export(model, tmp_path / "back", "open_clip")
    back = open_clip.create_model(f"local-dir:{tmp_path / 'back'}").eval()
    assert torch.equal(back.visual.head.proj.weight, model.head.image_projection.mT)


def test_scale_and_bias_of_the_objective_go_to_open_clip(tmp_path):
    model = loaded("cosine")
    model.config = {**model.config, "pair": {"log_scale": 2.25, "bias": -9.5}}
    clipzoo.export(model, tmp_path / "out", "open_clip")
    peer, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    images, texts = pictures(3), ["a red circle", ""]
    with torch.no_grad():
        result, _ = peer.eval().get_logits(torch.stack([preprocess(image) for image in images]), model.tokenizer(texts))
    torch.testing.assert_close(result, pair_logits(model, images, texts), rtol=1e-6, atol=1e-5)


def test_a_head_without_image_projection_trains_the_rest_alone():
    head = ClipHead(8, 6, 8, 0.1, 100.0, True, bias=True, image_projection=False)
    trained = {name for name, parameter in head.named_parameters() if parameter.requires_grad}
    assert trained == {"text_projection", "text_bias", "log_scale"}
    assert torch.equal(head.image_projection, torch.eye(8))
