"""open_clip models: a folder that `open_clip.create_model("local-dir:FOLDER")` loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipzoo.build import build_model, found_in_model
from clipzoo.config.schema import PREFIX, filled
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.encoders.base import on_meta, require_as_large
from clipzoo.encoders.huggingface import HuggingFaceTokenizer
from clipzoo.encoders.open_clip import FOLDER, HUB, describe, projection_path, resizing, taken_projection
from clipzoo.errors import ConfigError, one_message
from clipzoo.exports.files import save_weights
from clipzoo.io import write_json
from clipzoo.io.weights import from_hub, read_tensors, tensors_in
from clipzoo.loading import PAIR, LoadedModel
from clipzoo.model import Model

CLIP_HEAD = "clipzoo.heads.vector.ClipHead"
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
IMAGE, TEXT = "encoder.image_tower.", "encoder.text_tower."
TOKENIZER = ("hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode")
HARMLESS_OPTIONS = ("drop_rate", "drop_path_rate", "patch_drop_rate", "attn_drop_rate", "proj_drop_rate")
"""Options of a timm trunk without effect in evaluation."""
OPEN_IMAGE, OPEN_TEXT = "clipzoo.encoders.open_clip.OpenClipImage", "clipzoo.encoders.open_clip.OpenClipText"
KEYS = (
    "image_width", "text_width", "image_size", "context_length", "tokenizer", "mean", "std", "interpolation",
    "resize_mode",
)  # fmt: skip
FACTS = {key: f"{PREFIX}{key}" for key in KEYS}
"""Values of the encoder that are found in the model."""
PLAIN_VISION = {"image_size", "layers", "width", "patch_size", "head_width", "output_tokens", "patch_dropout"}
PLAIN_TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "norm_kwargs", "output_tokens"}
"""Settings of towers that `ClipViT`, `ClipResNet` and `ClipTextTower` have too."""


@dataclass(frozen=True)
class PeerTower:
    """The image or the text tower of an open_clip model.

    state: its tensors, by the names after `prefix` in the model. projection: name of its last linear map, None without.
    to_ours: function from a name to that in our model.
    """

    view: str
    prefix: str
    state: Mapping[str, Tensor]
    projection: str | None
    to_ours: Callable[[str], str]


def towers_of(peer: Any) -> list[PeerTower]:
    """Return both towers of an open_clip model, image first. CoCa's decoder is left out."""
    from open_clip.hf_model import HFTextEncoder
    from open_clip.timm_model import TimmModel

    state, text = peer.state_dict(), peer.text if "text" in dict(peer.named_children()) else peer
    image_prefix = IMAGE if isinstance(peer.visual, TimmModel) else f"{IMAGE}trunk."

    def text_name(name: str) -> str:
        if not isinstance(text, HFTextEncoder):
            return f"{TEXT}trunk.{name}"
        trunk = name.startswith("transformer.")
        return f"{TEXT}trunk.{name.removeprefix('transformer.')}" if trunk else f"{TEXT}{name}"

    image_state = {key.removeprefix("visual."): value for key, value in state.items() if key.startswith("visual.")}
    image = PeerTower("image", "visual.", image_state, projection_path(peer.visual), lambda name: image_prefix + name)
    if text is not peer:
        text_state = {key.removeprefix("text."): value for key, value in state.items() if key.startswith("text.")}
        return [image, PeerTower("text", "text.", text_state, projection_path(text), text_name)]
    # `CLIP` itself holds the modules of the text tower.
    others = ("visual.", "logit_scale", "logit_bias")
    text_state = {key: value for key, value in state.items() if not key.startswith(others)}
    last = None if peer.text_projection is None else "text_projection"
    return [image, PeerTower("text", "", text_state, last, text_name)]


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
    bias = dict(model.head.named_parameters()).get(f"{view}_bias")
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
        matrix = ours[f"head.{tower.view}_projection"]
        bias = ours.get(f"head.{tower.view}_bias", matrix.new_zeros(matrix.shape[1]))
        last = _projection(tower, matrix, bias)
        for key, value in tower.state.items():
            found = last.get(key, ours.get(tower.to_ours(key)))
            if found is None or found.shape != value.shape:
                here = "missing" if found is None else list(found.shape)
                raise ConfigError(f"its {tower.prefix}{key} is {list(value.shape)} in open_clip, {here} here")
            state[tower.prefix + key] = found
    if (pair := model.config.get(PAIR)) is None:
        return state | {"logit_scale": scale.detach()}
    bias = scale.new_tensor(pair["bias"])
    return state | {"logit_scale": scale.detach() + pair["log_scale"], "logit_bias": bias}


def _projection(tower: PeerTower, matrix: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """Return the last linear map of a tower by open_clip's names."""
    path = tower.projection
    if path is None:
        if matrix.shape[0] == matrix.shape[1] and torch.equal(matrix, torch.eye(len(matrix)).to(matrix)):
            return {}
        raise ConfigError("open_clip's tower ends without the head's projection")
    if path in tower.state and not bias.any():
        return {path: matrix}
    if f"{path}.weight" in tower.state and (f"{path}.bias" in tower.state or not bias.any()):
        return {f"{path}.weight": matrix.mT, f"{path}.bias": bias}
    raise ConfigError("head.bias is true, and open_clip's tower has no bias after its projection")


# Models of open_clip with their weights, as our encoder and head.


def from_open_clip(name: str, pretrained: str | None = None, device: str | torch.device = "cpu") -> LoadedModel:
    """Return an open_clip model by name and tag, a checkpoint file as tag, or an exported folder "local-dir:FOLDER".

    The weights must be on this machine, or open_clip downloads them.

    Raises:
        ConfigError: open_clip has no such model or weights, or no encoder here can represent it.
    """
    import open_clip

    before, _, tag = name.rpartition("/")
    if tag in open_clip.list_pretrained_tags_by_model(before):
        raise ConfigError(f"{name} is a model with the tag of its weights: give model={before} pretrained={tag}")
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
    model, config = as_ours(name, _peer(name, pretrained))
    return LoadedModel(model, config).to(device).eval()


def _peer(name: str, pretrained: str | None) -> Any:
    """Return open_clip's own model with its weights. Raises ConfigError."""
    import open_clip
    from open_clip import factory

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
        file = pretrained if pretrained is not None and Path(pretrained).exists() else None
        if pretrained is None and name.startswith(FOLDER):
            file = factory._find_checkpoint_in_dir(Path(name.removeprefix(FOLDER)))
        elif pretrained is None and name.startswith(HUB):
            file = factory.download_pretrained_from_hf(name.removeprefix(HUB))
        # The sizes of a stranger's weights are compared with those of the model before it takes memory.
        if file:
            stored = tensors_in(read_tensors(Path(file)))
            with on_meta(len(stored)):
                peer = load(load_weights=False, device="meta")
            require_as_large(peer, stored, Path(file))
        # A folder without weights would give a model with random ones.
        return load(pretrained=pretrained, load_weights=weights, require_pretrained=weights)


def as_ours(name: str, peer: Any) -> tuple[Model, dict[str, Any]]:
    """Return open_clip's model `peer`, which `name` describes, as encoder and head, and their configuration."""
    config = _configuration(name, peer)
    config = filled(config, found_in_model(config))
    encoder, head = config["encoder"], config["head"]
    towers, widths = towers_of(peer), (encoder["image_width"], encoder["text_width"])
    maps = [taken_projection(tower.state, tower.projection, width) for tower, width in zip(towers, widths, strict=True)]
    head |= {"embed_width": maps[0][0].shape[1], "bias": any(bias is not None and bool(bias.any()) for _, bias in maps)}
    # SigLIP's image towers end without a projection.
    head["image_projection"] = towers[0].projection is not None
    model = build_model(config)
    state = {"head.log_scale": peer.logit_scale.detach().reshape(())}
    for tower, (matrix, bias) in zip(towers, maps, strict=True):
        last = (tower.projection, f"{tower.projection}.weight", f"{tower.projection}.bias")
        state |= {tower.to_ours(key): value for key, value in tower.state.items() if key not in last}
        state[f"head.{tower.view}_projection"] = matrix
        if head["bias"]:
            state[f"head.{tower.view}_bias"] = matrix.new_zeros(matrix.shape[1]) if bias is None else bias
    model.load_state_dict(state)
    if (bias := getattr(peer, "logit_bias", None)) is not None:
        config["pair"] = {"log_scale": 0.0, "bias": bias.item()}
    return model, config


def _configuration(name: str, peer: Any) -> dict[str, Any]:
    towers = {"name": name, "options": {}}
    encoder: dict[str, Any] = {
        "_target_": "clipzoo.encoders.towers.Towers", "name": name,
        "image": {"_target_": OPEN_IMAGE, **towers, "image_size": FACTS["image_size"]},
        "text": {"_target_": OPEN_TEXT, **towers, "context_length": FACTS["context_length"]},
        **FACTS,
    }  # fmt: skip
    # Those of the weights, which may differ from tag to tag.
    visual = peer.visual
    for key, value in (("mean", visual.image_mean), ("std", visual.image_std)):
        encoder |= {key: [float(number) for number in value]} if value else {}
    scale = math.exp(peer.logit_scale.item())
    head = {
        "_target_": "clipzoo.heads.vector.ClipHead", "image_width": FACTS["image_width"],
        "text_width": FACTS["text_width"], "embed_width": 1, "temperature": 0.07,
        "max_scale": max(100.0, scale), "learnable_temperature": True, "bias": False,
    }  # fmt: skip
    interpolation, mode = resizing(getattr(peer.visual, "preprocess_cfg", None) or {}, name)
    preprocessing = {"interpolation": interpolation, "resize_mode": mode}
    return {"seed": 0, "encoder": encoder | preprocessing, "head": head, "data": preprocessing}


# Towers that a name of open_clip describes, as the towers that are given by their sizes.


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
