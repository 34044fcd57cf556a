"""Layers and adapters of towers over the modules of other libraries."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from clipzoo.encoders.demo import DemoImageTower
from clipzoo.encoders.huggingface import HuggingFaceText
from clipzoo.encoders.image import TimmTower
from clipzoo.encoders.open_clip import OpenClipText
from clipzoo.encoders.tuning import Full, LastLayers, Lora, adapters_of, layer_indices, merged, plain_name
from clipzoo.errors import ConfigError

BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}
OPEN_CLIP = {"width": 32, "heads": 2, "layers": 2, "vocab_size": 99, "context_length": 16}
TEXTS = {
    "transformers' BERT": lambda: HuggingFaceText("bert", BERT, tokenizer="clip", context_length=16, end_token=98),
    "transformers' T5": lambda: HuggingFaceText(
        "t5", {"d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64, "num_layers": 2, "vocab_size": 99},
        tokenizer="clip", context_length=16, end_token=98,
    ),
    "open_clip's transformer": lambda: OpenClipText("ViT-B-32", None, OPEN_CLIP),
}  # fmt: skip
WEIGHTS_OF_A_BLOCK = {"transformers' BERT": 6, "transformers' T5": 6, "open_clip's transformer": 4}
VIT = {"depth": 2, "embed_dim": 32, "num_heads": 2}


def text() -> torch.Tensor:
    tokens = torch.randint(1, 90, (3, 16), generator=torch.Generator().manual_seed(0))
    tokens[:, 9] = 98
    return tokens


def assert_merged_as_adapted(tower: nn.Module, fresh: nn.Module, inputs: torch.Tensor) -> int:
    """Give the adapters values, compare with the merged weights in a fresh tower, and return their number."""
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.2)
        state = {plain_name(name): value for name, value in tower.state_dict().items()}
        untuned = fresh.eval()(inputs).pooled
        fresh.load_state_dict(merged(state))
        adapted = tower.eval()(inputs).pooled
        torch.testing.assert_close(adapted, fresh(inputs).pooled, rtol=0, atol=1e-6)
        assert (adapted - untuned).abs().max() > 1e-3
    return len(adapters_of(state))


@pytest.mark.parametrize("kind", TEXTS)
def test_adapters_of_text_towers_reach_every_linear_map_of_every_block(kind):
    torch.manual_seed(0)
    tower, fresh = TEXTS[kind](), TEXTS[kind]()
    fresh.load_state_dict(tower.state_dict())
    Lora(2, 4.0, None, 1.0, 1.0).apply(tower, "tune.text")
    assert assert_merged_as_adapted(tower, fresh, text()) == 2 * WEIGHTS_OF_A_BLOCK[kind]


def test_adapters_of_a_timm_tower_include_the_fused_qkv():
    torch.manual_seed(0)
    tower, fresh = (TimmTower("vit_tiny_patch16_224", 32, False, VIT) for _ in range(2))
    fresh.load_state_dict(tower.state_dict())
    Lora(2, 4.0, None, 1.0, 1.0).apply(tower, "tune.image")
    assert assert_merged_as_adapted(tower, fresh, torch.randn(2, 3, 32, 32)) == 2 * 4
    assert tower.trunk.blocks[0].attn.qkv.parametrizations.weight[0].lora_B.shape == (96, 2)


@pytest.mark.parametrize(
    "tower",
    [
        lambda: TimmTower("vit_tiny_patch16_224", 32, False, VIT),
        lambda: TimmTower("resnet10t", None, False, {}),
        lambda: TimmTower("convnext_atto", None, False, {}),
        lambda: DemoImageTower(32, 32, 2),
        *TEXTS.values(),
    ],
)
def test_layers_begin_with_the_embeddings_and_end_with_the_last_norm(tower):
    built = tower()
    depths = layer_indices(built)
    blocks = len(built.layers())
    assert min(depths.values()) == 0
    for index, block in enumerate(built.layers(), 1):
        assert all(depths[parameter] == index for parameter in block.parameters())
    LastLayers(1, 1.0, 1.0).apply(built, "tune.image")
    trained = {depths[parameter] for parameter in built.parameters() if parameter.requires_grad}
    assert trained <= {blocks, blocks + 1} and blocks in trained


def test_the_learning_rate_falls_from_layer_to_layer():
    tower = TimmTower("vit_tiny_patch16_224", 32, False, VIT)
    factors = Full(0.5, 0.8).factors(tower)
    trunk = tower.trunk
    assert math.isclose(factors[trunk.norm.weight], 0.5)
    assert math.isclose(factors[trunk.blocks[1].mlp.fc1.weight], 0.5 * 0.8)
    assert math.isclose(factors[trunk.blocks[0].mlp.fc1.weight], 0.5 * 0.8**2)
    assert math.isclose(factors[trunk.patch_embed.proj.weight], 0.5 * 0.8**3)
    with pytest.raises(ConfigError, match="tune.image.layers=3: TimmTower has 2 layers"):
        LastLayers(3, 1.0, 1.0).apply(tower, "tune.image")
