"""Encoders in the formats of open_clip and transformers: exported with identical tensors, or refused by name."""

from __future__ import annotations

import open_clip
import pytest
import torch
from safetensors.torch import load_file

import clipzoo
from clipzoo.build import build_model, found_in_model
from clipzoo.config.schema import filled
from clipzoo.errors import ConfigError
from clipzoo.exports.open_clip import as_ours
from clipzoo.loading import LoadedModel
from tests.support.experiments import composed_once
from tests.support.exported import assert_equal_states
from tests.support.open_clip_models import FAMILIES, LARGE, captions_of, small_model
from tests.support.siglip_models import write_tokenizer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.medium
CLIP_MODEL = ("ViT-B-32", "ViT-B-32-quickgelu", "ViT-M-32-alt", "ViT-L-14-worldwide")
"""Families that CLIPModel holds. tests/exports/test_siglip.py covers those of SiglipModel."""
REFUSED = {
    "RN50": "its image tower is ModifiedResNet, not open_clip's VisionTransformer",
    "ViT-L-14-CLIPA": "its image tower pools by avg, not at the class token",
    "coca_base": "its text tower is not causal, or does not pool at the end of text",
    "roberta-ViT-B-32": "its text tower is RobertaModel, not open_clip's causal TextTransformer",
    "convnext_tiny": "its image tower is ConvNeXt",
    "ViT-B-16-SigLIP2": "SiglipModel has no place for it .it has image_tower.trunk.cls_token",
}
"""Some of the others, with the reason."""


def by_size(family):
    return pytest.param(family, marks=pytest.mark.slow if family in LARGE else ())


@pytest.mark.parametrize("family", map(by_size, FAMILIES))
def test_every_family_comes_back_to_open_clip_unchanged_and_goes_to_transformers_or_is_refused(family, tmp_path):
    name, peer = small_model(family, tmp_path)
    write_tokenizer(tmp_path / "model")
    ours = LoadedModel(*as_ours(name, peer)).eval()
    clipzoo.export(ours, tmp_path / "exported", "open_clip")
    # CoCa's decoder writes captions and is no part of the two towers.
    before = {key: value for key, value in peer.state_dict().items() if not key.startswith("text_decoder.")}
    assert_equal_states(before, load_file(tmp_path / "exported" / "open_clip_model.safetensors"))
    again = open_clip.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained_text=False).eval()
    size = peer.visual.image_size
    image = torch.randn(2, 3, *(size if isinstance(size, tuple) else (size, size)))
    text = captions_of(peer)
    with torch.no_grad():
        for encode, batch in (("encode_image", image), ("encode_text", text)):
            expected = getattr(peer, encode)(batch, normalize=True)
            torch.testing.assert_close(getattr(again, encode)(batch, normalize=True), expected, rtol=1e-5, atol=1e-5)

    there = tmp_path / "transformers"
    if family not in CLIP_MODEL:
        reason = REFUSED.get(family, "CLIPModel has no place for it")
        with pytest.raises(ConfigError, match=f"transformers cannot represent this model: .*{reason}"):
            clipzoo.export(ours, there, "transformers")
        assert not there.exists()
        return
    clipzoo.export(ours, there, "transformers")
    model = transformers.CLIPModel.from_pretrained(there).eval()
    with torch.no_grad():
        logits = model(pixel_values=image, input_ids=text).logits_per_image
        torch.testing.assert_close(logits, peer.get_logits(image, text)[0], rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "to", "reason"),
    [
        ("demo", "open_clip", "its image tower is clipzoo.encoders.demo.DemoImageTower"),
        ("demo", "transformers", "its image tower is DemoImageTower"),
        ("small", "open_clip", "encoder.text_tower.distinct_pads is true"),
        ("vit_s16", "transformers", "its image tower is VisionTransformer, not open_clip's VisionTransformer"),
        ("clip_rn50", "transformers", "its image tower is ModifiedResNet"),
    ],
)
def test_encoders_of_clipzoo_without_a_place_in_a_format_are_refused(encoder, to, reason, tmp_path):
    config = composed_once("data.shards=none.tar", f"encoder={encoder}", "head.embed_width=32")
    with pytest.raises(ConfigError, match=f"{to} cannot represent this model: .*{reason}"):
        clipzoo.export(LoadedModel(build_model(config), config), tmp_path / "exported", to)
    assert not (tmp_path / "exported").exists()


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["vit_s16", "clip_rn50", "clip_vit_b32"])
def test_encoders_of_clipzoo_come_back_from_open_clip_unchanged(encoder, tmp_path):
    config = composed_once("data.shards=none.tar", f"encoder={encoder}", "head.embed_width=32")
    model = LoadedModel(build_model(config), config)
    clipzoo.export(model, tmp_path, "open_clip")
    clipzoo.export(clipzoo.from_open_clip(f"local-dir:{tmp_path}"), tmp_path / "again", "open_clip")
    first, second = (load_file(folder / "open_clip_model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert_equal_states(first, second)


def test_a_text_model_of_transformers_is_refused_by_both_and_published_by_its_name(tmp_path):
    config = composed_once(
        "data.shards=none.tar", "encoder=towers", "encoder/image=open_clip", "encoder/text=huggingface",
        "encoder.image.name=ViT-B-32", "encoder.text.name=bert", "encoder.text.tokenizer=clip",
        "+encoder.image.options={width: 32, layers: 1, head_width: 32}", "encoder.image_size=32",
        "+encoder.text.options={hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, vocab_size: 49408}",
        "encoder.context_length=16", "head.embed_width=8",
    )  # fmt: skip
    config = filled(config, found_in_model(config))
    model = LoadedModel(build_model(config), config).eval()
    for to, reason in (
        ("open_clip", "its text tower is .*HuggingFaceText"),
        ("transformers", "its text tower is Bert"),
    ):
        with pytest.raises(ConfigError, match=f"{to} cannot represent this model: .*{reason}"):
            clipzoo.export(model, tmp_path / to, to)
        assert not (tmp_path / to).exists()
    clipzoo.export(model, tmp_path / "hub", "hub")
    assert_equal_states(dict(model.state_dict()), dict(clipzoo.load(tmp_path / "hub").state_dict()))


def test_a_model_whose_towers_a_folder_of_this_machine_describes_is_not_published(tmp_path):
    name, peer = small_model("ViT-B-32", tmp_path)
    with pytest.raises(ConfigError, match="hub cannot represent this model: .*local-dir:.*names a place outside"):
        clipzoo.export(LoadedModel(*as_ours(name, peer)), tmp_path / "hub", "hub")
    assert not (tmp_path / "hub").exists()
