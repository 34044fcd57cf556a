"""transformers' SiglipModel: its tensors, and its configuration as ours.

Its vision model is timm's vision transformer with attention pooling and no projection; its text model is open_clip's
text transformer without a causal mask, pooled at the last position, and a linear layer with bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipzoo.errors import ConfigError
from clipzoo.exports.open_clip import is_identity
from clipzoo.exports.ties import (
    Tie,
    Ties,
    activation,
    epsilon,
    inside,
    layers_of,
    open_clip_blocks,
    qkv,
    tensor_faults,
    tie,
    trunk_faults,
    with_kinds,
)
from clipzoo.exports.transformers_clip import TEXT, VISION, text_ties
from clipzoo.loading import LoadedModel

ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu"}
"""transformers' name -> timm's name."""
TIMM, WHOLE, OPEN_CLIP = "vit_base_patch16_siglip_224", "vit_so400m_patch14_siglip_384", "ViT-B-16-SigLIP"
"""Models whose sizes the options replace. WHOLE: for images whose side is no multiple of the patches."""
EPSILON = 1e-6
"""The epsilon of timm's layer norms."""


def ties(image_layers: int, text_layers: int) -> Ties:
    """Return the ties of our model with SiglipModel, all but scale and bias of the logits."""
    return [
        *inside("encoder.image_tower.trunk", vision_ties(image_layers)),
        *inside("encoder.text_tower.trunk", text_ties(text_layers)),
        tie("head.text_projection", f"{TEXT}.head.weight", transposed=True),
        tie("head.text_bias", f"{TEXT}.head.bias"),
    ]


def vision_ties(layers: int) -> Ties:
    """Return the ties of timm's VisionTransformer with SiglipVisionModel."""
    ties = [
        *with_kinds("patch_embed.proj", f"{VISION}.embeddings.patch_embedding"),
        tie("pos_embed", f"{VISION}.embeddings.position_embedding.weight", leading=True),
        *with_kinds("norm", f"{VISION}.post_layernorm"),
        tie("attn_pool.latent", f"{VISION}.head.probe"),
        *with_kinds("attn_pool.proj", f"{VISION}.head.attention.out_proj"),
        *with_kinds("attn_pool.norm", f"{VISION}.head.layernorm"),
        *with_kinds("attn_pool.mlp.fc1", f"{VISION}.head.mlp.fc1"),
        *with_kinds("attn_pool.mlp.fc2", f"{VISION}.head.mlp.fc2"),
    ]
    for kind in ("weight", "bias"):
        fused = f"{VISION}.head.attention.in_proj_{kind}"
        ties.append(Tie({f"attn_pool.q.{kind}": 1, f"attn_pool.kv.{kind}": 2}, {fused: 3}))
    for layer in range(layers):
        ours, theirs = f"blocks.{layer}", f"{VISION}.encoder.layers.{layer}"
        ties += [qkv(f"{ours}.attn.qkv.{kind}", f"{theirs}.self_attn", kind) for kind in ("weight", "bias")]
        ties += with_kinds(f"{ours}.attn.proj", f"{theirs}.self_attn.out_proj")
        ties += with_kinds(f"{ours}.norm1", f"{theirs}.layer_norm1")
        ties += with_kinds(f"{ours}.norm2", f"{theirs}.layer_norm2")
        ties += with_kinds(f"{ours}.mlp.fc1", f"{theirs}.mlp.fc1")
        ties += with_kinds(f"{ours}.mlp.fc2", f"{theirs}.mlp.fc2")
    return ties


def configuration(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nodes `encoder` and `head` of a SiglipModel. path: of its config.json, for messages.

    Raises:
        ConfigError: no encoder here can represent the model.
    """
    import transformers

    siglip: Any = transformers.SiglipConfig.from_dict(dict(content))
    vision, text = siglip.vision_config, siglip.text_config
    if not vision.vision_use_head:
        raise ConfigError(f"{path}: vision_config.vision_use_head is false: this model has no pooled image features")
    if vision.layer_norm_eps != EPSILON:
        raise ConfigError(f"{path}: vision_config.layer_norm_eps is {vision.layer_norm_eps}, not {EPSILON}")
    for name, part, known in (
        ("vision_config", vision, tuple(ACTIVATIONS)),
        ("text_config", text, ("gelu", "gelu_pytorch_tanh")),
    ):
        if part.hidden_act not in known:
            raise ConfigError(f"{path}: {name}.hidden_act {part.hidden_act} is not one of {', '.join(known)}")
    context, folder = text.max_position_embeddings, str(path.parent)
    encoder = {
        "_target_": "clipzoo.encoders.towers.Towers",
        "image_size": vision.image_size, "image_width": vision.hidden_size, "text_width": text.hidden_size,
        "context_length": context,
        "tokenizer": {
            "_target_": "clipzoo.encoders.huggingface.HuggingFaceTokenizer", "name": folder,
            "context_length": context,
        },
        "image": _image(vision), "text": _text(text),
    }  # fmt: skip
    head = {
        "_target_": "clipzoo.heads.vector.ClipHead", "image_width": vision.hidden_size, "text_width": text.hidden_size,
        "embed_width": vision.hidden_size, "temperature": 0.1, "max_scale": 1000.0, "learnable_temperature": True,
        "bias": True, "image_projection": False,
    }  # fmt: skip
    return {"encoder": encoder, "head": head}


def _image(vision: Any) -> dict[str, Any]:
    return {
        "_target_": "clipzoo.encoders.image.TimmTower",
        "name": WHOLE if vision.image_size % vision.patch_size else TIMM,
        "image_size": vision.image_size,
        "pretrained": False,
        "options": {
            "patch_size": vision.patch_size, "embed_dim": vision.hidden_size, "depth": vision.num_hidden_layers,
            "num_heads": vision.num_attention_heads, "mlp_ratio": _ratio(vision),
            "act_layer": ACTIVATIONS[vision.hidden_act],
        },
    }  # fmt: skip


def _text(text: Any) -> dict[str, Any]:
    tanh = text.hidden_act == "gelu_pytorch_tanh"
    return {
        "_target_": "clipzoo.encoders.open_clip.OpenClipText",
        "name": OPEN_CLIP,
        "context_length": text.max_position_embeddings,
        "options": {
            "vocab_size": text.vocab_size, "width": text.hidden_size, "heads": text.num_attention_heads,
            "layers": text.num_hidden_layers, "mlp_ratio": _ratio(text), "norm_kwargs": {"eps": text.layer_norm_eps},
            "act_kwargs": {"approximate": "tanh"} if tanh else None,
        },
    }  # fmt: skip


def _ratio(part: Any) -> float:
    """Return r such that int(r hidden_size) is intermediate_size."""
    width, inner = part.hidden_size, part.intermediate_size
    ratio: float = inner / width
    return ratio if int(ratio * width) == inner else (inner + 0.5) / width


# Our model as transformers' SiglipModel: timm's vision transformer with attention pooling, and SigLIP's text tower.


PROCESSOR = "SiglipProcessor"

__all__ = ["PROCESSOR", "config", "faults", "ties"]


def faults(model: LoadedModel) -> list[str]:
    """Return the reasons why SiglipModel cannot represent a model of two towers with a cosine head."""
    encoder: Any = model.encoder
    reasons = [
        *_image_faults(encoder.image_tower),
        *_text_faults(encoder.text_tower),
    ]
    if not is_identity(model, "image"):
        reasons.append("head.image_projection is not the identity: train with +head.image_projection=false")
    return reasons or tensor_faults(model, ties(*layers_of(model)))


def config(model: LoadedModel) -> dict[str, Any]:
    """Return the content of config.json."""
    encoder: Any = model.encoder
    image, text = encoder.image_tower.trunk, encoder.text_tower.trunk
    block = image.blocks[0]
    return {
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "vision_config": {
            "model_type": "siglip_vision_model", "image_size": encoder.image_size,
            "patch_size": image.patch_embed.patch_size[0], "hidden_size": encoder.image_width,
            "num_hidden_layers": len(image.blocks), "num_attention_heads": block.attn.num_heads,
            "intermediate_size": block.mlp.fc1.out_features, "hidden_act": activation(block.mlp.act),
            "layer_norm_eps": epsilon(image), "attention_dropout": 0.0,
        },
        "text_config": {
            "model_type": "siglip_text_model", "max_position_embeddings": len(text.positional_embedding),
            "vocab_size": len(text.token_embedding.weight), "hidden_size": encoder.text_width,
            **open_clip_blocks(text), "projection_size": encoder.image_width,
            **{f"{name}_token_id": None for name in ("bos", "eos", "pad")},
        },
    }  # fmt: skip


def _image_faults(tower: Any) -> list[str]:
    from timm.layers import AttentionPoolLatent
    from timm.models.vision_transformer import Block, VisionTransformer

    trunk = getattr(tower, "trunk", tower)
    if type(trunk) is not VisionTransformer or {type(block) for block in trunk.blocks} != {Block}:
        return [f"its image tower is {type(trunk).__name__}, not timm's VisionTransformer"]
    pool: Any = trunk.attn_pool
    block: Any = trunk.blocks[0]
    if not isinstance(pool, AttentionPoolLatent) or pool.latent_len != 1:
        return [f"its image tower pools by {trunk.global_pool}, not by attention with one query"]
    if {*trunk.patch_embed.patch_size} != {trunk.patch_embed.patch_size[0]} or pool.num_heads != block.attn.num_heads:
        return ["its image tower has oblong patches, or another number of heads in the pooling than in the blocks"]
    return trunk_faults("its image tower", trunk, block.mlp.act)


def _text_faults(tower: Any) -> list[str]:
    from open_clip.transformer import TextTransformer

    trunk = getattr(tower, "trunk", tower)
    if type(trunk) is not TextTransformer:
        return [f"its text tower is {type(trunk).__name__}, not open_clip's TextTransformer"]
    if trunk.attn_mask is not None or trunk.pool_type != "last" or trunk.cls_emb is not None:
        return ["its text tower is causal, or does not pool at the last position"]
    return trunk_faults("its text tower", trunk, trunk.transformer.resblocks[0].mlp.gelu)
