"""transformers' CLIPModel and SiglipModel, with tokenizer and image processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clipzoo import io
from clipzoo.build import build_trained
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.encoders.towers import TwoTowers
from clipzoo.errors import ConfigError, cause, one_message
from clipzoo.exports.files import image_settings, save_weights, tokenizer_faults, write_preprocessing
from clipzoo.exports.open_clip import head_faults
from clipzoo.exports.transformers_models import KINDS, TEXT, VISION, converted, layers_of
from clipzoo.io import MB, DamagedFileError, read_json, require_fields
from clipzoo.io.weights import read_tensors
from clipzoo.loading import PAIR, LoadedModel

REMEDY = "export the model again"
_MODEL, _PROCESSOR, _WEIGHTS = "config.json", "preprocessor_config.json", "model.safetensors"
BICUBIC, BILINEAR = 3, 2
"""PIL's codes of the interpolations."""


def faults(model: LoadedModel) -> list[str]:
    """Return the reasons why neither CLIPModel nor SiglipModel can represent the model; none if one of them can."""
    if reasons := head_faults(model):
        return reasons
    if not isinstance(model.encoder, TwoTowers):
        return [f"its encoder is {type(model.encoder).__name__}"]
    refused = {kind.name: kind.faults(model) for kind in KINDS.values()}
    if all(refused.values()):
        reasons = [f"{name} has no place for it ({', '.join(faults)})" for name, faults in refused.items()]
    return [*reasons, *tokenizer_faults(model)]


def write_transformers(model: LoadedModel, folder: Path) -> None:
    """Write model.safetensors, the tokenizer and the image processor, then config.json."""
    kind = next(kind for kind in KINDS.values() if not kind.faults(model))
    scale = model.head.log_cosine_scale()
    assert scale is not None
    ours = {"head.text_bias": scale.new_zeros(model.head.get_parameter("text_projection").shape[1])}
    state = converted(kind.ties(*layers_of(model)), {**ours, **model.state_dict()}, to_ours=False)
    state["logit_scale"] = scale
    if kind is KINDS["siglip"]:
        pair = model.config.get(PAIR, {"log_scale": 0.0, "bias": 0.0})
        state["logit_scale"] = (scale + pair["log_scale"]).reshape(1)
        state["logit_bias"] = scale.new_tensor([pair["bias"]])
    save_weights(state, folder / "model.safetensors")
    write_preprocessing(model, folder, kind.processor)
    # transformers' image processor for timm's models reads only config.json.
    shared = {"dtype": str(model.dtype).removeprefix("torch.")}
    io.write_json(folder / "config.json", {**kind.config(model), **shared, **image_settings(model)})


# Convert transformers' CLIPModel and SiglipModel to an encoder of two towers and the CLIP head.


def from_transformers(folder: str | Path, device: str | torch.device = "cpu") -> LoadedModel:
    """Return the CLIPModel or SiglipModel of transformers in a folder: config.json, model.safetensors, preprocessing.

    Raises ConfigError if the folder holds another kind of model, or one that no encoder here can represent.
    """
    folder = Path(folder)
    path = folder / _MODEL
    content = read_json(path, MB, REMEDY, fields={"vision_config": dict, "text_config": dict})
    if (kind := content.get("model_type")) not in KINDS:
        raise ConfigError(f"{folder} holds a model of type {kind}, not clip or siglip")
    vocabulary_file = folder / "tokenizer.json"
    if kind == "clip" and vocabulary_file.exists():
        # The tokenizer must have the same ids as CLIP's.
        numbers = read_json(vocabulary_file, 64 * MB, REMEDY).get("model", {}).get("vocab", {})
        controls = (ClipTokenizer.start_token, ClipTokenizer.end_token)
        for text, token in ClipTokenizer(context_length=3).tables()[0].items():
            if token not in controls and numbers.get(text) != token:
                fault = f"has another vocabulary than CLIP's, for example {json.dumps(text)}"
                raise DamagedFileError(vocabulary_file, fault)
    with one_message(f"{path} is not the configuration of a {kind} model", REMEDY):
        nodes = KINDS[kind].nodes(path, content)
    preprocessing = _image_settings(folder, nodes["encoder"]["image_size"])
    nodes["encoder"] |= {key: preprocessing.pop(key) for key in ("mean", "std")}
    config: dict[str, Any] = {"seed": 0, **nodes, "data": preprocessing}
    path = folder / _WEIGHTS
    tensors = read_tensors(path, "save the model with safe_serialization=True")
    image_layers, text_layers = (
        len({name.split(".")[3] for name in tensors if name.startswith(f"{side}.encoder.layers.")})
        for side in (VISION, TEXT)
    )
    try:
        state = converted(KINDS[kind].ties(image_layers, text_layers), tensors, to_ours=True)
        state["head.log_scale"] = tensors["logit_scale"].reshape(())
        if "logit_bias" in tensors:
            config["pair"] = {"log_scale": 0.0, "bias": float(tensors["logit_bias"])}
    except (KeyError, RuntimeError, ValueError) as error:
        raise DamagedFileError(path, f"does not fit {_MODEL} ({cause(error)})", REMEDY) from None
    # transformers has no tensors for the projection that SigLIP's image tower lacks.
    fixed = ("head.image_projection", "head.image_bias")
    model = build_trained(config, state, path, REMEDY, dtype=state["head.log_scale"].dtype, fixed=fixed)
    return LoadedModel(model, config).to(device).eval()


def _image_settings(folder: Path, size: int) -> dict[str, Any]:
    """Return mean, std, interpolation and resize_mode of an image processor that gives images of side `size`."""
    path = folder / _PROCESSOR
    content = read_json(path, MB, REMEDY)
    if "pretrained_cfg" in content:
        content = content["pretrained_cfg"]
        mode = "squash" if content.get("crop_mode") == "squash" else "shortest"
        return {**{key: content[key] for key in ("mean", "std", "interpolation")}, "resize_mode": mode}
    require_fields(path, content, {"image_mean": list, "image_std": list}, REMEDY)
    target, mode = content.get("size", size), "shortest"
    if isinstance(target, Mapping) and {*target} == {"height", "width"}:
        mode, target = "squash", target["height"] if target["height"] == target["width"] else None
    elif isinstance(target, Mapping):
        target = target.get("shortest_edge")
    interpolation = {BICUBIC: "bicubic", BILINEAR: "bilinear"}.get(content.get("resample", BICUBIC))
    if target != size or interpolation is None:
        raise DamagedFileError(
            path, f"resizes images in another way than to {size} pixels, both sides or the shorter, bicubic or bilinear"
        )
    means = {"mean": content["image_mean"], "std": content["image_std"]}
    return {**means, "interpolation": interpolation, "resize_mode": mode}
