"""Towers over timm's trunks: timm's own forward pass is the judge."""

from __future__ import annotations

import pytest
import timm
import torch

from clipzoo.encoders.image import TimmTower
from clipzoo.errors import ConfigError

QUICK = ("resnet18", "vit_tiny_patch16_224", "convnext_atto", "mobilenetv3_small_050")
FAMILIES = (
    *QUICK, "resnetv2_50", "deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224",
    "convnextv2_atto", "efficientnet_b0", "regnety_002", "densenet121", "vgg11", "inception_v3", "xception41",
    "nf_regnet_b0", "maxvit_nano_rw_256", "mixer_s16_224", "poolformer_s12", "caformer_s18", "cait_xxs24_224",
    "xcit_nano_12_p16_224", "levit_128s", "mvitv2_tiny", "davit_tiny", "hiera_tiny_224", "fastvit_t8",
    "efficientformer_l1", "edgenext_xx_small", "mobilevit_xxs", "pvt_v2_b0", "vit_base_patch16_siglip_224",
)  # fmt: skip
WITHOUT_TOKENS = {"mobilenetv3_small_050", "vgg11"}
"""Their pooled features are wider than their feature maps."""


def by_cost(family):
    return pytest.param(family, marks=pytest.mark.medium if family in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("family", map(by_cost, FAMILIES))
def test_pooled_features_are_those_of_timm(family):
    torch.manual_seed(0)
    tower = TimmTower(family, None, pretrained=False, options={}).double().eval()
    peer = timm.create_model(family, num_classes=0).double().eval()
    peer.load_state_dict(tower.trunk.state_dict())
    image = torch.randn(1, 3, tower.input_size, tower.input_size, dtype=torch.float64)
    with torch.no_grad():
        features = tower(image)
        expected = peer.forward_head(peer.forward_features(image), pre_logits=True)
    # Relative too: with random weights, Inception's features are of the order of 1e9.
    torch.testing.assert_close(features.pooled, expected, rtol=1e-10, atol=1e-10)
    assert features.pooled.shape == (1, tower.width)
    assert (features.tokens is None) == (family in WITHOUT_TOKENS) != tower.gives_tokens()
    assert features.tokens is None or features.tokens.shape[-1] == tower.width
    assert tower.layers()


def test_an_image_size_is_passed_to_trunks_that_have_one_and_tokens_of_swin_are_its_positions():
    assert len(FAMILIES) >= 30
    with torch.device("meta"):
        vit = TimmTower("vit_tiny_patch16_224", 64, False, {})
        assert vit.trunk.pos_embed.shape[1] == vit(torch.empty(1, 3, 64, 64)).tokens.shape[1] == 17
        assert TimmTower("resnet18", 64, False, {}).input_size == 64
        swin = TimmTower("swin_tiny_patch4_window7_224", None, pretrained=False, options={}).eval()
        assert swin(torch.empty(2, 3, 224, 224)).tokens.shape == (2, 49, 768)


def test_an_unknown_name_is_one_message_with_the_nearest_names():
    with pytest.raises(ConfigError, match="timm has no such model; did you mean resnet.* or "):
        TimmTower("resnet18x", None, False, {})


@pytest.mark.parametrize(
    ("name", "options", "cause"),
    [
        ("resnet18", {"patch_size": 1}, "unexpected keyword argument 'patch_size'"),
        ("vit_tiny_patch16_224", {"window_size": 7}, "unexpected keyword argument 'window_size'"),
        ("resnet18.nosuch", {}, "Invalid pretrained tag"),
    ],
)
def test_a_refusal_of_timm_is_one_line_with_the_settings_of_the_tower(name, options, cause):
    with torch.device("meta"), pytest.raises(ConfigError) as refused:
        TimmTower(name, 64, False, options)
    message = str(refused.value)
    assert message.startswith(
        f"timm cannot build the image tower name={name}, image_size=64, pretrained=False, options="
    )
    assert cause in message and "\n" not in message
