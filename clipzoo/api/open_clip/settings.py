"""Towers that a name of open_clip describes, as the towers that are given by their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clipzoo.encoders.open_clip_registry import describe

PLAIN_VISION = {"image_size", "layers", "width", "patch_size", "head_width", "output_tokens", "patch_dropout"}
PLAIN_TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "norm_kwargs", "output_tokens"}
"""Settings of towers that `ClipViT`, `ClipResNet` and `ClipTextTower` have too."""


def with_plain_towers(encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Return an encoder's node with its towers as `image_tower` and `text_tower`, as `TwoTowers` has them.

    A tower of open_clip becomes the equal tower with the same tensors that is given by its sizes, if there is one.
    """
    image, text = encoder.get("image_tower", encoder.get("image")), encoder.get("text_tower", encoder.get("text"))
    return {**encoder, "image_tower": _plain_image(image), "text_tower": _plain_text(text)}


def _plain_image(node: Any) -> Any:
    if not isinstance(node, Mapping) or not str(node["_target_"]).endswith(".OpenClipImage"):
        return node
    model = describe(node["name"]).model
    settings = {**model["vision_cfg"], **node["options"]}
    if set(settings) - PLAIN_VISION:
        return node
    size, heads = node["image_size"], settings["width"] // settings.get("head_width", 64)
    if isinstance(settings["layers"], list):
        return {
            "_target_": "clipzoo.encoders.image.ClipResNet", "image_size": size, "layers": settings["layers"],
            "stem_width": settings["width"], "heads": 32 * heads,
        }  # fmt: skip
    return {
        "_target_": "clipzoo.encoders.image.ClipViT", "image_size": size, "patch_size": settings["patch_size"],
        "width": settings["width"], "layers": settings["layers"], "heads": heads,
        "quick_gelu": bool(model.get("quick_gelu")),
    }  # fmt: skip


def _plain_text(node: Any) -> Any:
    if not isinstance(node, Mapping) or not str(node["_target_"]).endswith(".OpenClipText"):
        return node
    model = describe(node["name"]).model
    settings = {**model["text_cfg"], **node["options"]}
    if set(settings) - PLAIN_TEXT:
        return node
    return {
        "_target_": "clipzoo.encoders.text.ClipTextTower", "context_length": node["context_length"],
        "vocabulary": settings.get("vocab_size", 49408), "width": settings.get("width", 512),
        "layers": settings.get("layers", 12), "heads": settings.get("heads", 8),
        "quick_gelu": bool(model.get("quick_gelu")), "distinct_pads": False, "end_token": 49407,
        "norm_eps": (settings.get("norm_kwargs") or {}).get("eps", 1e-5),
    }  # fmt: skip
