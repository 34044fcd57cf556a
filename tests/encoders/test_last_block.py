"""Pooled features without tokens equal those beside the tokens, with their gradients."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from clipzoo.encoders.image import ClipViT, TimmTower
from clipzoo.encoders.open_clip import OpenClipImage

TIMM = {"embed_dim": 32, "depth": 3, "num_heads": 2}
OPEN_CLIP = {"layers": 3, "width": 64, "head_width": 32}
TOWERS = {
    "open_clip's blocks": lambda: ClipViT(32, 8, 32, 3, 2, True),
    "a single block": lambda: ClipViT(32, 8, 32, 1, 2, False),
    "recomputed": lambda: ClipViT(32, 8, 32, 3, 2, False, checkpoint=True),
    "layer scale and dropped patches": lambda: OpenClipImage(
        "ViT-B-32", 64, {**OPEN_CLIP, "patch_dropout": 0.3, "ls_init_value": 0.1}
    ),
    "norm after pooling": lambda: OpenClipImage("ViT-B-32", 64, {**OPEN_CLIP, "final_ln_after_pool": True}),
    "timm": lambda: TimmTower("vit_tiny_patch16_224", 32, False, TIMM),
    "timm's registers": lambda: TimmTower("vit_small_patch14_reg4_dinov2", 28, False, TIMM),
    "timm, recomputed, with all options": lambda: TimmTower(
        "vit_tiny_patch16_224",
        32,
        False,
        {**TIMM, "init_values": 0.1, "qk_norm": True, "drop_path_rate": 0.3, "qkv_bias": False},
        checkpoint=True,
    ),
}
OTHERS = {
    "two tokens": lambda: TimmTower("deit_tiny_distilled_patch16_224", 32, False, TIMM),
    "mean": lambda: TimmTower("vit_tiny_patch16_224", 32, False, {**TIMM, "global_pool": "avg"}),
    "dropout": lambda: TimmTower("vit_tiny_patch16_224", 32, False, {**TIMM, "proj_drop_rate": 0.1}),
    "open_clip's mean": lambda: OpenClipImage("ViT-B-32", 64, {**OPEN_CLIP, "pool_type": "avg"}),
    "attention": lambda: OpenClipImage("ViT-B-32", 64, {**OPEN_CLIP, "attentional_pool": True, "attn_pooler_heads": 2}),
}


def built(tower):
    torch.manual_seed(0)
    tower = tower().double().train()
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    size = getattr(tower, "input_size", 32)
    return tower, torch.randn(3, 3, size, size, dtype=torch.float64)


@pytest.mark.parametrize("name", [*TOWERS, *OTHERS])
def test_pooled_features_and_their_gradients_are_those_beside_the_tokens(name):
    tower, image = built((TOWERS | OTHERS)[name])
    results = []
    for encode in (tower.pooled, lambda pixels: tower(pixels).pooled):
        torch.manual_seed(1)
        pooled = encode(image)
        direction = torch.linspace(-1, 1, pooled.numel(), dtype=pooled.dtype).view_as(pooled)
        used = [parameter for parameter in tower.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad((pooled * direction).sum(), used, materialize_grads=True, allow_unused=True)
        results.append([pooled.detach(), *gradients])
    for alone, beside in zip(*results, strict=True):
        torch.testing.assert_close(alone, beside, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", TOWERS)
def test_pooled_features_without_tokens_take_fewer_operations(name):
    tower, image = built(TOWERS[name])
    counts = []
    for encode in (tower.pooled, tower):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            encode(image)
        counts.append(counter.get_total_flops())
    assert counts[0] < counts[1]
