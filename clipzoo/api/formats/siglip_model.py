"""Our model as transformers' SiglipModel: timm's vision transformer with attention pooling, and SigLIP's text tower."""

from __future__ import annotations

from typing import Any

from clipzoo.api.formats.open_clip import is_identity
from clipzoo.api.formats.trunks import activation, epsilon, open_clip_blocks, tensor_faults, trunk_faults
from clipzoo.api.loading import LoadedModel
from clipzoo.api.transformers.siglip import ties
from clipzoo.api.transformers.ties import layers_of

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
