"""transformers' CLIPModel and SiglipModel, with tokenizer and image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from clipzoo import io
from clipzoo.api.formats import clip_model, siglip_model
from clipzoo.api.formats.open_clip import head_faults
from clipzoo.api.formats.preprocessing import image_settings, tokenizer_faults, write_preprocessing
from clipzoo.api.formats.weights import save_weights
from clipzoo.api.loading import PAIR, LoadedModel
from clipzoo.api.transformers.ties import layers_of, to_theirs
from clipzoo.encoders.towers import TwoTowers

KINDS: dict[str, Any] = {"CLIPModel": clip_model, "SiglipModel": siglip_model}


def faults(model: LoadedModel) -> list[str]:
    """Return the reasons why neither CLIPModel nor SiglipModel can represent the model; none if one of them can."""
    if reasons := head_faults(model):
        return reasons
    if not isinstance(model.encoder, TwoTowers):
        return [f"its encoder is {type(model.encoder).__name__}"]
    if _kind(model) is None:
        reasons = [f"{name} has no place for it ({', '.join(kind.faults(model))})" for name, kind in KINDS.items()]
    return [*reasons, *tokenizer_faults(model)]


def write_transformers(model: LoadedModel, folder: Path) -> None:
    """Write model.safetensors, the tokenizer and the image processor, then config.json."""
    kind = KINDS[str(_kind(model))]
    scale = model.head.log_cosine_scale()
    assert scale is not None
    ours = {"head.text_bias": scale.new_zeros(model.head.get_parameter("text_projection").shape[1])}
    state: dict[str, Tensor] = to_theirs(kind.ties(*layers_of(model)), {**ours, **model.state_dict()})
    state["logit_scale"] = scale
    if kind is siglip_model:
        pair = model.config.get(PAIR, {"log_scale": 0.0, "bias": 0.0})
        state["logit_scale"] = (scale + pair["log_scale"]).reshape(1)
        state["logit_bias"] = scale.new_tensor([pair["bias"]])
    save_weights(state, folder / "model.safetensors")
    write_preprocessing(model, folder, kind.PROCESSOR)
    # Its image processor for timm's models reads config.json alone.
    shared = {"dtype": str(model.dtype).removeprefix("torch.")}
    io.write_json(folder / "config.json", {**kind.config(model), **shared, **image_settings(model)})


def _kind(model: LoadedModel) -> str | None:
    """Return the name of the first class that can represent the model."""
    return next((name for name, kind in KINDS.items() if not kind.faults(model)), None)
