"""Convert open_clip models to models of this package: a causal text tower and a ViT, modified ResNet or timm tower."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipzoo.api.build import build_model
from clipzoo.errors import ConfigError, nearest
from clipzoo.io import read_json, require_fields
from clipzoo.model import Model

EXPORT_REMEDY = "export the model again"
CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
TOWERS = {
    "clipzoo.encoders.image.ClipViT": "vit",
    "clipzoo.encoders.image.ClipResNet": "resnet",
    "clipzoo.encoders.image.TimmTower": "timm",
}


def from_open_clip(name: str, pretrained: str | None) -> tuple[Model, dict[str, Any]]:
    """Return open_clip's model `name` (with tag or checkpoint file `pretrained`) and its configuration.

    The weights must be on this machine, or open_clip downloads them.

    Raises:
        ConfigError: open_clip has no such model or weights, or no encoder here can represent it.
    """
    import open_clip

    described = _described(name)
    if pretrained is not None and not Path(pretrained).exists():
        tags = open_clip.list_pretrained_tags_by_model(name)
        if pretrained not in tags:
            raise ConfigError(
                f"pretrained={pretrained} is neither a file nor a tag of open_clip's {name} "
                f"(its tags: {', '.join(tags) or 'none'})"
            )
    peer = open_clip.create_model(name, pretrained=pretrained, load_weights=pretrained is not None or ":" in name)
    config = _configuration(described, peer)
    model = build_model(config)
    state = _clipzoo_state(peer.state_dict(), TOWERS[config["encoder"]["image_tower"]["_target_"]])
    model.load_state_dict(state)
    return model, config


TEXT_PREFIXES = ("token_embedding.", "positional_embedding", "transformer.", "ln_final.")


def _clipzoo_state(peer_state: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    if any(key.startswith("text.") for key in peer_state):
        peer_state = {key.removeprefix("text."): value for key, value in peer_state.items()}
    state = {"head.text_projection": peer_state["text_projection"], "head.log_scale": peer_state["logit_scale"]}
    projections = {"vit": "visual.proj", "resnet": "visual.attnpool.c_proj.weight", "timm": "visual.head.proj.weight"}
    projection = peer_state[projections[kind]]
    state["head.image_projection"] = projection if kind == "vit" else projection.mT
    visual = "visual.trunk." if kind == "timm" else "visual."
    for key, value in peer_state.items():
        if key.startswith(TEXT_PREFIXES):
            state[f"encoder.text_tower.trunk.{key}"] = value
        elif key.startswith(visual) and key not in {*projections.values(), "visual.attnpool.c_proj.bias"}:
            state[f"encoder.image_tower.trunk.{key.removeprefix(visual)}"] = value
    if kind == "resnet" and (bias := peer_state["visual.attnpool.c_proj.bias"]).any():
        values = "encoder.image_tower.trunk.attnpool.v_proj.bias"
        state[values] = state[values] + _before(projection.mT, bias)
    return state


def _before(projection: Tensor, bias: Tensor) -> Tensor:
    """[w, d] and [d] -> [w], a vector whose projection is the bias.

    The head has no bias. Attention weights sum to one, so a vector added to the values is added to the output.
    """
    solution = torch.linalg.lstsq(projection.mT.double(), bias.double()[:, None]).solution[:, 0]
    if not torch.allclose(solution @ projection.double(), bias.double(), rtol=1e-6, atol=1e-6):
        raise ConfigError("the output bias of this model's attention pooling is not in the range of its projection")
    return solution.to(bias)


def _described(name: str) -> dict[str, Any]:
    """Return open_clip's model configuration by name, or from an exported folder."""
    import open_clip

    if name.startswith("local-dir:"):
        path = Path(name.removeprefix("local-dir:")) / "open_clip_config.json"
        content = read_json(path, EXPORT_REMEDY)
        require_fields(path, content, {"model_cfg": dict}, EXPORT_REMEDY)
        return content["model_cfg"]
    described = open_clip.get_model_config(name)
    if described is None:
        raise ConfigError(f"open_clip has no model {name}{nearest(name, open_clip.list_models())}")
    return described


def _configuration(described: Mapping[str, Any], peer: Any) -> dict[str, Any]:
    vision, text = described["vision_cfg"], described["text_cfg"]
    unsupported = [key for key in ("hf_model_name", "no_causal_mask", "embed_cls") if text.get(key)]
    unsupported += [key for key in ("attentional_pool", "ls_init_value", "qk_norm") if vision.get(key)]
    if unsupported:
        raise ConfigError(f"no encoder here has these parts of the open_clip model: {', '.join(unsupported)}")
    quick = bool(described.get("quick_gelu", False))
    size = vision.get("image_size", 224)
    tower: dict[str, Any]
    if "timm_model_name" in vision:
        tower = {"_target_": "clipzoo.encoders.image.TimmTower", "name": vision["timm_model_name"]}
        tower |= {"image_size": None, "pretrained": False, "options": {}}
        width = peer.visual.head.proj.in_features
    elif isinstance(vision["layers"], list):
        width = 32 * vision["width"]
        heads = width // vision.get("head_width", 64)
        tower = {"_target_": "clipzoo.encoders.image.ClipResNet", "image_size": size, "layers": vision["layers"]}
        tower |= {"stem_width": vision["width"], "heads": heads}
    else:
        width = vision["width"]
        tower = {"_target_": "clipzoo.encoders.image.ClipViT", "image_size": size, "patch_size": vision["patch_size"]}
        tower |= {"width": width, "layers": vision["layers"], "heads": width // vision.get("head_width", 64)}
        tower["quick_gelu"] = quick
    context, vocabulary = text.get("context_length", 77), text.get("vocab_size", 49408)
    eps = (text.get("norm_kwargs") or {}).get("eps", 1e-5)
    encoder = {
        "_target_": "clipzoo.encoders.towers.TwoTowers",
        "image_size": size,
        "image_width": width,
        "text_width": text["width"],
        "context_length": context,
        "tokenizer": {"_target_": "clipzoo.data.tokenizer.ClipTokenizer", "context_length": context},
        "mean": list(getattr(peer.visual, "image_mean", None) or CLIP_MEAN),
        "std": list(getattr(peer.visual, "image_std", None) or CLIP_STD),
        "image_tower": tower,
        "text_tower": {
            "_target_": "clipzoo.encoders.text.ClipTextTower", "context_length": context, "vocabulary": vocabulary,
            "width": text["width"], "layers": text["layers"], "heads": text["heads"], "quick_gelu": quick,
            "distinct_pads": False, "end_token": 49407, "norm_eps": eps,
        },
    }  # fmt: skip
    head = {
        "_target_": "clipzoo.heads.clip.ClipHead", "image_width": width, "text_width": text["width"],
        "embed_width": described["embed_dim"], "temperature": 0.07, "max_scale": 100.0, "learnable_temperature": True,
    }  # fmt: skip
    return {"seed": 0, "encoder": encoder, "head": head, "data": {"interpolation": "bicubic"}}
