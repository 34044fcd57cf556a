"""transformers' CLIPModel, with its tokenizer and image processor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from clipzoo import io
from clipzoo.api.formats.open_clip import head_faults
from clipzoo.api.formats.preprocessing import image_settings, tokenizer_faults, write_preprocessing
from clipzoo.api.formats.weights import save_weights
from clipzoo.api.loading import LoadedModel
from clipzoo.api.open_clip.settings import with_plain_towers
from clipzoo.api.transformers import ACTIVATIONS, BLOCK_NAMES, NAMES, block_name
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.encoders.towers import TwoTowers


def faults(model: LoadedModel) -> list[str]:
    """Return the reasons why CLIPModel cannot represent the model; none if it can."""
    return [*head_faults(model), *_encoder_faults(model), *tokenizer_faults(model)]


def write_transformers(model: LoadedModel, folder: Path) -> None:
    """Write model.safetensors, the tokenizer and the image processor, then config.json."""
    save_weights(_state(model), folder / "model.safetensors")
    write_preprocessing(model, folder, "CLIPProcessor")
    # Its image processor for timm's models reads config.json alone.
    io.write_json(folder / "config.json", {**_config(model), **image_settings(model)})


def _encoder_faults(model: LoadedModel) -> list[str]:
    encoder = with_plain_towers(model.config["encoder"])
    if not isinstance(model.encoder, TwoTowers):
        return [f"its encoder is {type(model.encoder).__name__}"]
    faults = []
    image, text = encoder["image_tower"], encoder["text_tower"]
    if not image["_target_"].endswith(".ClipViT"):
        faults.append(f"its image tower is {type(model.encoder.image_tower).__name__}, CLIPModel's is ClipViT")
    if not text["_target_"].endswith(".ClipTextTower"):
        faults.append(f"its text tower is {type(model.encoder.text_tower).__name__}, CLIPModel's is ClipTextTower")
    elif text["distinct_pads"]:
        faults.append("encoder.text_tower.distinct_pads is true")
    if getattr(model.head, "image_bias", None) is not None:
        faults.append("head.bias is true")
    return faults


def _config(model: LoadedModel) -> dict[str, Any]:
    encoder = with_plain_towers(model.config["encoder"])
    image, text = encoder["image_tower"], encoder["text_tower"]
    shared = {"projection_dim": model.head.get_parameter("image_projection").shape[1], "attention_dropout": 0.0}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "dtype": str(model.dtype).removeprefix("torch."),
        **shared,
        "vision_config": {
            "model_type": "clip_vision_model", "image_size": image["image_size"], "patch_size": image["patch_size"],
            "hidden_size": image["width"], "intermediate_size": 4 * image["width"], "layer_norm_eps": 1e-5,
            "num_hidden_layers": image["layers"], "num_attention_heads": image["heads"],
            "hidden_act": ACTIVATIONS[image["quick_gelu"]], **shared,
        },
        "text_config": {
            "model_type": "clip_text_model", "max_position_embeddings": text["context_length"],
            "vocab_size": text["vocabulary"], "hidden_size": text["width"], "intermediate_size": 4 * text["width"],
            "layer_norm_eps": text["norm_eps"], "num_hidden_layers": text["layers"],
            "num_attention_heads": text["heads"], "hidden_act": ACTIVATIONS[text["quick_gelu"]],
            "bos_token_id": ClipTokenizer.start_token, "eos_token_id": text["end_token"], "pad_token_id": 0, **shared,
        },
    }  # fmt: skip


def _state(model: LoadedModel) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for side, tower in (("vision_model", "image_tower"), ("text_model", "text_tower")):
        trunk = model.get_submodule(f"encoder.{tower}.trunk")
        state |= dict(_tower_state(side, trunk.state_dict()))
    state["visual_projection.weight"] = model.head.get_parameter("image_projection").mT
    state["text_projection.weight"] = model.head.get_parameter("text_projection").mT
    scale = model.head.log_cosine_scale()
    assert scale is not None
    state["logit_scale"] = scale
    return state


def _tower_state(side: str, trunk: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield open_clip's tensors of a tower under the names of transformers; fused projections are split."""
    for name, value in trunk.items():
        if name in NAMES[side]:
            yield f"{side}.{NAMES[side][name]}", value
            continue
        layer, part = block_name(name)
        block = f"{side}.encoder.layers.{layer}"
        if part.startswith("attn.in_proj_"):
            kind = part.removeprefix("attn.in_proj_")
            for letter, third in zip("qkv", value.chunk(3), strict=True):
                yield f"{block}.self_attn.{letter}_proj.{kind}", third
        else:
            module, _, kind = part.rpartition(".")
            yield f"{block}.{BLOCK_NAMES[module]}.{kind}", value
