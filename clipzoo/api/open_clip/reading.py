"""Models of open_clip with their weights, as our encoder and head."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipzoo.api.build import build_model, found_in_model
from clipzoo.api.open_clip.tensors import (
    names,
    projections,
    text_path,
    tower_states,
    without_projection,
)
from clipzoo.config.from_model import PREFIX, filled
from clipzoo.encoders.base import on_meta, require_as_large
from clipzoo.encoders.open_clip_projection import projection_path
from clipzoo.encoders.open_clip_registry import FOLDER, HUB, describe, resizing
from clipzoo.errors import ConfigError, one_message
from clipzoo.io.weights import from_hub, read_tensors, tensors_in
from clipzoo.model import Model

IMAGE_TOWER, TEXT_TOWER = "clipzoo.encoders.open_clip.OpenClipImage", "clipzoo.encoders.open_clip.OpenClipText"
FACTS = {
    key: f"{PREFIX}{key}"
    for key in (
        "image_width",
        "text_width",
        "image_size",
        "context_length",
        "tokenizer",
        "mean",
        "std",
        "interpolation",
        "resize_mode",
    )
}
"""Values of the encoder that are found in the model."""


def from_open_clip(name: str, pretrained: str | None) -> tuple[Model, dict[str, Any]]:
    """Return open_clip's model `name` (with tag or checkpoint file `pretrained`) and its configuration.

    The weights must be on this machine, or open_clip downloads them.

    Raises:
        ConfigError: open_clip has no such model or weights, or no encoder here can represent it.
    """
    import open_clip

    _require_no_tag(name)
    describe(name)
    if pretrained is not None and ":" in name:
        raise ConfigError(
            f"pretrained={pretrained}: {name} has its own weights, and open_clip ignores others: leave pretrained out"
        )
    if pretrained is not None and not Path(pretrained).exists():
        tags = open_clip.list_pretrained_tags_by_model(name)
        if pretrained not in tags:
            raise ConfigError(
                f"pretrained={pretrained} is neither a file nor a tag of open_clip's {name} "
                f"(its tags: {', '.join(tags) or 'none'})"
            )
    return as_ours(name, _peer(name, pretrained))


def _require_no_tag(name: str) -> None:
    """Raise ConfigError if the name of a model is followed by the tag of its weights."""
    import open_clip

    model, _, tag = name.rpartition("/")
    if tag in open_clip.list_pretrained_tags_by_model(model):
        raise ConfigError(f"{name} is a model with the tag of its weights: give model={model} pretrained={tag}")


def _peer(name: str, pretrained: str | None) -> Any:
    """Return open_clip's own model with its weights. Raises ConfigError."""
    import open_clip

    weights = pretrained is not None or ":" in name
    what, remedy = f"open_clip's {name} cannot be loaded", ""
    if pretrained is not None and Path(pretrained).exists():
        what = f"{pretrained} holds no weights of open_clip's {name}"
    elif pretrained is not None:
        what = f"the weights {pretrained} of open_clip's {name} cannot be downloaded"
        remedy = "Without a network, give a file of these weights in place of the tag"
    place = pretrained or name.removeprefix(FOLDER)
    with from_hub(place, what, remedy) if weights else one_message(what, remedy):
        load = partial(open_clip.create_model, name, pretrained_text=False)
        if file := _stored_weights(name, pretrained):
            stored = tensors_in(read_tensors(Path(file)))
            with on_meta(len(stored)):
                peer = load(load_weights=False, device="meta")
            require_as_large(peer, stored, Path(file))
        # A folder without weights would give a model with random ones.
        return load(pretrained=pretrained, load_weights=weights, require_pretrained=weights)


def _stored_weights(name: str, pretrained: str | None) -> str | None:
    """Return the file of weights that open_clip reads for a file, a folder or a model on the hub; None for others."""
    from open_clip import factory

    if pretrained is not None:
        return pretrained if Path(pretrained).exists() else None
    if name.startswith(FOLDER):
        return factory._find_checkpoint_in_dir(Path(name.removeprefix(FOLDER)))
    return factory.download_pretrained_from_hf(name.removeprefix(HUB)) if name.startswith(HUB) else None


def as_ours(name: str, peer: Any) -> tuple[Model, dict[str, Any]]:
    """Return open_clip's model `peer`, which `name` describes, as encoder and head, and their configuration."""
    config = _configuration(name, peer)
    config = filled(config, found_in_model(config))
    encoder, head = config["encoder"], config["head"]
    maps = projections(peer, (encoder["image_width"], encoder["text_width"]))
    head |= {"embed_width": maps[0][0].shape[1], "bias": any(bias is not None and bool(bias.any()) for _, bias in maps)}
    # SigLIP's image towers end without a projection.
    head["image_projection"] = projection_path(peer.visual) is not None
    model = build_model(config)
    image, text = tower_states(peer)
    paths = projection_path(peer.visual), text_path(peer)
    image_as, text_as = names(peer)
    state = {image_as(key): value for key, value in without_projection(image, paths[0]).items()}
    state |= {text_as(key): value for key, value in without_projection(text, paths[1]).items()}
    state["head.log_scale"] = peer.logit_scale.detach().reshape(())
    for view, (matrix, bias) in zip(("image", "text"), maps, strict=True):
        state[f"head.{view}_projection"] = matrix
        if head["bias"]:
            state[f"head.{view}_bias"] = matrix.new_zeros(matrix.shape[1]) if bias is None else bias
    model.load_state_dict(state)
    if (bias := getattr(peer, "logit_bias", None)) is not None:
        config["pair"] = {"log_scale": 0.0, "bias": _number(bias)}
    return model, config


def _configuration(name: str, peer: Any) -> dict[str, Any]:
    towers = {"name": name, "options": {}}
    encoder: dict[str, Any] = {
        "_target_": "clipzoo.encoders.towers.Towers", "name": name,
        "image": {"_target_": IMAGE_TOWER, **towers, "image_size": FACTS["image_size"]},
        "text": {"_target_": TEXT_TOWER, **towers, "context_length": FACTS["context_length"]},
        **FACTS,
    }  # fmt: skip
    # Those of the weights, which may differ from tag to tag.
    visual = peer.visual
    for key, value in (("mean", visual.image_mean), ("std", visual.image_std)):
        encoder |= {key: [float(number) for number in value]} if value else {}
    scale = math.exp(_number(peer.logit_scale))
    head = {
        "_target_": "clipzoo.heads.clip.ClipHead", "image_width": FACTS["image_width"],
        "text_width": FACTS["text_width"], "embed_width": 1, "temperature": 0.07,
        "max_scale": max(100.0, scale), "learnable_temperature": True, "bias": False,
    }  # fmt: skip
    interpolation, mode = resizing(getattr(peer.visual, "preprocess_cfg", None) or {}, name)
    preprocessing = {"interpolation": interpolation, "resize_mode": mode}
    return {"seed": 0, "encoder": encoder | preprocessing, "head": head, "data": preprocessing}


def _number(tensor: Tensor) -> float:
    with torch.no_grad():
        return float(tensor.reshape(()))
