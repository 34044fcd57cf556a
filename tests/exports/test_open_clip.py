"""Models that go to open_clip and back: open_clip itself is the judge."""

from __future__ import annotations

import json

import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

import clipzoo
from clipzoo.build import build_model
from clipzoo.errors import ConfigError
from clipzoo.exports import open_clip as open_clip_format
from clipzoo.loading import LoadedModel
from tests.support.experiments import composed_once
from tests.support.exported import assert_equal_states, captions, loaded, logits, pictures

TEXT = {
    "_target_": "clipzoo.encoders.text.ClipTextTower", "context_length": 77, "vocabulary": 49408, "width": 32,
    "layers": 2, "heads": 2, "quick_gelu": True, "distinct_pads": False, "end_token": 49407, "norm_eps": 1e-6,
}  # fmt: skip
TOWERS = {
    "vit": ({"_target_": "clipzoo.encoders.image.ClipViT", "image_size": 32, "patch_size": 8, "width": 64, "layers": 2,
             "heads": 1, "quick_gelu": True}, 64, 32),
    "resnet": ({"_target_": "clipzoo.encoders.image.ClipResNet", "image_size": 64, "layers": [1, 1, 1, 1],
                "stem_width": 8, "heads": 4}, 256, 64),
    "timm": ({"_target_": "clipzoo.encoders.image.TimmTower", "name": "resnet10t", "image_size": None,
              "pretrained": False, "options": {}}, 512, 64),
}  # fmt: skip


def model_of(kind: str, **changes) -> LoadedModel:
    tower, width, size = TOWERS[kind]
    config = {
        "seed": 0,
        "encoder": {
            "_target_": "clipzoo.encoders.towers.TwoTowers", "image_size": size, "image_width": width, "text_width": 32,
            "context_length": 77, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.25, 0.3], "image_tower": tower,
            "text_tower": {**TEXT, **changes},
            "tokenizer": {"_target_": "clipzoo.data.tokenizer.ClipTokenizer", "context_length": 77},
        },
        "head": {
            "_target_": "clipzoo.heads.vector.ClipHead", "image_width": width, "text_width": 32, "embed_width": 16,
            "temperature": 0.05, "max_scale": 100.0, "learnable_temperature": True,
        },
        "data": {"interpolation": "bicubic"},
    }  # fmt: skip
    model = LoadedModel(build_model(config), config).eval()
    for module in model.modules():  # statistics that a wrong mapping would show
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
    return model


def pixels_and_floats(model: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images as this package takes them, and normalised for open_clip."""
    size, config = model.encoder.image_size, model.config["encoder"]
    pixels = torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8)
    mean, std = (torch.tensor(config[name]).view(3, 1, 1) for name in ("mean", "std"))
    return pixels, (pixels / 255 - mean) / std


@pytest.mark.parametrize("kind", TOWERS)
def test_an_exported_model_has_identical_embeddings_in_open_clip_and_comes_back_with_identical_weights(kind, tmp_path):
    ours = model_of(kind)
    clipzoo.export(ours, tmp_path)
    peer = open_clip.create_model(f"local-dir:{tmp_path}").eval()
    pixels, image = pixels_and_floats(ours)
    text = open_clip.tokenize(["a red circle", "", "two blue squares"])
    with torch.no_grad():
        torch.testing.assert_close(ours.encode_image(pixels), functional.normalize(peer.encode_image(image), dim=-1))
        torch.testing.assert_close(ours.encode_text(text), functional.normalize(peer.encode_text(text), dim=-1))
        logits = ours.similarity(ours.encode_image(pixels), ours.encode_text(text))
        torch.testing.assert_close(logits, peer.get_logits(image, text)[0], rtol=1e-4, atol=1e-4)
    back = clipzoo.from_open_clip(f"local-dir:{tmp_path}")
    assert_equal_states(dict(ours.state_dict()), dict(back.state_dict()))
    assert back.encoder.image_size == TOWERS[kind][2]
    with pytest.raises(ConfigError, match="already contains an exported model"):
        clipzoo.export(ours, tmp_path)


def test_a_resnet_whose_pooling_has_an_output_bias_keeps_its_embeddings(tmp_path):
    torch.manual_seed(0)
    ours = model_of("resnet")
    clipzoo.export(ours, tmp_path)
    weights = load_file(tmp_path / "open_clip_model.safetensors")
    weights["visual.attnpool.c_proj.bias"] = torch.randn(16)
    save_file(weights, tmp_path / "open_clip_model.safetensors")
    peer = open_clip.create_model(f"local-dir:{tmp_path}").eval()
    biased = clipzoo.from_open_clip(f"local-dir:{tmp_path}")
    pixels, image = pixels_and_floats(ours)
    with torch.no_grad():
        expected = functional.normalize(peer.encode_image(image), dim=-1)
        assert not torch.allclose(ours.encode_image(pixels), expected, atol=1e-2)
        torch.testing.assert_close(biased.encode_image(pixels), expected)


@pytest.mark.parametrize(
    ("name", "pretrained", "expected"),
    [
        ("ViT-B32", None, "open_clip has no model ViT-B32; did you mean ViT-B-32"),
        ("RN50", "opnai", "pretrained=opnai is neither a file nor a tag of open_clip's RN50 .its tags: openai"),
        ("ViT-B-32/laion2b_s34b_b79k", None, "weights laion2b_s34b_b79k of open_clip's ViT-B-32 cannot be downloaded"),
        ("models/missing", None, "open_clip has no model models/missing, and there is no such folder"),
    ],
)
def test_unknown_open_clip_names_are_reported(name, pretrained, expected):
    with pytest.raises(ConfigError, match=expected):
        clipzoo.from_open_clip(name, pretrained)


def test_a_model_without_an_open_clip_form_is_refused_with_its_reason(tmp_path):
    for key, value in (("distinct_pads", True), ("quick_gelu", False)):
        with pytest.raises(ConfigError, match=f"{key} (is true|differs between the towers)"):
            clipzoo.export(model_of("vit", **{key: value}), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["encoder=tiny"], ""),
        (["encoder=small"], "encoder.text_tower.distinct_pads is true"),
        (["encoder=demo"], "its image tower is clipzoo.encoders.demo.DemoImageTower"),
        (["encoder=demo", "head=kme"], ""),
        (None, "its encoder is mypackage.Encoder"),
    ],
)
def test_a_training_says_at_its_start_that_its_clip_model_cannot_be_exported(overrides, reason):
    configuration = composed_once("data.shards=none.tar", *(overrides or ()))
    if overrides is None:
        configuration["encoder"] = {"_target_": "mypackage.Encoder"}
    note = open_clip_format.export_note(configuration)
    assert note.endswith(reason) and bool(note) == bool(reason)


@pytest.mark.parametrize("head", ["clip", "cosine", "cloob"])
def test_logits_through_the_preprocessing_of_open_clip_are_those_of_clipzoo(head, tmp_path):
    ours = loaded(head)
    clipzoo.export(ours, tmp_path / "out")
    peer, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'out'}")
    for batch in (1, 7, 64):
        # open_clip takes the text of a control token for the token.
        images, texts = pictures(batch), [caption.replace("<end_of_text>", "") for caption in captions(batch)]
        tokens, pixels = tokenizer(texts), torch.stack([preprocess(image) for image in images])
        assert torch.equal(tokens, ours.tokenizer(texts))
        encoder = ours.encoder
        expected = torch.stack([ours.transform(image) for image in images]) * encoder._scale + encoder._shift
        torch.testing.assert_close(pixels, expected, rtol=1e-6, atol=1e-6)
        with torch.no_grad():
            result = peer.eval().get_logits(pixels, tokens)[0]
        expected = logits(ours, images, texts)
        assert (result - expected).abs().max() <= 1e-6 * expected.abs().max()


SMALL = {
    "embed_dim": 16, "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"width": 64, "heads": 1, "layers": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"accuracy": 0.5}, "open_clip_config.json lacks model_cfg"),
        ({"model_cfg": {"embed_dim": 16}}, "open_clip_config.json lacks vision_cfg, text_cfg"),
        ({"model_cfg": {**SMALL, "vision_cfg": {"nosuch": 1}}}, "cannot be loaded: TypeError: .*'nosuch'"),
        (
            {"model_cfg": SMALL, "preprocess_cfg": {"mean": "x"}},
            "has x as mean or std of the pixels, not three numbers",
        ),
        ({"model_cfg": SMALL}, "cannot be loaded: RuntimeError: .*weights"),
    ],
)
def test_a_folder_with_other_json_or_without_weights_is_one_message(content, message, tmp_path):
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message) as refused:
        clipzoo.from_open_clip(f"local-dir:{tmp_path}")
    assert "\n" not in str(refused.value)


def test_a_file_of_other_weights_and_one_beside_a_folder_are_refused(tmp_path):
    torch.save({"state_dict": {"backbone.weight": torch.zeros(3)}}, tmp_path / "foreign.pt")
    with pytest.raises(ConfigError, match="foreign.pt has 12 bytes of weights, the model of") as refused:
        clipzoo.from_open_clip("RN50", str(tmp_path / "foreign.pt"))
    assert "\n" not in str(refused.value)
    clipzoo.export(model_of("vit"), tmp_path / "out")
    with pytest.raises(ConfigError, match="has its own weights, and open_clip ignores others: leave pretrained out"):
        clipzoo.from_open_clip(f"local-dir:{tmp_path / 'out'}", str(tmp_path / "out/open_clip_model.safetensors"))
