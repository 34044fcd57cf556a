"""Values that are found in the model: open while a configuration is checked, and in the run's config.yaml."""

from __future__ import annotations

import pytest
import torch

from clipzoo.build import build_model, found_in_model, heads_with_tokens
from clipzoo.config.compose import compose
from clipzoo.config.schema import PREFIX, filled
from clipzoo.errors import ConfigError
from clipzoo.runs.identity import differing, identity

MODEL = ["data.shards=x.tar", "encoder=open_clip", "encoder.name=ViT-M-32-alt"]


@pytest.mark.medium
def test_sizes_stay_open_until_the_model_is_known_and_are_then_the_same_everywhere():
    plain = compose(MODEL)
    assert plain["data"]["image_size"] == plain["encoder"]["image_size"] == "from_model:image_size"
    complete = filled(plain, found_in_model(plain))
    assert PREFIX not in str(complete)
    sizes = [complete[part]["image_size"] for part in ("data", "encoder", "eval")]
    assert sizes == [224] * 3 and complete["encoder"]["image"]["image_size"] == 224
    assert complete["data"]["tokenizer"]["context_length"] == 77
    assert differing(identity(complete), identity(plain)) == []


@pytest.mark.medium
def test_a_given_size_reaches_the_tower_the_loader_and_the_evaluation():
    plain = compose([*MODEL, "encoder.image_size=64", "encoder.context_length=16"])
    complete = filled(plain, found_in_model(plain))
    assert [complete[part]["image_size"] for part in ("data", "encoder", "eval")] == [64] * 3
    assert complete["eval"]["tokenizer"]["context_length"] == 16
    with torch.device("meta"):
        model = build_model(plain)
    assert model.encoder.image_tower.trunk.positional_embedding.shape[0] == 5
    other = compose([*MODEL, "encoder.image_size=32", "encoder.context_length=16"])
    keys = ["data.image_size", "encoder.image.image_size", "encoder.image_size"]
    assert differing(identity(complete), identity(other)) == keys


@pytest.mark.medium
def test_evaluations_resize_images_as_the_model_does_unless_they_say_otherwise():
    siglip = [*MODEL, "encoder.resize_mode=squash", "encoder.interpolation=bilinear"]
    for changes, expected in (
        (MODEL, ("bicubic", "shortest")),
        (siglip, ("bilinear", "squash")),
        ([*siglip, "eval.resize_mode=shortest"], ("bilinear", "shortest")),
        (["data.shards=x.tar", "encoder=tiny"], ("bicubic", "shortest")),
    ):
        plain = compose(changes)
        evaluation = filled(plain, found_in_model(plain))["eval"]
        assert (evaluation["interpolation"], evaluation["resize_mode"]) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (MODEL[:2], "^encoder.name has no value: give encoder.name=...$"),
        ([*MODEL, "encoder.image_width=100"], "encoder.image_width=100, but that of the model is 512"),
        ([*MODEL, "data.image_size=from_model:imagesize"], "gives no value imagesize; did you mean image_size"),
    ],
)
def test_a_value_that_the_model_does_not_have_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        found_in_model(compose(overrides))


@pytest.mark.medium
def test_a_trunk_without_tokens_says_which_heads_it_cannot_serve():
    towers = ["encoder=towers", "encoder.image.name=mobilenetv3_small_050", "encoder/text=open_clip"]
    plain = compose(["data.shards=x.tar", *towers, "encoder.text.name=ViT-M-32-alt", "head=kme"])
    with pytest.raises(
        ConfigError, match="timm's mobilenetv3_small_050 has no tokens, .* heads filip, flair, kme, llip, wpse:"
    ):
        found_in_model(plain)
    assert heads_with_tokens() == ["filip", "flair", "kme", "llip", "wpse"]


def test_keys_of_options_are_added_with_a_plus():
    with pytest.raises(ConfigError, match="add.* with a plus: .encoder.image.options="):
        compose([*MODEL, "encoder.image.options.patch_dropout=0.5"])
    plain = compose([*MODEL, "+encoder.image.options.patch_dropout=0.5"])
    with torch.device("meta"):
        assert build_model(plain).encoder.image_tower.trunk.patch_dropout.prob == 0.5
