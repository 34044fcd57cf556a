"""Models of transformers with tokenizer and image processor: written as CLIPModel or SiglipModel, and read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from clipzoo import io
from clipzoo.build import build_model, build_trained
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.encoders import huggingface
from clipzoo.encoders.huggingface import HuggingFaceModel, HuggingFaceTokenizer
from clipzoo.encoders.towers import TwoTowers
from clipzoo.errors import ConfigError, cause, first_names, one_message
from clipzoo.exports.files import PROBE, image_settings, save_weights, tokenizer_faults, write_preprocessing
from clipzoo.exports.open_clip import CLIP_HEAD, head_faults
from clipzoo.exports.transformers_models import KINDS, TEXT, VISION, converted, layers_of
from clipzoo.io import MB, DamagedFileError, read_json, require_fields
from clipzoo.io.weights import from_hub
from clipzoo.loading import PAIR, REMEDY, LoadedModel, read_weights, require_data_only

_MODEL, _PROCESSOR, _WEIGHTS = "config.json", "preprocessor_config.json", "model.safetensors"


def faults(model: LoadedModel) -> list[str]:
    """Return the reasons why neither CLIPModel nor SiglipModel can represent the model; none if one of them can."""
    if reasons := head_faults(model):
        return reasons
    if not (isinstance(model.encoder, TwoTowers) and model.encoder.towers):
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


def from_transformers(name: str | Path, device: str | torch.device = "cpu") -> LoadedModel:
    """Return a model of transformers that embeds images and text, with its own tokenizer and preprocessing.

    name: a folder, OWNER/MODEL or OWNER/MODEL@REVISION, of which no code runs and only .safetensors files are read.
    Raises ConfigError if there is no such model, or its logits are not scaled cosines of its features.
    """
    with from_hub(str(name), f"transformers:{name} is neither a folder nor a model that the Hugging Face hub gives"):
        folder = huggingface.stored_folder(str(name), ["*.json", "*.txt", "*.model", "model*.safetensors"])
    require_data_only(folder)
    content = read_json(folder / _MODEL, MB, REMEDY)
    if content.get("model_type") == "siglip2":
        raise ConfigError(f"{folder} holds SigLIP 2 NaFlex (siglip2), whose images are not squares: give type siglip")
    files = [*folder.glob(_WEIGHTS)] or sorted(folder.glob("model-*-of-*.safetensors")) or [folder / _WEIGHTS]
    remedy = "save the model by save_pretrained, or give OWNER/MODEL@REVISION with safetensors"
    tensors = {key: value for file in files for key, value in read_weights(file, remedy).items()}
    model = _with_our_towers(folder, content, tensors) or _with_own_modules(folder)
    if isinstance(tokenizer := model.tokenizer, HuggingFaceTokenizer):
        padded = tokenizer.source(PROBE, padding="max_length", truncation=True, max_length=tokenizer.context_length)
        if padded["input_ids"] != tokenizer(PROBE).tolist():
            raise ConfigError(f"the tokenizer in {folder} pads captions on the left, or adds no end token")
    model.stored_dtype = max(tensors.values(), key=Tensor.numel).dtype
    return model.to(device).eval()


def _with_our_towers(folder: Path, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LoadedModel | None:
    """Return a CLIPModel or SiglipModel, None for another model. content: of its config.json."""
    kind, path, vocabulary_file = content.get("model_type"), folder / _MODEL, folder / "tokenizer.json"
    if kind not in KINDS:
        return None
    require_fields(path, content, {"vision_config": dict, "text_config": dict}, REMEDY)
    if kind == "clip" and vocabulary_file.exists():
        # The tokenizer must have the same ids as CLIP's.
        numbers = read_json(vocabulary_file, 64 * MB, REMEDY).get("model", {}).get("vocab", {})
        controls = (ClipTokenizer.start_token, ClipTokenizer.end_token)
        ids = ClipTokenizer(context_length=3).tables()[0].items()
        if any(numbers.get(text) != token for text, token in ids if token not in controls):
            return None
    with one_message(f"{path} is not the configuration of a {kind} model", REMEDY):
        nodes = KINDS[kind].nodes(path, content)
    side, crop, preprocessing = _image_settings(folder)
    if not nodes or not side == crop == nodes["encoder"]["image_size"]:
        return None
    nodes["encoder"] |= {key: preprocessing.pop(key) for key in ("mean", "std")}
    config: dict[str, Any] = {"seed": 0, **nodes, "data": preprocessing}
    path = folder / _WEIGHTS
    image_layers, text_layers = (
        len({name.split(".")[3] for name in tensors if name.startswith(f"{side}.encoder.layers.")})
        for side in (VISION, TEXT)
    )
    try:
        state = converted(KINDS[kind].ties(image_layers, text_layers), tensors, to_ours=True)
        state["head.log_scale"] = tensors["logit_scale"].reshape(())
        if "logit_bias" in tensors:
            config[PAIR] = {"log_scale": 0.0, "bias": float(tensors["logit_bias"])}
    except (KeyError, RuntimeError, ValueError) as error:
        raise DamagedFileError(path, f"does not fit {_MODEL} ({cause(error)})", REMEDY) from None
    # transformers has no tensors for the projection that SigLIP's image tower lacks.
    fixed = ("head.image_projection", "head.image_bias")
    model = build_trained(config, state, path, REMEDY, dtype=state["head.log_scale"].dtype, fixed=fixed)
    return LoadedModel(model, config)


@torch.no_grad()
def _with_own_modules(folder: Path) -> LoadedModel:
    """Return another model of transformers; its own forward pass must give the same logits."""
    peer: Any
    with one_message(f"transformers cannot load the model in {folder}", REMEDY):
        peer, missing = huggingface.pretrained_model(str(folder))
    if missing:
        raise DamagedFileError(folder / _WEIGHTS, f"lacks {first_names(sorted(missing))}", REMEDY)
    fault = f"{folder}: a model of type {peer.config.model_type} does not compare images with text by cosines"
    with one_message(fault):
        side, crop, data = _image_settings(folder)
        black = peer.eval().get_image_features(pixel_values=torch.zeros(1, 3, crop, crop))
        width = getattr(black, "pooler_output", black).shape[-1]
        source = HuggingFaceTokenizer(str(folder), 3).source
        positions = huggingface.number_of_positions(peer, peer.config.text_config) or huggingface.LONGEST
        target, context = "clipzoo.encoders.huggingface.HuggingFace", min(source.model_max_length, positions)
        encoder: dict[str, Any] = {
            "_target_": f"{target}Model", "settings": json.loads(peer.config.to_json_string()), "image_size": side,
            "crop": crop, "context_length": context, "mean": data.pop("mean"), "std": data.pop("std"),
            "tokenizer": {"_target_": f"{target}Tokenizer", "name": str(folder), "context_length": context},
            # SigLIP's text towers read the padding at their last position.
            "has_mask": "attention_mask" in source.model_input_names and not hasattr(peer, "logit_bias"),
        }  # fmt: skip
        state = peer.state_dict()
        head: dict[str, Any] = {
            "_target_": CLIP_HEAD, "embed_width": width, "temperature": 0.07, "max_scale": 1000.0, "bias": True,
            "learnable_temperature": True, "image_projection": "visual_projection.weight" in state,
        }  # fmt: skip
        scale = state["logit_scale"] if "logit_scale" in state else -state["temperature"].log()
        tensors = {**{f"encoder.trunk.{key}": state[key] for key in state}, "head.log_scale": scale.reshape(())}
        for view, name in huggingface.PROJECTIONS.items():
            matrix = state.get(f"{name}.weight", torch.eye(width))
            head[f"{view}_width"] = encoder[f"{view}_width"] = matrix.shape[1]
            tensors[f"head.{view}_projection"] = matrix.mT
            tensors[f"head.{view}_bias"] = state.get(f"{name}.bias", torch.zeros(width))
        config = {"seed": 0, "encoder": encoder, "head": head, "data": data}
        built = build_model(config)
        built.load_state_dict({key: tensors[key] for key in built.state_dict()})
        if "logit_bias" in state:
            config[PAIR] = {"log_scale": 0.0, "bias": state["logit_bias"].item()}
        model, own = LoadedModel(built, config).eval(), cast(HuggingFaceModel, built.encoder)
        pixels = torch.arange(2 * 3 * side * side).mul(97).remainder(256).view(2, 3, side, side).to(torch.uint8)
        text = model.tokenizer(PROBE[1:3])
        expected = peer(**own.pixels(pixels), **own.tokens(text)).logits_per_image
        ours = model.pair_logits(model.encode_image(pixels), model.encode_text(text))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)
    return model


def _image_settings(folder: Path) -> tuple[int, int, dict[str, Any]]:
    """Return how an image processor prepares images: side in pixels after resizing, side of the central crop, and mean,
    std (of pixels in [0, 1]), interpolation and resize_mode.
    """
    path = folder / _PROCESSOR
    content = read_json(path, MB, REMEDY) if path.exists() else {}
    if "pretrained_cfg" in content:
        own = content["pretrained_cfg"]
        data = {key: own[key] for key in ("mean", "std", "interpolation")}
        data["resize_mode"] = "squash" if own.get("crop_mode") == "squash" else "shortest"
        return own["input_size"][-1], own["input_size"][-1], data
    with one_message(f"transformers cannot read the image processor in {folder}", REMEDY):
        from transformers import AutoImageProcessor

        own = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False).to_dict()
    size, crop = ({**(own.get(key) or {})} for key in ("size", "crop_size"))
    side: int = size.get("shortest_edge") or size.get("height") or 0
    square: int = crop.get("height", 0) if own.get("do_center_crop") else side
    interpolation = {3: "bicubic", 2: "bilinear"}.get(own.get("resample", 0))  # PIL's codes
    sizes = [{"height": side, "width": side}, *[{"shortest_edge": side}] * bool(own.get("do_center_crop"))]
    if not (own.get("do_resize") and interpolation and size in sizes and crop.get("width", square) == square <= side):
        raise ConfigError(f"{folder}: its image processor does not resize images and take a central square: {own}")
    # (factor x - offset - mean) / std of pixels x up to 255.
    factor = 255 * own["rescale_factor"] if own.get("do_rescale") else 255.0
    offset = 1.0 if own.get("rescale_offset") else 0.0
    means, stds = (own["image_mean"], own["image_std"]) if own.get("do_normalize") else ([0.0] * 3, [1.0] * 3)
    return side, square, {
        "mean": [(mean + offset) / factor for mean in means],
        "std": [std * (std if own.get("include_top") else 1) / factor for std in stds],
        "interpolation": interpolation, "resize_mode": "shortest" if "shortest_edge" in size else "squash",
    }  # fmt: skip
