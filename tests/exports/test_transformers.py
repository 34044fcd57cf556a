"""transformers itself is the judge of models that go to it and back."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import clipzoo
from clipzoo.errors import ConfigError
from tests.support.exported import assert_equal_states, captions, loaded, logits, pictures
from tests.support.siglip_models import write_siglip

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.medium


@pytest.fixture(scope="module", params=["clip", "cloob", "siglip"])
def exported(request, tmp_path_factory):
    """A model and the folder that holds it for transformers. CLIP's towers have different activations."""
    root = tmp_path_factory.mktemp("transformers")
    if request.param == "siglip":
        write_siglip(root / "theirs")
        model = clipzoo.from_transformers(root / "theirs")
    else:
        model = loaded(request.param, "encoder.image_tower.quick_gelu=true")
    clipzoo.export(model, root / "exported", "transformers")
    return model, root / "exported"


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_logits_are_those_of_clipzoo_through_the_processor(exported, batch):
    model, folder = exported
    peer, loading = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    processor = transformers.AutoProcessor.from_pretrained(folder)
    kind = "Siglip" if "pair" in model.config else "CLIP"
    assert (type(peer).__name__, type(processor).__name__) == (f"{kind}Model", f"{kind}Processor")
    images, texts = pictures(batch), captions(batch)
    inputs = processor(text=texts, images=images, return_tensors="pt", padding="max_length", truncation=True)
    assert torch.equal(inputs["input_ids"], model.tokenizer(texts))
    encoder = model.config["encoder"]
    mean, std = (torch.tensor(encoder[name]).view(3, 1, 1) for name in ("mean", "std"))
    pixels = 255 * (inputs["pixel_values"] * std + mean)
    ours = torch.stack([model.transform(image) for image in images])
    torch.testing.assert_close(pixels, ours.float(), rtol=0, atol=1e-3)
    with torch.no_grad():
        expected = model.pair_logits(model.encode_image(ours), model.encode_text(model.tokenizer(texts)))
        torch.testing.assert_close(peer.eval()(**inputs).logits_per_image, expected, rtol=1e-5, atol=1e-5)


def test_shorter_padding_gives_the_same_logits(exported):
    model, folder = exported
    if "pair" in model.config:
        pytest.skip("SigLIP's text tower attends to padding")
    peer = transformers.CLIPModel.from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    images, texts = pictures(2), ["a red circle", "two squares"]
    inputs = processor(text=texts, images=images, return_tensors="pt", padding=True)
    assert inputs["input_ids"].shape[1] < 8
    with torch.no_grad():
        torch.testing.assert_close(peer(**inputs).logits_per_image, logits(model, images, texts), rtol=1e-5, atol=1e-5)


def test_a_clip_model_comes_back_with_identical_weights(tmp_path):
    model = loaded("clip")
    clipzoo.export(model, tmp_path / "out", "transformers")
    back = clipzoo.from_transformers(tmp_path / "out")
    assert_equal_states(dict(model.state_dict()), dict(back.state_dict()))
    assert back.config["encoder"]["mean"] == model.config["encoder"]["mean"]


def test_a_model_that_transformers_wrote_goes_through_clipzoo_unchanged(tmp_path):
    config = transformers.CLIPConfig(
        vision_config={"image_size": 32, "patch_size": 8, "hidden_size": 48, "intermediate_size": 192,
                       "num_hidden_layers": 2, "num_attention_heads": 3},
        text_config={"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                     "eos_token_id": 49407, "bos_token_id": 49406, "vocab_size": 49408},
        projection_dim=24,
    )  # fmt: skip
    transformers.CLIPModel(config).save_pretrained(tmp_path / "theirs")
    transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(tmp_path / "theirs")
    clipzoo.export(clipzoo.from_transformers(tmp_path / "theirs"), tmp_path / "ours", "transformers")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert_equal_states(before, after)
    again = json.loads((tmp_path / "ours" / "config.json").read_text())
    for part in ("vision_config", "text_config"):
        stated = getattr(config, part).to_dict()
        # CLIPModel ignores its towers' own projection_dim, and no padding reaches its pooled features.
        kept = again[part].keys() - {"projection_dim", "pad_token_id"}
        assert {key: stated[key] for key in kept} == {key: again[part][key] for key in kept}


def test_weights_of_another_model_and_another_kind_of_model_are_refused(tmp_path):
    clipzoo.export(loaded("clip"), tmp_path, "transformers")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="model.safetensors does not fit config.json .KeyError: .*: export the model"):
        clipzoo.from_transformers(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 12, "vocab_size": 9}')
    with pytest.raises(ConfigError, match="model.safetensors lacks embeddings.LayerNorm.bias, .* more"):
        clipzoo.from_transformers(tmp_path)
