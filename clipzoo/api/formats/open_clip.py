"""open_clip models: a folder that `open_clip.create_model("local-dir:FOLDER")` loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipzoo.api.formats.weights import save_weights
from clipzoo.api.loading import PAIR, LoadedModel
from clipzoo.api.open_clip.tensors import names, text_path, text_tower, tower_states
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.encoders.huggingface_tokenizer import HuggingFaceTokenizer
from clipzoo.encoders.open_clip_projection import projection_path
from clipzoo.encoders.open_clip_registry import describe
from clipzoo.errors import ConfigError
from clipzoo.io import write_json
from clipzoo.model import Model

CLIP_HEAD = "clipzoo.heads.clip.ClipHead"
ENCODERS = ("clipzoo.encoders.towers.TwoTowers", "clipzoo.encoders.towers.Towers")
IMAGE_TOWERS = {
    "clipzoo.encoders.image.ClipViT": "vit",
    "clipzoo.encoders.image.ClipResNet": "resnet",
    "clipzoo.encoders.image.TimmTower": "timm",
    "clipzoo.encoders.open_clip.OpenClipImage": "open_clip",
}
TEXT_TOWERS = {
    "clipzoo.encoders.text.ClipTextTower": "clip",
    "clipzoo.encoders.open_clip.OpenClipText": "open_clip",
}
TOKENIZER = ("hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode")
HARMLESS_OPTIONS = ("drop_rate", "drop_path_rate", "patch_drop_rate", "attn_drop_rate", "proj_drop_rate")
"""Options of a timm trunk without effect in evaluation."""


def export_note(config: Mapping[str, Any]) -> str:
    """Return a line for the start of a training whose CLIP head suggests an export that open_clip's form forbids."""
    faults = encoder_faults(config["encoder"]) if config["head"]["_target_"] == CLIP_HEAD else []
    return (
        f"\nopen_clip cannot represent this model, clipzoo.export will refuse it: {'; '.join(faults)}" if faults else ""
    )


def faults(model: LoadedModel) -> list[str]:
    """Return the reasons why open_clip cannot represent the model; none if it can."""
    if reasons := [*head_faults(model), *encoder_faults(model.config["encoder"])]:
        return reasons
    try:
        _tokenizer_settings(model.tokenizer)
        _state(model, _model_config(model))
    except ConfigError as error:
        return [str(error)]
    return []


def head_faults(model: Model) -> list[str]:
    """Return the reason why the head's score is not a scaled cosine of two projections."""
    if model.head.log_cosine_scale() is not None:
        return []
    return [f"its head is {type(model.head).__name__}, whose logits are no scaled cosines of two vectors"]


def encoder_faults(encoder: Mapping[str, Any]) -> list[str]:
    """Return the reasons why open_clip cannot represent the encoder of a configuration."""
    faults = []
    if encoder["_target_"] not in ENCODERS:
        return [f"its encoder is {encoder['_target_']}"]
    image, text = _towers(encoder)
    if image["_target_"] not in IMAGE_TOWERS:
        return [f"its image tower is {image['_target_']}"]
    if text["_target_"] not in TEXT_TOWERS:
        return [f"its text tower is {text['_target_']}"]
    if text.get("distinct_pads"):
        faults.append("encoder.text_tower.distinct_pads is true")
    kind = IMAGE_TOWERS[image["_target_"]]
    if kind in ("vit", "open_clip") and _quick_gelu(image) != _quick_gelu(text):
        faults.append("quick_gelu differs between the towers")
    if kind == "timm" and (others := sorted(set(image["options"]) - set(HARMLESS_OPTIONS))):
        faults.append(f"encoder.image_tower.options has {', '.join(others)}")
    return faults


def write_open_clip(model: LoadedModel, folder: Path) -> None:
    """Write open_clip_model.safetensors, then open_clip_config.json."""
    encoder, described = model.config["encoder"], _model_config(model)
    if isinstance(model.tokenizer, HuggingFaceTokenizer):
        # open_clip prepares the text, and takes this tokenizer from the folder.
        model.tokenizer.source.save_pretrained(folder)
    save_weights(_state(model, described), folder / "open_clip_model.safetensors")
    preprocess = {"mean": encoder["mean"], "std": encoder["std"], "resize_mode": model.transform.resize_mode}
    preprocess["interpolation"] = model.transform.interpolation
    write_json(folder / "open_clip_config.json", {"model_cfg": described, "preprocess_cfg": preprocess})


def _towers(encoder: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the nodes of both towers."""
    return encoder.get("image_tower", encoder.get("image")), encoder.get("text_tower", encoder.get("text"))


def _quick_gelu(tower: Mapping[str, Any]) -> bool:
    if "quick_gelu" in tower:
        return bool(tower["quick_gelu"])
    return bool(describe(tower["name"]).model.get("quick_gelu", False))


def _model_config(model: LoadedModel) -> dict[str, Any]:
    encoder = model.config["encoder"]
    image, text = _towers(encoder)
    embed_width = model.head.get_parameter("image_projection").shape[1]
    described: dict[str, Any] = {"embed_dim": embed_width, "quick_gelu": _quick_gelu(text)}
    if PAIR in model.config:
        described["init_logit_bias"] = model.config[PAIR]["bias"]
    text_config = {key: value for key, value in _text_config(text).items() if key not in TOKENIZER}
    text_config |= _tokenizer_settings(model.tokenizer)
    vision_config = _vision_config(encoder, image)
    # Projections that a training has added to towers without one.
    if vision_config.get("timm_proj") == "none" and not is_identity(model, "image"):
        vision_config |= {"timm_proj": "linear", "timm_proj_bias": has_bias(model, "image")}
    if text_config.get("proj_type") == "none" and not is_identity(model, "text"):
        text_config |= {"proj_type": "linear", "proj_bias": has_bias(model, "text")}
    # A text tower of its own, under the prefix "text.".
    named = describe(text["name"]).model if TEXT_TOWERS[text["_target_"]] == "open_clip" else {}
    if named.get("custom_text") or any(map(text_config.get, ("hf_model_name", "embed_cls", "proj_bias"))):
        described["custom_text"] = True
    return described | {"vision_cfg": vision_config, "text_cfg": text_config}


def _tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    """Return the entries of a text_cfg that describe the tokenizer. Raises ConfigError if open_clip has none for it."""
    if isinstance(tokenizer, ClipTokenizer):
        return {}
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise ConfigError(f"its tokenizer is {type(tokenizer).__name__}")
    if tokenizer.clean == "none":
        raise ConfigError("encoder.tokenizer.clean is none, and open_clip cleans text for every tokenizer of the hub")
    if not tokenizer.source.is_fast:
        raise ConfigError(f"its tokenizer {tokenizer.name} has no tokenizer.json")
    settings = {"clean": tokenizer.clean, "strip_sep_token": tokenizer.strip_end}
    return {"hf_tokenizer_name": tokenizer.name, "tokenizer_kwargs": settings}


def is_identity(model: Model, view: str) -> bool:
    """Return True if the projection of "image" or "text" changes no features."""
    matrix = model.head.get_parameter(f"{view}_projection")
    square = matrix.shape[0] == matrix.shape[1]
    return square and torch.equal(matrix, torch.eye(len(matrix)).to(matrix)) and not has_bias(model, view)


def has_bias(model: Model, view: str) -> bool:
    """Return True if the projection of "image" or "text" adds a vector other than zero."""
    bias = getattr(model.head, f"{view}_bias", None)
    return bias is not None and bool(bias.any())


def _vision_config(encoder: Mapping[str, Any], image: Mapping[str, Any]) -> dict[str, Any]:
    kind = IMAGE_TOWERS[image["_target_"]]
    if kind == "open_clip":
        described = describe(image["name"]).model["vision_cfg"]
        return {**described, **image["options"], "image_size": image["image_size"], "output_tokens": False}
    if kind == "vit":
        return {
            "image_size": image["image_size"], "layers": image["layers"], "width": image["width"],
            "patch_size": image["patch_size"], "head_width": image["width"] // image["heads"],
        }  # fmt: skip
    if kind == "resnet":
        head_width = 32 * image["stem_width"] // image["heads"]
        vision = {"image_size": image["image_size"], "layers": image["layers"], "width": image["stem_width"]}
        return {**vision, "head_width": head_width}
    vision = {"timm_model_name": image["name"], "timm_model_pretrained": False, "timm_pool": ""}
    return {**vision, "timm_proj": "linear", "image_size": encoder["image_size"]}


def _text_config(text: Mapping[str, Any]) -> dict[str, Any]:
    if TEXT_TOWERS[text["_target_"]] == "open_clip":
        described = describe(text["name"]).model["text_cfg"]
        return {**described, **text["options"], "context_length": text["context_length"], "output_tokens": False}
    return {
        "context_length": text["context_length"],
        "vocab_size": text["vocabulary"],
        "width": text["width"],
        "heads": text["heads"],
        "layers": text["layers"],
        "norm_kwargs": {"eps": text["norm_eps"]},
    }


def _state(model: LoadedModel, description: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the model's tensors by the names of the open_clip model that `description` gives.

    Raises:
        ConfigError: that model has other tensors, such as no projection where the head has one.
    """
    peer = _built(description)
    ours, state = model.state_dict(), {}
    scale = model.head.log_cosine_scale()
    assert scale is not None
    image_as, text_as = names(peer)
    views = (
        ("image", "visual.", projection_path(peer.visual), image_as),
        ("text", "" if text_tower(peer) is peer else "text.", text_path(peer), text_as),
    )
    for (view, prefix, path, renamed), own in zip(views, tower_states(peer), strict=True):
        matrix = ours[f"head.{view}_projection"]
        bias = ours.get(f"head.{view}_bias", matrix.new_zeros(matrix.shape[1]))
        last = _projection(own, path, matrix, bias)
        for key, value in own.items():
            found = last.get(key, ours.get(renamed(key)))
            if found is None or found.shape != value.shape:
                here = "missing" if found is None else list(found.shape)
                raise ConfigError(f"its {prefix}{key} is {list(value.shape)} in open_clip, {here} here")
            state[prefix + key] = found
    if (pair := model.config.get(PAIR)) is None:
        return state | {"logit_scale": scale.detach()}
    bias = scale.new_tensor(pair["bias"])
    return state | {"logit_scale": scale.detach() + pair["log_scale"], "logit_bias": bias}


def _projection(own: Mapping[str, Tensor], path: str | None, matrix: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """Return the last linear map by open_clip's names. own: tensors of the tower there."""
    if path is None:
        if matrix.shape[0] == matrix.shape[1] and torch.equal(matrix, torch.eye(len(matrix)).to(matrix)):
            return {}
        raise ConfigError("open_clip's tower ends without the head's projection")
    if path in own and not bias.any():
        return {path: matrix}
    if f"{path}.weight" in own and (f"{path}.bias" in own or not bias.any()):
        return {f"{path}.weight": matrix.mT, f"{path}.bias": bias}
    raise ConfigError("head.bias is true, and open_clip's tower has no bias after its projection")


def _built(description: Mapping[str, Any]) -> Any:
    """Return the open_clip model of a description, on the meta device."""
    from open_clip.model import CLIP, CustomTextCLIP

    settings = {key: value for key, value in description.items() if key != "custom_text"}
    custom = description.get("custom_text") or description["text_cfg"].get("hf_model_name")
    text = {**settings["text_cfg"], "hf_model_pretrained": False}
    with torch.device("meta"):
        return (CustomTextCLIP if custom else CLIP)(**{**settings, "text_cfg": text})
