"""Models of transformers by name or folder, most with its own modules: transformers is the judge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import clipzoo
from clipzoo.errors import ConfigError
from clipzoo.initial import read_source
from clipzoo.io.files import digest_of
from clipzoo.io.weights import weights_digest
from tests.support.exported import assert_equal_states, logits, pictures
from tests.support.two_view_models import KINDS, write_two_view_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.medium
TEXTS = ["a red circle", "", "two very red squares", "a " + "very " * 40 + "red circle"]
SHIFTED = (1, 2, 3)
"""Pictures whose margin is 3 modulo 4: torchvision rounds the central crop up, transformers rounds it down."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write a model of some kind once, in the layout of transformers, and return its folder."""
    root = tmp_path_factory.mktemp("models")

    def folder(kind: str) -> Path:
        if not (root / kind).exists():
            write_two_view_model(kind, root / kind)
        return root / kind

    return folder


def inputs_of(folder: Path, images: list[Any]) -> dict[str, torch.Tensor]:
    """Inputs of the model from its own tokenizer and its own image processor of pictures."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer(TEXTS, padding="max_length", truncation=True, return_tensors="pt")
    if "siglip" in folder.name:
        del text["attention_mask"]  # SigLIP's text towers attend to padding
    return {**text, "pixel_values": torch.as_tensor(processor(images, return_tensors="pt")["pixel_values"])}


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_tokens_and_logits_in_float64_are_those_of_transformers(kind, written):
    folder, images = written(kind), pictures(7)
    peer = transformers.AutoModel.from_pretrained(folder).double().eval()
    model, inputs = clipzoo.load(folder).double(), inputs_of(folder, images)
    ours = torch.stack([model.transform(image) for image in images])
    has_our_towers = kind == "siglip_2"
    pixels = model.encoder.normalised(ours) if has_our_towers else model.encoder.pixels(ours)["pixel_values"]
    same = [row for row in range(7) if model.transform.resize_mode == "squash" or row not in SHIFTED]
    torch.testing.assert_close(pixels[same].float(), inputs["pixel_values"][same], rtol=0, atol=1e-6)
    expected = peer(**{**inputs, "pixel_values": pixels}).logits_per_image
    image, text = model.encode_image(ours), model.encode_text(TEXTS)
    torch.testing.assert_close(model.pair_logits(image, text), expected, rtol=1e-7, atol=1e-7)
    # The bias of a sigmoid changes no ranking.
    bias = peer.logit_bias.item() if "siglip" in kind else 0.0
    torch.testing.assert_close(model.similarity(image, text) + bias, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", ["align", "siglip_2"])
def test_a_model_is_published_in_clipzoos_format_and_loaded_by_name(kind, written, tmp_path):
    model = clipzoo.load(f"transformers:{written(kind)}")
    clipzoo.export(model, tmp_path / "hub", "hub")
    back = clipzoo.load(tmp_path / "hub")
    assert torch.equal(logits(back, pictures(3), TEXTS), logits(model, pictures(3), TEXTS))
    assert back.config.get("pair") == model.config.get("pair")
    assert back.transform.resize_mode == "squash"


def test_a_model_of_transformers_gives_initial_weights(written):
    name = f"transformers:{written('siglip_2')}"
    source, model = read_source(name, "init.weights", None), clipzoo.load(name)
    assert source.state.keys() == {*model.state_dict(), "logit_bias"} and source.config == model.config
    assert weights_digest(name, "init.weights") == digest_of(written("siglip_2") / "model.safetensors")


def test_the_precision_of_stored_weights_is_known(tmp_path):
    write_two_view_model("altclip", tmp_path / "model", torch.bfloat16)
    assert clipzoo.load(tmp_path / "model").stored_dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["transformers:somebody/model", "hf-hub:somebody/model@main"])
def test_a_model_is_loaded_from_the_hubs_cache_by_its_name(name, written, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--somebody--model" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(written("chinese_clip"), snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_equal_states(*(dict(clipzoo.load(place).state_dict()) for place in (name, written("chinese_clip"))))
    with pytest.raises(ConfigError, match="somebody/other"):
        clipzoo.load(name.replace("model", "other"))
    with pytest.raises(ConfigError, match="holds one model and no average"):
        clipzoo.load(name, average=True)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_other_models_pickles_and_code_are_refused_with_one_message_each(written, tmp_path):
    for name in ("code", "pickle", "naflex", "text", "left", "other"):
        shutil.copytree(written("metaclip_2"), tmp_path / name)
    change(tmp_path / "code" / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    (tmp_path / "pickle" / "model.safetensors").rename(tmp_path / "pickle" / "pytorch_model.bin")
    change(tmp_path / "naflex" / "config.json", model_type="siglip2")
    change(tmp_path / "text" / "config.json", model_type="nothing")
    change(tmp_path / "left" / "tokenizer_config.json", padding_side="left")
    change(tmp_path / "other" / "preprocessor_config.json", do_center_crop=False)
    expected = {
        "code": "names code in auto_map: clipzoo executes no code of a model",
        "pickle": "model.safetensors is missing: pytorch_model.bin may execute code and is not read; save the model by",
        "naflex": "holds SigLIP 2 NaFlex .siglip2., whose images are not squares: give type siglip",
        "text": "transformers has no model_type nothing; no code is imported",
        "left": "pads captions on the left",
        "other": "its image processor does not resize images and take a central square",
        "missing": "is neither a folder nor a model that the Hugging Face hub gives",
    }
    for name, message in expected.items():
        with pytest.raises(ConfigError, match=message) as caught:
            clipzoo.load(f"transformers:{tmp_path / name}")
        assert "\n" not in str(caught.value)
