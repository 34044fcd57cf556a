"""Our model as transformers' CLIPModel: open_clip's vision transformer and causal text transformer."""

from __future__ import annotations

from typing import Any

from clipzoo.api.formats.trunks import open_clip_blocks, tensor_faults, trunk_faults
from clipzoo.api.loading import LoadedModel
from clipzoo.api.transformers.clip import ties
from clipzoo.api.transformers.ties import layers_of
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.encoders.open_clip import OpenClipText
from clipzoo.encoders.text import ClipTextTower

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
