"""open_clip models: a folder that `open_clip.create_model("local-dir:FOLDER")` loads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipzoo.build import build_model, found_in_model
from clipzoo.config.schema import PREFIX, filled
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.encoders.base import on_meta, require_as_large
from clipzoo.encoders.huggingface import HuggingFaceTokenizer
from clipzoo.encoders.open_clip import FOLDER, HUB, describe, projection_path, resizing
from clipzoo.errors import ConfigError, one_message
from clipzoo.exports.files import save_weights
from clipzoo.io import write_json
from clipzoo.io.weights import from_hub, read_tensors, tensors_in
from clipzoo.loading import PAIR, LoadedModel
from clipzoo.model import Model

CLIP_HEAD = "clipzoo.heads.vector.ClipHead"
IMAGE_TOWERS = {
    "clipzoo.encoders.image.ClipViT": "vit",
    "clipzoo.encoders.image.ClipResNet": "resnet",
    "clipzoo.encoders.image.TimmTower": "timm",
    "clipzoo.encoders.open_clip.OpenClipImage": "open_clip",
}
TEXT_TOWERS = {"clipzoo.encoders.text.ClipTextTower": "clip", "clipzoo.encoders.open_clip.OpenClipText": "open_clip"}
IMAGE, TEXT = "encoder.image_tower.", "encoder.text_tower."
TOKENIZER = ("hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode")
HARMLESS_OPTIONS = ("drop_rate", "drop_path_rate", "patch_drop_rate", "attn_drop_rate", "proj_drop_rate")
"""Options of a timm trunk without effect in evaluation."""
PLAIN_VISION = {"image_size", "layers", "width", "patch_size", "head_width", "output_tokens", "patch_dropout"}
PLAIN_TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "norm_kwargs", "output_tokens"}
"""Settings of towers that `ClipViT`, `ClipResNet` and `ClipTextTower` share."""


@dataclass(frozen=True)
class PeerTower:
    """The image or the text tower of an open_clip model.

    state: its tensors, by the names after `prefix` in the model. ours: these names -> names in our model.
    projection: name of its last linear map, None without.
    """

    view: str
    prefix: str
    state: Mapping[str, Tensor]
    ours: Mapping[str, str]
    projection: str | None


def towers_of(peer: Any) -> list[PeerTower]:
    """Return both towers of an open_clip model, image first. CoCa's decoder is left out."""
    from open_clip.hf_model import HFTextEncoder
    from open_clip.timm_model import TimmModel

    state = peer.state_dict()
    image = {key.removeprefix("visual."): value for key, value in state.items() if key.startswith("visual.")}
    trunk = IMAGE if isinstance(peer.visual, TimmModel) else f"{IMAGE}trunk."
    towers = [PeerTower("image", "visual.", image, {key: trunk + key for key in image}, projection_path(peer.visual))]
    if "text" not in dict(peer.named_children()):
        # `CLIP` itself holds the modules of the text tower.
        others = ("visual.", "logit_scale", "logit_bias")
        text = {key: value for key, value in state.items() if not key.startswith(others)}
        last = None if peer.text_projection is None else "text_projection"
        return [*towers, PeerTower("text", "", text, {key: f"{TEXT}trunk.{key}" for key in text}, last)]
    text = {key.removeprefix("text."): value for key, value in state.items() if key.startswith("text.")}
    ours = {key: f"{TEXT}trunk.{key}" for key in text}
    if isinstance(peer.text, HFTextEncoder):
        ours = {key: TEXT + re.sub("^transformer\\.", "trunk.", key) for key in text}
    return [*towers, PeerTower("text", "text.", text, ours, projection_path(peer.text))]


def export_note(config: Mapping[str, Any]) -> str:
    """Return a line for the start of a training with the CLIP head whose encoder open_clip cannot represent, or ""."""
    faults = encoder_faults(config["encoder"]) if config["head"]["_target_"] == CLIP_HEAD else []
    note = "\nopen_clip cannot represent this model, clipzoo.export will refuse it: "
    return f"{note}{'; '.join(faults)}" if faults else ""


def faults(model: LoadedModel) -> list[str]:
    """Return the reasons why open_clip cannot represent the model; none if it can."""
    if reasons := [*head_faults(model), *encoder_faults(model.config["encoder"])]:
        return reasons
    try:
        _state(model, _model_config(model))
    except ConfigError as error:
        return [str(error)]
    return []


def head_faults(model: Model) -> list[str]:
    """Return the reason why the head's score is not a scaled cosine of two projections."""
    if model.head.log_cosine_scale() is not None:
        return []
    return [f"its head is {type(model.head).__name__}, whose logits are not scaled cosines of two vectors"]


def encoder_faults(encoder: Mapping[str, Any]) -> list[str]:
    """Return the reasons why open_clip cannot represent the encoder of a configuration."""
    if encoder["_target_"] not in ("clipzoo.encoders.towers.TwoTowers", "clipzoo.encoders.towers.Towers"):
        return [f"its encoder is {encoder['_target_']}"]
    image, text = _towers(encoder)
    if image["_target_"] not in IMAGE_TOWERS:
        return [f"its image tower is {image['_target_']}"]
    if text["_target_"] not in TEXT_TOWERS:
        return [f"its text tower is {text['_target_']}"]
    faults, kind = [], IMAGE_TOWERS[image["_target_"]]
    if text.get("distinct_pads"):
        faults.append("encoder.text_tower.distinct_pads is true")
    if kind in ("vit", "open_clip") and _quick_gelu(image) != _quick_gelu(text):
        faults.append("quick_gelu differs between the towers")
    if kind == "timm" and (others := sorted(set(image["options"]) - set(HARMLESS_OPTIONS))):
        faults.append(f"encoder.image_tower.options has {', '.join(others)}")
    return faults


def write_open_clip(model: LoadedModel, folder: Path) -> None:
    """Write open_clip_model.safetensors, then open_clip_config.json."""
    encoder, description = model.config["encoder"], _model_config(model)
    if isinstance(model.tokenizer, HuggingFaceTokenizer):
        # open_clip prepares the text, and takes this tokenizer from the folder.
        model.tokenizer.source.save_pretrained(folder)
    save_weights(_state(model, description), folder / "open_clip_model.safetensors")
    preprocess = {"mean": encoder["mean"], "std": encoder["std"], "resize_mode": model.transform.resize_mode}
    preprocess["interpolation"] = model.transform.interpolation
    write_json(folder / "open_clip_config.json", {"model_cfg": description, "preprocess_cfg": preprocess})


def _towers(encoder: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return encoder.get("image_tower", encoder.get("image")), encoder.get("text_tower", encoder.get("text"))


def _quick_gelu(tower: Mapping[str, Any]) -> bool:
    if "quick_gelu" in tower:
        return bool(tower["quick_gelu"])
    return bool(describe(tower["name"]).model.get("quick_gelu", False))


def _model_config(model: LoadedModel) -> dict[str, Any]:
    """Return open_clip's configuration of a model. Raises ConfigError if it has none for the tokenizer."""
    encoder, tokenizer = model.config["encoder"], model.tokenizer
    image, text = _towers(encoder)
    vision_config: dict[str, Any] = {"image_size": image["image_size"]}
    match IMAGE_TOWERS[image["_target_"]]:
        case "open_clip":
            registered = describe(image["name"]).model["vision_cfg"]
            vision_config = {**registered, **image["options"], **vision_config, "output_tokens": False}
        case "vit":
            vision_config |= {key: image[key] for key in ("layers", "width", "patch_size")}
            vision_config["head_width"] = image["width"] // image["heads"]
        case "resnet":
            vision_config |= {"layers": image["layers"], "width": image["stem_width"]}
            vision_config["head_width"] = 32 * image["stem_width"] // image["heads"]
        case "timm":
            vision_config = {
                "timm_model_name": image["name"], "timm_model_pretrained": False, "timm_pool": "",
                "timm_proj": "linear", "image_size": encoder["image_size"],
            }  # fmt: skip
    described_text: Mapping[str, Any] = {}
    if TEXT_TOWERS[text["_target_"]] == "open_clip":
        described_text = describe(text["name"]).model
        text_config = {**described_text["text_cfg"], **text["options"], "context_length": text["context_length"]}
        text_config = {key: value for key, value in text_config.items() if key not in TOKENIZER}
        text_config["output_tokens"] = False
    else:
        text_config = {
            "context_length": text["context_length"], "vocab_size": text["vocabulary"], "width": text["width"],
            "heads": text["heads"], "layers": text["layers"], "norm_kwargs": {"eps": text["norm_eps"]},
        }  # fmt: skip
    if isinstance(tokenizer, HuggingFaceTokenizer):
        if tokenizer.clean == "none":
            raise ConfigError(
                "encoder.tokenizer.clean is none, and open_clip cleans text for every tokenizer of the hub"
            )
        if not tokenizer.source.is_fast:
            raise ConfigError(f"its tokenizer {tokenizer.name} has no tokenizer.json")
        settings = {"clean": tokenizer.clean, "strip_sep_token": tokenizer.strip_end}
        text_config |= {"hf_tokenizer_name": tokenizer.name, "tokenizer_kwargs": settings}
    elif not isinstance(tokenizer, ClipTokenizer):
        raise ConfigError(f"its tokenizer is {type(tokenizer).__name__}")
    # Projections that training has added to towers without one.
    if vision_config.get("timm_proj") == "none" and not is_identity(model, "image"):
        vision_config |= {"timm_proj": "linear", "timm_proj_bias": has_bias(model, "image")}
    if text_config.get("proj_type") == "none" and not is_identity(model, "text"):
        text_config |= {"proj_type": "linear", "proj_bias": has_bias(model, "text")}
    embed_width = model.head.get_parameter("image_projection").shape[1]
    description = {"embed_dim": embed_width, "quick_gelu": _quick_gelu(text)}
    if PAIR in model.config:
        description["init_logit_bias"] = model.config[PAIR]["bias"]
    # A separate text tower, under the prefix "text.".
    if described_text.get("custom_text") or any(map(text_config.get, ("hf_model_name", "embed_cls", "proj_bias"))):
        description["custom_text"] = True
    return description | {"vision_cfg": vision_config, "text_cfg": text_config}


def is_identity(model: Model, view: str) -> bool:
    """Return True if the projection of "image" or "text" changes no features."""
    matrix = model.head.get_parameter(f"{view}_projection")
    square = matrix.shape[0] == matrix.shape[1]
    return square and torch.equal(matrix, torch.eye(len(matrix)).to(matrix)) and not has_bias(model, view)


def has_bias(model: Model, view: str) -> bool:
    """Return True if the projection of "image" or "text" adds a vector other than zero."""
    bias = dict(model.head.named_parameters()).get(f"{view}_bias")
    return bias is not None and bool(bias.any())


def _state(model: LoadedModel, description: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors by the names of open_clip's model of a description. Raises ConfigError if it has other tensors."""
    from open_clip.model import CLIP, CustomTextCLIP

    settings = {key: value for key, value in description.items() if key != "custom_text"}
    custom = description.get("custom_text") or description["text_cfg"].get("hf_model_name")
    settings["text_cfg"] = {**settings["text_cfg"], "hf_model_pretrained": False}
    with torch.device("meta"):
        peer: Any = (CustomTextCLIP if custom else CLIP)(**settings)
    ours, state = model.state_dict(), {}
    scale = model.head.log_cosine_scale()
    assert scale is not None
    for tower in towers_of(peer):
        matrix, path = ours[f"head.{tower.view}_projection"], tower.projection
        bias = ours.get(f"head.{tower.view}_bias", matrix.new_zeros(matrix.shape[1]))
        # The last linear map of the tower by open_clip's names.
        projection = {}
        if path is None:
            if matrix.shape[0] != matrix.shape[1] or not torch.equal(matrix, torch.eye(len(matrix)).to(matrix)):
                raise ConfigError("open_clip's tower ends without the head's projection")
        elif path in tower.state and not bias.any():
            projection = {path: matrix}
        elif f"{path}.weight" in tower.state and (f"{path}.bias" in tower.state or not bias.any()):
            projection = {f"{path}.weight": matrix.mT, f"{path}.bias": bias}
        else:
            raise ConfigError("head.bias is true, and open_clip's tower has no bias after its projection")
        for key, value in tower.state.items():
            tensor = projection.get(key, ours.get(tower.ours[key]))
            if tensor is None or tensor.shape != value.shape:
                shape = "missing" if tensor is None else list(tensor.shape)
                raise ConfigError(f"its {tower.prefix}{key} is {list(value.shape)} in open_clip, {shape} here")
            state[tower.prefix + key] = tensor
    if (pair := model.config.get(PAIR)) is None:
        return state | {"logit_scale": scale.detach()}
    bias = scale.new_tensor(pair["bias"])
    return state | {"logit_scale": scale.detach() + pair["log_scale"], "logit_bias": bias}


def from_open_clip(name: str, pretrained: str | None = None, device: str | torch.device = "cpu") -> LoadedModel:
    """Return an open_clip model by name and tag or checkpoint file, NAME/TAG, or from a folder "local-dir:FOLDER".

    open_clip downloads missing weights. Raises ConfigError if it has no such model, or no encoder can represent it.
    """
    import open_clip
    from open_clip import factory

    head, _, tag = name.partition("/")
    has_weights = tag in open_clip.list_pretrained_tags_by_model(head) or Path(tag).is_file()
    if pretrained is None and ":" not in name and has_weights:
        name, pretrained = head, tag
    if pretrained is not None and ":" in name:
        raise ConfigError(
            f"pretrained={pretrained}: {name} has its own weights, and open_clip ignores others: leave pretrained out"
        )
    describe(name)
    tags = open_clip.list_pretrained_tags_by_model(name)
    file = pretrained if pretrained is not None and Path(pretrained).exists() else None
    if pretrained is not None and file is None and pretrained not in tags:
        raise ConfigError(
            f"pretrained={pretrained} is neither a file nor a tag of open_clip's {name} "
            f"(its tags: {', '.join(tags) or 'none'})"
        )
    weights = pretrained is not None or ":" in name
    failure, remedy = f"open_clip's {name} cannot be loaded", ""
    if file is not None:
        failure = f"{pretrained} holds no weights of open_clip's {name}"
    elif pretrained is not None:
        failure = f"the weights {pretrained} of open_clip's {name} cannot be downloaded"
        remedy = "Without a network, give a file of these weights in place of the tag"
    place = pretrained or name.removeprefix(FOLDER)
    with from_hub(place, failure, remedy) if weights else one_message(failure, remedy):
        if pretrained is None and name.startswith(FOLDER):
            file = factory._find_checkpoint_in_dir(Path(name.removeprefix(FOLDER)))
        elif pretrained is None and name.startswith(HUB):
            file = factory.download_pretrained_from_hf(name.removeprefix(HUB))
        # Compare the sizes of untrusted weights with those of the model before it takes memory.
        if file:
            stored = tensors_in(read_tensors(Path(file)))
            with on_meta(len(stored)):
                peer = open_clip.create_model(name, pretrained_text=False, load_weights=False, device="meta")
            require_as_large(peer, stored, Path(file))
        # A folder without weights would give a model with random ones.
        peer = open_clip.create_model(
            name, pretrained=pretrained, pretrained_text=False, load_weights=weights, require_pretrained=weights
        )
    loaded = LoadedModel(*as_ours(name, peer)).to(device).eval()
    if file:
        loaded.stored_dtype = max(stored, key=Tensor.numel).dtype
    return loaded


def as_ours(name: str, peer: Any) -> tuple[Model, dict[str, Any]]:
    """Convert open_clip's model `peer`, described by `name`; return encoder and head, and their configuration."""
    visual, towers, module = peer.visual, {"name": name, "options": {}}, "clipzoo.encoders.open_clip"
    keys = "image_width text_width image_size context_length tokenizer mean std interpolation resize_mode"
    facts = {key: f"{PREFIX}{key}" for key in keys.split()}
    encoder: dict[str, Any] = {
        "_target_": "clipzoo.encoders.towers.Towers", "name": name,
        "image": {"_target_": f"{module}.OpenClipImage", **towers, "image_size": facts["image_size"]},
        "text": {"_target_": f"{module}.OpenClipText", **towers, "context_length": facts["context_length"]},
        **facts,
    }  # fmt: skip
    # Mean and std of the weights, which may differ from tag to tag.
    for key, value in (("mean", visual.image_mean), ("std", visual.image_std)):
        encoder |= {key: [float(number) for number in value]} if value else {}
    head: dict[str, Any] = {
        "_target_": "clipzoo.heads.vector.ClipHead", "image_width": facts["image_width"],
        "text_width": facts["text_width"], "embed_width": 1, "temperature": 0.07,
        "max_scale": max(100.0, math.exp(peer.logit_scale.item())), "learnable_temperature": True, "bias": False,
    }  # fmt: skip
    interpolation, resize_mode = resizing(getattr(visual, "preprocess_cfg", None) or {}, name)
    data = {"interpolation": interpolation, "resize_mode": resize_mode}
    config: dict[str, Any] = {"seed": 0, "encoder": encoder | data, "head": head, "data": data}
    config = filled(config, found_in_model(config))
    head = config["head"]

    # The last linear maps become the head's projections; a tower that ends without one has the identity.
    state, biases = {"head.log_scale": peer.logit_scale.detach().reshape(())}, {}
    for tower in towers_of(peer):
        path, tensors, bias = tower.projection, tower.state, None
        if path is None:
            matrix = torch.eye(config["encoder"][f"{tower.view}_width"])
        elif path in tensors:
            matrix = tensors[path]
        else:
            matrix, bias = tensors[f"{path}.weight"].mT, tensors.get(f"{path}.bias")
        projection_names = (path, f"{path}.weight", f"{path}.bias")
        state |= {tower.ours[key]: value for key, value in tensors.items() if key not in projection_names}
        state[f"head.{tower.view}_projection"] = matrix
        biases[f"head.{tower.view}_bias"] = matrix.new_zeros(matrix.shape[1]) if bias is None else bias
        if tower.view == "image":
            # SigLIP's image towers end without a projection.
            head |= {"embed_width": matrix.shape[1], "image_projection": path is not None}
    head["bias"] = any(bool(bias.any()) for bias in biases.values())
    model = build_model(config)
    model.load_state_dict(state | (biases if head["bias"] else {}))
    if (bias := getattr(peer, "logit_bias", None)) is not None:
        config["pair"] = {"log_scale": 0.0, "bias": bias.item()}
    return model, config


def with_plain_towers(encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Return an encoder's node with its towers as `image_tower` and `text_tower`, as `TwoTowers` has them.

    A tower of open_clip becomes the equivalent tower given by its sizes, with the same tensors, if there is one.
    """
    image, text = _towers(encoder)
    if isinstance(image, Mapping) and str(image["_target_"]).endswith(".OpenClipImage"):
        model = describe(image["name"]).model
        settings = {**model["vision_cfg"], **image["options"]}
        if not set(settings) - PLAIN_VISION:
            heads = settings["width"] // settings.get("head_width", 64)
            shared = {"image_size": image["image_size"], "layers": settings["layers"]}
            if isinstance(settings["layers"], list):
                target = {"_target_": "clipzoo.encoders.image.ClipResNet", "stem_width": settings["width"]}
                image = {**target, **shared, "heads": 32 * heads}
            else:
                image = {
                    "_target_": "clipzoo.encoders.image.ClipViT", **shared, "patch_size": settings["patch_size"],
                    "width": settings["width"], "heads": heads, "quick_gelu": bool(model.get("quick_gelu")),
                }  # fmt: skip
    if isinstance(text, Mapping) and str(text["_target_"]).endswith(".OpenClipText"):
        model = describe(text["name"]).model
        settings = {**model["text_cfg"], **text["options"]}
        if not set(settings) - PLAIN_TEXT:
            text = {
                "_target_": "clipzoo.encoders.text.ClipTextTower", "context_length": text["context_length"],
                "vocabulary": settings.get("vocab_size", 49408), "width": settings.get("width", 512),
                "layers": settings.get("layers", 12), "heads": settings.get("heads", 8),
                "quick_gelu": bool(model.get("quick_gelu")), "distinct_pads": False, "end_token": 49407,
                "norm_eps": (settings.get("norm_kwargs") or {}).get("eps", 1e-5),
            }  # fmt: skip
    return {**encoder, "image_tower": image, "text_tower": text}
