"""open_clip models: a folder that `open_clip.create_model("local-dir:FOLDER")` loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from clipzoo.api.loading import LoadedModel
from clipzoo.api.open_clip import TOWERS
from clipzoo.formats.weights import save_weights
from clipzoo.io import write_json
from clipzoo.model import Model

CLIP_HEAD, TWO_TOWERS = "clipzoo.heads.clip.ClipHead", "clipzoo.encoders.towers.TwoTowers"
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
    return [*head_faults(model), *encoder_faults(model.config["encoder"])]


def head_faults(model: Model) -> list[str]:
    """Return the reason why the head's score is not a scaled cosine of two projections."""
    if model.head.log_cosine_scale() is not None:
        return []
    return [f"its head is {type(model.head).__name__}, whose logits are no scaled cosines of two vectors"]


def encoder_faults(encoder: Mapping[str, Any]) -> list[str]:
    """Return the reasons why open_clip cannot represent the encoder of a configuration."""
    faults = []
    if encoder["_target_"] != TWO_TOWERS:
        return [f"its encoder is {encoder['_target_']}"]
    image, text = encoder["image_tower"], encoder["text_tower"]
    if image["_target_"] not in TOWERS:
        return [f"its image tower is {image['_target_']}"]
    if text["_target_"] != "clipzoo.encoders.text.ClipTextTower":
        return [f"its text tower is {text['_target_']}"]
    if text["distinct_pads"]:
        faults.append("encoder.text_tower.distinct_pads is true")
    if TOWERS[image["_target_"]] == "vit" and image["quick_gelu"] != text["quick_gelu"]:
        faults.append("quick_gelu differs between the towers")
    if others := sorted(set(image.get("options", {})) - set(HARMLESS_OPTIONS)):
        faults.append(f"encoder.image_tower.options has {', '.join(others)}")
    return faults


def write_open_clip(model: LoadedModel, folder: Path) -> None:
    """Write open_clip_model.safetensors, then open_clip_config.json."""
    encoder = model.config["encoder"]
    save_weights(_state(model, TOWERS[encoder["image_tower"]["_target_"]]), folder / "open_clip_model.safetensors")
    preprocess = {"mean": encoder["mean"], "std": encoder["std"], "resize_mode": "shortest"}
    preprocess["interpolation"] = model.transform.interpolation
    content = {"model_cfg": _model_config(encoder, model), "preprocess_cfg": preprocess}
    write_json(folder / "open_clip_config.json", content)


def _model_config(encoder: Mapping[str, Any], model: Model) -> dict[str, Any]:
    image, text = encoder["image_tower"], encoder["text_tower"]
    kind = TOWERS[image["_target_"]]
    if kind == "vit":
        vision: dict[str, Any] = {
            "image_size": image["image_size"], "layers": image["layers"], "width": image["width"],
            "patch_size": image["patch_size"], "head_width": image["width"] // image["heads"],
        }  # fmt: skip
    elif kind == "resnet":
        head_width = 32 * image["stem_width"] // image["heads"]
        vision = {"image_size": image["image_size"], "layers": image["layers"], "width": image["stem_width"]}
        vision["head_width"] = head_width
    else:
        vision = {"timm_model_name": image["name"], "timm_model_pretrained": False, "timm_pool": ""}
        vision |= {"timm_proj": "linear", "image_size": encoder["image_size"]}
    return {
        "embed_dim": model.head.get_parameter("image_projection").shape[1],
        "quick_gelu": text["quick_gelu"],
        "vision_cfg": vision,
        "text_cfg": {
            "context_length": text["context_length"],
            "vocab_size": text["vocabulary"],
            "width": text["width"],
            "heads": text["heads"],
            "layers": text["layers"],
            "norm_kwargs": {"eps": text["norm_eps"]},
        },
    }


def _state(model: Model, kind: str) -> dict[str, Tensor]:
    visual = "visual.trunk." if kind == "timm" else "visual."
    state = {}
    for key, value in model.state_dict().items():
        if key.startswith("encoder.image_tower.trunk."):
            state[visual + key.removeprefix("encoder.image_tower.trunk.")] = value
        elif key.startswith("encoder.text_tower.trunk."):
            state[key.removeprefix("encoder.text_tower.trunk.")] = value
    projection = model.head.get_parameter("image_projection").detach()  # [w, d]
    if kind == "vit":
        state["visual.proj"] = projection
    elif kind == "resnet":
        state["visual.attnpool.c_proj.weight"] = projection.mT
        state["visual.attnpool.c_proj.bias"] = projection.new_zeros(projection.shape[1])
    else:
        state["visual.head.proj.weight"] = projection.mT
    state["text_projection"] = model.head.get_parameter("text_projection").detach()
    scale = model.head.log_cosine_scale()
    assert scale is not None
    state["logit_scale"] = scale.detach()
    return state
