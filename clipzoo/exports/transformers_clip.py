"""transformers' CLIPModel: its tensors, and its configuration as ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.encoders.open_clip import OpenClipText
from clipzoo.encoders.text import ClipTextTower
from clipzoo.errors import ConfigError
from clipzoo.exports.ties import (
    Tie,
    Ties,
    inside,
    layers_of,
    open_clip_blocks,
    qkv,
    tensor_faults,
    tie,
    trunk_faults,
    with_kinds,
)
from clipzoo.loading import LoadedModel

ACTIVATIONS = {True: "quick_gelu", False: "gelu"}
VISION, TEXT = "vision_model", "text_model"


def ties(image_layers: int, text_layers: int) -> Ties:
    """Return the ties of our model with CLIPModel, all but the scale."""
    return [
        *inside("encoder.image_tower.trunk", vision_ties(image_layers)),
        *inside("encoder.text_tower.trunk", text_ties(text_layers)),
        tie("head.image_projection", "visual_projection.weight", transposed=True),
        tie("head.text_projection", "text_projection.weight", transposed=True),
    ]


def vision_ties(layers: int) -> Ties:
    """Return the ties of open_clip's VisionTransformer with CLIPVisionModel."""
    return [
        tie("class_embedding", f"{VISION}.embeddings.class_embedding"),
        tie("conv1.weight", f"{VISION}.embeddings.patch_embedding.weight"),
        tie("positional_embedding", f"{VISION}.embeddings.position_embedding.weight"),
        *with_kinds("ln_pre", f"{VISION}.pre_layrnorm"),
        *with_kinds("ln_post", f"{VISION}.post_layernorm"),
        *block_ties(VISION, layers),
    ]


def text_ties(layers: int) -> Ties:
    """Return the ties of open_clip's TextTransformer with CLIPTextModel and SiglipTextModel."""
    return [
        tie("token_embedding.weight", f"{TEXT}.embeddings.token_embedding.weight"),
        tie("positional_embedding", f"{TEXT}.embeddings.position_embedding.weight"),
        *with_kinds("ln_final", f"{TEXT}.final_layer_norm"),
        *block_ties(TEXT, layers),
    ]


def block_ties(side: str, layers: int) -> Iterator[Tie]:
    """Yield the ties of open_clip's residual attention blocks."""
    for layer in range(layers):
        ours, theirs = f"transformer.resblocks.{layer}", f"{side}.encoder.layers.{layer}"
        for kind in ("weight", "bias"):
            yield qkv(f"{ours}.attn.in_proj_{kind}", f"{theirs}.self_attn", kind)
        yield from with_kinds(f"{ours}.attn.out_proj", f"{theirs}.self_attn.out_proj")
        yield from with_kinds(f"{ours}.ln_1", f"{theirs}.layer_norm1")
        yield from with_kinds(f"{ours}.ln_2", f"{theirs}.layer_norm2")
        yield from with_kinds(f"{ours}.mlp.c_fc", f"{theirs}.mlp.fc1")
        yield from with_kinds(f"{ours}.mlp.c_proj", f"{theirs}.mlp.fc2")


def configuration(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nodes `encoder` and `head` of a CLIPModel. path: of its config.json, for messages.

    Raises:
        ConfigError: no encoder here can represent the model.
    """
    import transformers

    clip: Any = transformers.CLIPConfig.from_dict(dict(content))
    vision, text = clip.vision_config, clip.text_config
    for name, part in (("vision_config", vision), ("text_config", text)):
        if part.hidden_act not in ACTIVATIONS.values():
            raise ConfigError(f"{path}: {name}.hidden_act {part.hidden_act} is neither gelu nor quick_gelu")
        if part.intermediate_size != 4 * part.hidden_size:
            raise ConfigError(f"{path}: {name}.intermediate_size is not 4 hidden_size, as our towers have")
    if vision.layer_norm_eps != 1e-5:
        raise ConfigError(f"{path}: vision_config.layer_norm_eps is {vision.layer_norm_eps}, not 1e-5")
    context = text.max_position_embeddings
    encoder = {
        "_target_": "clipzoo.encoders.towers.TwoTowers",
        "image_size": vision.image_size, "image_width": vision.hidden_size, "text_width": text.hidden_size,
        "context_length": context,
        "tokenizer": {"_target_": "clipzoo.data.tokenizer.ClipTokenizer", "context_length": context},
        "image_tower": {
            "_target_": "clipzoo.encoders.image.ClipViT", "image_size": vision.image_size,
            "patch_size": vision.patch_size, "width": vision.hidden_size, "layers": vision.num_hidden_layers,
            "heads": vision.num_attention_heads, "quick_gelu": vision.hidden_act == "quick_gelu",
        },
        "text_tower": {
            "_target_": "clipzoo.encoders.text.ClipTextTower", "context_length": context,
            "vocabulary": text.vocab_size, "width": text.hidden_size, "layers": text.num_hidden_layers,
            "heads": text.num_attention_heads, "quick_gelu": text.hidden_act == "quick_gelu", "distinct_pads": False,
            "end_token": ClipTokenizer.end_token, "norm_eps": text.layer_norm_eps,
        },
    }  # fmt: skip
    head = {
        "_target_": "clipzoo.heads.vector.ClipHead", "image_width": vision.hidden_size, "text_width": text.hidden_size,
        "embed_width": clip.projection_dim, "temperature": 0.07, "max_scale": 100.0, "learnable_temperature": True,
    }  # fmt: skip
    return {"encoder": encoder, "head": head}


# Our model as transformers' CLIPModel: open_clip's vision transformer and causal text transformer.


PROCESSOR = "CLIPProcessor"

__all__ = ["PROCESSOR", "config", "faults", "ties"]


def faults(model: LoadedModel) -> list[str]:
    """Return the reasons why CLIPModel cannot represent a model of two towers with a cosine head."""
    encoder: Any = model.encoder
    reasons = [*_image_faults(encoder.image_tower), *_text_faults(encoder.text_tower)]
    if any(getattr(model.head, f"{view}_bias", None) is not None for view in ("image", "text")):
        reasons.append("head.bias is true")
    return reasons or tensor_faults(model, ties(*layers_of(model)))


def config(model: LoadedModel) -> dict[str, Any]:
    """Return the content of config.json."""
    encoder: Any = model.encoder
    image, text = encoder.image_tower.trunk, encoder.text_tower.trunk
    end, vocabulary = encoder.text_tower.end_token, len(text.token_embedding.weight)
    projected = {"projection_dim": model.head.get_parameter("image_projection").shape[1]}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        **projected,
        "vision_config": {
            "model_type": "clip_vision_model", "image_size": encoder.image_size,
            "patch_size": image.conv1.kernel_size[0], "hidden_size": encoder.image_width, **open_clip_blocks(image),
            **projected,
        },
        "text_config": {
            "model_type": "clip_text_model", "max_position_embeddings": len(text.positional_embedding),
            "vocab_size": vocabulary, "hidden_size": encoder.text_width,
            **open_clip_blocks(text), "bos_token_id": ClipTokenizer.start_token,
            # CLIPModel pools at the largest id if this is 2.
            "eos_token_id": end if end < vocabulary else 2, "pad_token_id": 0, **projected,
        },
    }  # fmt: skip


def _image_faults(tower: Any) -> list[str]:
    from open_clip.transformer import VisionTransformer

    trunk = getattr(tower, "trunk", tower)
    if type(trunk) is not VisionTransformer:
        return [f"its image tower is {type(trunk).__name__}, not open_clip's VisionTransformer"]
    if trunk.attn_pool is not None:
        return ["its image tower pools by attention"]
    if trunk.pool_type != "tok":
        return [f"its image tower pools by {trunk.pool_type}, not at the class token"]
    return trunk_faults("its image tower", trunk, trunk.transformer.resblocks[0].mlp.gelu)


def _text_faults(tower: Any) -> list[str]:
    from open_clip.transformer import TextTransformer

    trunk = getattr(tower, "trunk", tower)
    if not isinstance(tower, ClipTextTower | OpenClipText) or type(trunk) is not TextTransformer:
        return [f"its text tower is {type(trunk).__name__}, not open_clip's causal TextTransformer"]
    if isinstance(tower, ClipTextTower) and tower.first_pad is not None:
        return ["encoder.text_tower.distinct_pads is true"]
    if tower.end_token is None or isinstance(tower, OpenClipText) and tower.needs_padding:
        return ["its text tower is not causal, or does not pool at the end of text"]
    return trunk_faults("its text tower", trunk, trunk.transformer.resblocks[0].mlp.gelu)
