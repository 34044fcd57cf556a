"""Descriptions of open_clip's models: by name, from the Hugging Face hub, or from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from clipzoo.errors import ConfigError, nearest, one_message
from clipzoo.io import MB, read_json, require_fields
from clipzoo.io.files import shortened
from clipzoo.io.weights import from_hub

FOLDER, HUB = "local-dir:", "hf-hub:"
FILE = "open_clip_config.json"
REMEDY = "export the model again"
OPTIONS = (
    "width", "layers", "heads", "head_width", "mlp_ratio", "patch_size", "image_size", "context_length", "vocab_size",
    "patch_dropout", "ls_init_value", "attentional_pool", "attn_pooler_queries", "attn_pooler_heads", "no_ln_pre",
    "pos_embed_type", "final_ln_after_pool", "pool_type", "embed_cls", "pad_id", "eos_id", "no_causal_mask",
    "proj_bias", "proj_type", "output_tokens", "act_kwargs", "norm_kwargs", "block_type", "qk_norm",
    "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc", "timm_pool", "timm_proj",
    "timm_proj_bias", "timm_drop", "timm_drop_path", "hf_proj_type", "hf_pooler_type",
)  # fmt: skip
"""Settings of open_clip's towers that the options of a configuration may set. Others name models of other libraries,
their weights and tokenizers."""
MODEL_FIELDS = {"embed_dim": int, "vision_cfg": dict, "text_cfg": dict}
Triple = tuple[float, float, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Description:
    """A model of open_clip: its configuration (embed_dim, vision_cfg, text_cfg, ...), its pixel normalization, and how
    it resizes images in evaluations."""

    model: Mapping[str, Any]
    mean: Triple
    std: Triple
    interpolation: str
    resize_mode: str


def describe(name: str) -> Description:
    """Return open_clip's model `name`, "hf-hub:OWNER/MODEL" or "local-dir:FOLDER".

    Models of the registry have the preprocessing of their weights; where tags differ, CLIP's.

    Raises:
        ConfigError: there is no such model.
    """
    import open_clip
    from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

    if name.startswith(FOLDER):
        path = Path(name.removeprefix(FOLDER)) / FILE
        content = read_json(path, MB, REMEDY)
        require_fields(path, content, {"model_cfg": dict}, REMEDY)
        require_fields(path, content["model_cfg"], MODEL_FIELDS, REMEDY)
    elif name.startswith(HUB):
        content = _from_hub(name)
    else:
        described = open_clip.get_model_config(name.replace("/", "-"))
        if described is None:
            raise ConfigError(f"open_clip has no model {name}{nearest(name, open_clip.list_models(), most=3)}")
        content = {"model_cfg": described, "preprocess_cfg": _preprocessing(name.replace("/", "-"))}
    if name.startswith((FOLDER, HUB)):
        _require_plain_towers(name, content["model_cfg"])
    preprocessing = content.get("preprocess_cfg") or {}
    if not isinstance(preprocessing, dict):
        raise ConfigError(f"{name}: its preprocess_cfg is {shortened(preprocessing)}, not a mapping")
    mean = preprocessing.get("mean") or OPENAI_DATASET_MEAN
    std = preprocessing.get("std") or OPENAI_DATASET_STD
    interpolation, mode = resizing(preprocessing, name)
    return Description(content["model_cfg"], _triple(mean, name), _triple(std, name), interpolation, mode)


def _require_plain_towers(name: str, model: Mapping[str, Any]) -> None:
    """Raise ConfigError if a tower of a folder or of the hub is not one that timm or transformers has code for."""
    import timm

    image, text = model["vision_cfg"].get("timm_model_name"), model["text_cfg"].get("hf_model_name")
    if image is not None and not timm.is_model(str(image)):
        raise ConfigError(f"{name}: vision_cfg.timm_model_name={image} is not a model of timm")
    if text is not None:
        from clipzoo.encoders.huggingface import require_own_code

        with from_hub(str(text), f"{name}: text_cfg.hf_model_name={text} cannot be read from a folder or the hub"):
            require_own_code(str(text))


def resizing(preprocessing: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return interpolation and `resize_mode` of open_clip's preprocessing; bicubic and the shortest side by default.

    Raises:
        ConfigError: they are none of open_clip's, or borders have another color than black.
    """
    interpolation = preprocessing.get("interpolation") or "bicubic"
    resize = preprocessing.get("resize_mode") or "shortest"
    if interpolation not in ("bicubic", "bilinear") or resize not in ("shortest", "squash", "longest"):
        raise ConfigError(f"{name}: its preprocess_cfg has interpolation={interpolation}, resize_mode={resize}; "
                          "supported are bicubic and bilinear, and shortest, squash and longest")  # fmt: skip
    if resize == "longest" and preprocessing.get("fill_color"):
        raise ConfigError(f"{name}: its preprocess_cfg has fill_color={preprocessing['fill_color']}, supported is 0")
    return interpolation, resize


def settings_of(kind: type[T], described: Mapping[str, Any], options: Mapping[str, Any], key: str) -> T:
    """Return the settings of a tower, `CLIPVisionCfg` or `CLIPTextCfg`, with the user's options in place of its own.

    Raises:
        ConfigError: open_clip has no such option.
    """
    known = [field.name for field in fields(kind) if field.name in OPTIONS]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            raise ConfigError(f"{key}.options.{option}: open_clip's {kind.__name__} has no such option"
                              f"{nearest(option, known, most=3)}")  # fmt: skip
    with one_message(f"{key}: the settings of this model are none of open_clip's {kind.__name__}"):
        return kind(**{**described, **options})


def tokenizer_of(name: str, described: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    """Return the node of the tokenizer of a `text_cfg`. name: of the model."""
    source, settings = described.get("hf_tokenizer_name"), dict(described.get("tokenizer_kwargs") or {})
    if not source:
        return {"_target_": "clipzoo.data.tokenizer.ClipTokenizer", "context_length": context_length}
    if described.get("tokenizer_mode"):
        raise ConfigError(f"{name}: there is no tokenizer with mode {described['tokenizer_mode']}")
    return {
        "_target_": "clipzoo.encoders.huggingface_tokenizer.HuggingFaceTokenizer",
        "name": name.removeprefix(FOLDER) if name.startswith(FOLDER) else source,
        "context_length": context_length,
        "clean": settings.get("clean", "whitespace"),
        "strip_end": settings.get("strip_sep_token", False),
    }


def _from_hub(name: str) -> Mapping[str, Any]:
    from open_clip.factory import _get_hf_config

    with from_hub(name, f"{name} cannot be read from the Hugging Face hub"):
        content = _get_hf_config(name.removeprefix(HUB))
    if not isinstance(model := content.get("model_cfg"), Mapping) or not model.keys() >= MODEL_FIELDS.keys():
        raise ConfigError(f"{name} is not a model of open_clip: its {FILE} has no model_cfg of two towers")
    return content


def _preprocessing(name: str) -> dict[str, Any]:
    """Return the settings of the preprocessing on which all weights of a model agree."""
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    tags = [get_pretrained_cfg(name, tag) for tag in list_pretrained_tags_by_model(name)]
    agreed = {}
    for key in ("mean", "std", "interpolation", "resize_mode"):
        values = [tag.get(key) for tag in tags]
        if values and all(value == values[0] for value in values):
            agreed[key] = values[0]
    return agreed


def _triple(values: Any, name: str) -> Triple:
    with one_message(f"{name} has {values} as mean or std of the pixels, not three numbers"):
        red, green, blue = (float(value) for value in values)
    return red, green, blue
