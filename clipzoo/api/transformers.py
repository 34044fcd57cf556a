"""Convert transformers' CLIPModel to a model of this package: a ViT, a causal text transformer and the CLIP head."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipzoo.api.build import build_model
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.errors import ConfigError, cause
from clipzoo.io import DamagedFileError, read_json, require_fields
from clipzoo.model import Model

REMEDY = "export the model again"
ACTIVATIONS = {True: "quick_gelu", False: "gelu"}
NAMES = {
    "vision_model": {
        "class_embedding": "embeddings.class_embedding",
        "conv1.weight": "embeddings.patch_embedding.weight",
        "positional_embedding": "embeddings.position_embedding.weight",
        "ln_pre.weight": "pre_layrnorm.weight",
        "ln_pre.bias": "pre_layrnorm.bias",
        "ln_post.weight": "post_layernorm.weight",
        "ln_post.bias": "post_layernorm.bias",
    },
    "text_model": {
        "token_embedding.weight": "embeddings.token_embedding.weight",
        "positional_embedding": "embeddings.position_embedding.weight",
        "ln_final.weight": "final_layer_norm.weight",
        "ln_final.bias": "final_layer_norm.bias",
    },
}
"""Tensors outside the blocks: open_clip's name -> transformers' name, by tower."""
BLOCK_NAMES = {
    "ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}  # fmt: skip
"""Modules of a block: open_clip's name -> transformers' name. open_clip fuses the input projections of attention."""
_BLOCK = re.compile(r"transformer\.resblocks\.(\d+)\.(.+)")
_MODEL, _PROCESSOR, _WEIGHTS = "config.json", "preprocessor_config.json", "model.safetensors"
BICUBIC, BILINEAR = 3, 2
"""PIL's numbers of the interpolations."""


def block_name(name: str) -> tuple[int, str]:
    """Return the layer and the rest of the name of a tensor in a block of open_clip's transformer."""
    match = _BLOCK.fullmatch(name)
    assert match is not None, name
    return int(match[1]), match[2]


def from_transformers(folder: Path) -> tuple[Model, dict[str, Any]]:
    """Return the CLIPModel in a folder and its configuration.

    Raises:
        ConfigError: the folder holds another kind of model, or one that no encoder here can represent.
    """
    content = read_json(folder / _MODEL, REMEDY)
    require_fields(folder / _MODEL, content, {"vision_config": dict, "text_config": dict}, REMEDY)
    if content.get("model_type") != "clip":
        raise ConfigError(f"{folder} holds a model of type {content.get('model_type')}, not clip")
    _check_vocabulary(folder)
    config = _configuration(folder, content)
    model = build_model(config)
    theirs = _weights(folder)
    try:
        state = _state(config, theirs)
        model.to(state["head.image_projection"].dtype).load_state_dict(state)
    except (KeyError, RuntimeError) as error:
        fault = f"does not fit {_MODEL} ({cause(error)})"
        raise DamagedFileError(folder / _WEIGHTS, fault, REMEDY) from None
    return model, config


def _state(config: Mapping[str, Any], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under our names. theirs: by transformers' names."""
    state = {
        "head.image_projection": theirs["visual_projection.weight"].mT,
        "head.text_projection": theirs["text_projection.weight"].mT,
        "head.log_scale": theirs["logit_scale"].reshape(()),
    }
    for side, place, tower in (
        ("vision_model", "encoder.image_tower.trunk", config["encoder"]["image_tower"]),
        ("text_model", "encoder.text_tower.trunk", config["encoder"]["text_tower"]),
    ):
        state |= {f"{place}.{name}": value for name, value in _trunk(side, tower["layers"], theirs)}
    return state


def _trunk(side: str, layers: int, theirs: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tower under open_clip's names."""
    for name, other in NAMES[side].items():
        yield name, theirs[f"{side}.{other}"]
    for layer in range(layers):
        block, other = f"transformer.resblocks.{layer}", f"{side}.encoder.layers.{layer}"
        for kind in ("weight", "bias"):
            thirds = [theirs[f"{other}.self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
            yield f"{block}.attn.in_proj_{kind}", torch.cat(thirds)
            for module, name in BLOCK_NAMES.items():
                yield f"{block}.{module}.{kind}", theirs[f"{other}.{name}.{kind}"]


def _configuration(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    import transformers

    clip: Any = transformers.CLIPConfig.from_dict(dict(content))
    vision, text = clip.vision_config, clip.text_config
    for name, part in (("vision_config", vision), ("text_config", text)):
        if part.hidden_act not in ACTIVATIONS.values():
            raise ConfigError(f"{folder / _MODEL}: {name}.hidden_act {part.hidden_act} is neither gelu nor quick_gelu")
        if part.intermediate_size != 4 * part.hidden_size:
            raise ConfigError(f"{folder / _MODEL}: {name}.intermediate_size is not 4 hidden_size, as our towers have")
    if vision.layer_norm_eps != 1e-5:
        raise ConfigError(f"{folder / _MODEL}: vision_config.layer_norm_eps is {vision.layer_norm_eps}, not 1e-5")
    images = _image_settings(folder, vision.image_size)
    context = text.max_position_embeddings
    encoder = {
        "_target_": "clipzoo.encoders.towers.TwoTowers",
        "image_size": vision.image_size, "image_width": vision.hidden_size, "text_width": text.hidden_size,
        "context_length": context, "mean": images["mean"], "std": images["std"],
        "tokenizer": {"_target_": "clipzoo.data.tokenizer.ClipTokenizer", "context_length": context},
        "image_tower": {
            "_target_": "clipzoo.encoders.image.ClipViT", "image_size": vision.image_size,
            "patch_size": vision.patch_size, "width": vision.hidden_size, "layers": vision.num_hidden_layers,
            "heads": vision.num_attention_heads, "quick_gelu": vision.hidden_act == "quick_gelu",
        },
        "text_tower": {
            "_target_": "clipzoo.encoders.text.ClipTextTower", "context_length": context,
            "vocabulary": text.vocab_size, "width": text.hidden_size, "layers": text.num_hidden_layers,
            "heads": text.num_attention_heads, "quick_gelu": text.hidden_act == "quick_gelu", "distinct_pads": False,
            "end_token": ClipTokenizer.end_token, "norm_eps": text.layer_norm_eps,
        },
    }  # fmt: skip
    head = {
        "_target_": "clipzoo.heads.clip.ClipHead", "image_width": vision.hidden_size, "text_width": text.hidden_size,
        "embed_width": clip.projection_dim, "temperature": 0.07, "max_scale": 100.0, "learnable_temperature": True,
    }  # fmt: skip
    return {"seed": 0, "encoder": encoder, "head": head, "data": {"interpolation": images["interpolation"]}}


def _image_settings(folder: Path, size: int) -> dict[str, Any]:
    """Return mean, std and interpolation of an image processor that crops the resized image to `size`."""
    path = folder / _PROCESSOR
    content = read_json(path, REMEDY)
    if "pretrained_cfg" in content:
        return {key: content["pretrained_cfg"][key] for key in ("mean", "std", "interpolation")}
    require_fields(path, content, {"image_mean": list, "image_std": list}, REMEDY)
    resized = content.get("size", size)
    if isinstance(resized, Mapping):
        resized = resized.get("shortest_edge")
    interpolation = {BICUBIC: "bicubic", BILINEAR: "bilinear"}.get(content.get("resample", BICUBIC))
    if resized != size or interpolation is None:
        raise DamagedFileError(
            path, f"resizes images in another way than to the shortest side {size}, bicubic or bilinear"
        )
    return {"mean": content["image_mean"], "std": content["image_std"], "interpolation": interpolation}


def _check_vocabulary(folder: Path) -> None:
    """Raise ConfigError if the folder's tokenizer numbers words in another way than CLIP's."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    theirs = read_json(path, REMEDY).get("model", {}).get("vocab", {})
    ours, *_ = ClipTokenizer(context_length=3).tables()
    controls = (ClipTokenizer.start_token, ClipTokenizer.end_token)
    different = [text for text, token in ours.items() if token not in controls and theirs.get(text) != token]
    if different:
        raise DamagedFileError(path, f"has another vocabulary than CLIP's, for example {json.dumps(different[0])}")


def _weights(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / _WEIGHTS
    try:
        return load_file(path)
    except FileNotFoundError:
        raise DamagedFileError(path, "is missing", "save the model with safe_serialization=True") from None
    except SafetensorError as error:
        raise DamagedFileError(path, f"is no safetensors file ({error})", REMEDY) from None
