"""Adapters in peft's format; peft is the judge."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

from clipzoo.build import build_model
from clipzoo.errors import ConfigError
from clipzoo.exports.adapters import save_adapters
from tests.support import tuned
from tests.support.tuned import lora, train, tuning

VIT = {
    "_target_": "clipzoo.encoders.image.TimmTower", "name": "vit_tiny_patch16_224", "image_size": 32,
    "pretrained": False, "options": {"depth": 2, "embed_dim": 512, "num_heads": 2},
}  # fmt: skip
CASES = {
    "open_clip's attention in part": (None, ["*attn.in_proj_weight", "*mlp.c_fc.weight"]),
    "timm's fused qkv": (VIT, ["*.attn.qkv.weight"]),
    "convolutions": (tuned.RESNET, ["trunk.conv1.*.weight", "*downsample*.weight"]),
}


def run_with_adapters(tower, targets, folder):
    """The model before and after a training of the image tower's adapters."""
    before = build_model(tuned.configuration(tower)).double()
    model = copy.deepcopy(before)
    train(model, tuning(lora(2, targets), tuned.frozen(0.0)), folder=folder, learning_rate=0.05)
    return before.eval(), model.eval()


@pytest.mark.parametrize("case", CASES)
def test_peft_adds_the_saved_adapters_to_the_librarys_model_with_the_same_features(case, tmp_path):
    peft = pytest.importorskip("peft")
    before, after = run_with_adapters(*CASES[case], tmp_path / "run")
    (folder,) = save_adapters(tmp_path / "run", tmp_path / "adapters")
    image = tuned.batch().image
    with torch.no_grad():
        untuned = before.encoder.image(image).pooled
        trunk = peft.PeftModel.from_pretrained(before.encoder.image_tower.trunk, str(folder)).eval()
        before.encoder.image_tower.trunk = trunk.merge_and_unload()
        ours, theirs = after.encoder.image(image).pooled, before.encoder.image(image).pooled
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    assert (ours - untuned).abs().max() > 1e-3


def trained_weight(module: torch.nn.Module, name: str) -> torch.Tensor:
    path, _, attribute = name.rpartition(".")
    return getattr(module.get_submodule(path), attribute).detach()


def test_peft_computes_the_merged_weights_of_both_projections_of_an_attention(tmp_path):
    """Of the differences alone: peft 0.21 adds that of the output projection twice."""
    peft = pytest.importorskip("peft")
    before, after = run_with_adapters(None, None, tmp_path / "run")
    (folder,) = save_adapters(tmp_path / "run", tmp_path / "adapters")
    trunk = before.encoder.image_tower.trunk
    trained = after.encoder.image_tower.trunk
    expected = {
        name.removesuffix(".in_proj_weight").removesuffix(".weight"): trained_weight(trained, name) - value.detach()
        for name, value in trunk.named_parameters()
        if name.startswith("transformer") and value.ndim == 2
    }
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(trunk), str(folder)).base_model.model
    adapters = [(name, module) for name, module in adapted.named_modules() if hasattr(module, "get_delta_weight")]
    layers = {name.replace(".base_layer", ""): module for name, module in adapters}
    assert layers.keys() == expected.keys() and len(layers) == 8
    for name, difference in expected.items():
        torch.testing.assert_close(layers[name].get_delta_weight("default"), difference, rtol=0, atol=1e-6)
        assert difference.abs().max() > 1e-3
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 2, 4.0)
    prefix = "base_model.model.transformer.resblocks.0.attn"
    names = load_file(folder / "adapter_model.safetensors").keys()
    assert {f"{prefix}.lora_A.weight", f"{prefix}.base_layer.out_proj.lora_B.weight"} <= names


def test_a_run_without_adapters_is_named(tmp_path):
    train(tuned.model(), None, steps=1, folder=tmp_path)
    with pytest.raises(ConfigError, match="has no adapters: train with tune/image=lora"):
        save_adapters(tmp_path, tmp_path / "adapters")


def test_a_rank_that_a_weight_cannot_have_and_a_pattern_without_a_match_are_named():
    with pytest.raises(ConfigError, match=r"tune.image.rank=99: trunk.* has rank 32"):
        train(tuned.model(), tuning(lora(99)))
    with pytest.raises(ConfigError, match=r"tune.image.targets: \*qkv\* matches no weight of the tower"):
        train(tuned.model(), tuning(lora(2, ["*qkv*"])))
