"""Small models of open_clip, one for each family of its registry, as folders that open_clip loads."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import open_clip
import torch

SMALL_VIT = {"width": 64, "layers": 2, "head_width": 32, "image_size": 32, "patch_size": 8}
SMALL_TEXT = {"width": 32, "heads": 2, "layers": 2}
HUGGING_FACE = {
    "roberta-base": {"model_type": "roberta", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                     "intermediate_size": 64, "vocab_size": 100, "pad_token_id": 1, "max_position_embeddings": 100},
    "xlm-roberta-base": {"model_type": "xlm-roberta", "hidden_size": 32, "num_hidden_layers": 2,
                         "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100, "pad_token_id": 1,
                         "max_position_embeddings": 100},
    "xlm-roberta-large": {"model_type": "xlm-roberta", "hidden_size": 1024, "num_hidden_layers": 24,
                          "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 250002, "pad_token_id": 1,
                          "max_position_embeddings": 514},
    "google/mt5-xl": {"model_type": "mt5", "d_model": 2048, "num_layers": 24, "num_heads": 32, "d_kv": 64, "d_ff": 5120,
                      "vocab_size": 250112, "pad_token_id": 0},
    "facebook/nllb-200-distilled-1.3B": {"model_type": "m2m_100", "d_model": 1024, "encoder_layers": 24,
                                         "decoder_layers": 24, "encoder_ffn_dim": 8192, "decoder_ffn_dim": 8192,
                                         "vocab_size": 256206, "pad_token_id": 1},
    "google/mt5-base": {"model_type": "mt5", "d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 64,
                        "vocab_size": 100, "pad_token_id": 0},
    "facebook/nllb-200-distilled-600M": {"model_type": "m2m_100", "d_model": 32, "encoder_layers": 2,
                                         "decoder_layers": 1, "encoder_attention_heads": 2,
                                         "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
                                         "vocab_size": 100, "pad_token_id": 1},
}  # fmt: skip
"""Name on the hub -> a configuration of the same kind; small where a family is made small."""
FAMILIES: dict[str, dict[str, Any]] = {
    "ViT-B-32": SMALL_VIT,
    "ViT-B-32-quickgelu": SMALL_VIT,
    "ViT-M-32-alt": SMALL_VIT,
    "ViT-L-14-CLIPA": SMALL_VIT,
    "ViT-L-14-worldwide": SMALL_VIT,
    "RN50": {"layers": [1, 1, 1, 1], "width": 8, "head_width": 32, "image_size": 64},
    "coca_base": SMALL_VIT,
    "coca_ViT-B-32": {**SMALL_VIT, "attn_pooler_heads": 2, "attn_pooler_queries": 6},
    "coca_roberta-ViT-B-32": SMALL_VIT,
    "roberta-ViT-B-32": SMALL_VIT,
    "xlm-roberta-base-ViT-B-32": SMALL_VIT,
    "mt5-base-ViT-B-32": SMALL_VIT,
    "nllb-clip-base": SMALL_VIT,
    "ViT-B-16-SigLIP": {"timm_model_name": "test_vit", "image_size": 160},
    "ViT-B-16-SigLIP2": {"timm_model_name": "test_vit", "image_size": 160},
    "ViT-SO400M-16-SigLIP-i18n-256": {"timm_model_name": "test_vit", "image_size": 160},
    "convnext_tiny": {"timm_model_name": "test_convnext", "image_size": 64},
    "convnext_large_d": {"timm_model_name": "test_convnext", "image_size": 64},
    "swin_base_patch4_window7_224": {"timm_model_name": "swin_tiny_patch4_window7_224", "image_size": 224},
    "vit_medium_patch16_gap_256": {"timm_model_name": "test_vit", "image_size": 160},
    "vit_relpos_medium_patch16_cls_224": {"timm_model_name": "vit_relpos_small_patch16_224", "image_size": 224},
    "EVA02-B-16": {"timm_model_name": "eva02_tiny_patch14_224", "image_size": 224},
    "MobileCLIP-B": {"timm_model_name": "test_vit", "image_size": 160},
    "MobileCLIP2-S0": {"timm_model_name": "fastvit_t8", "image_size": 64},
    "PE-Core-T-16-384": {"timm_model_name": "vit_pe_core_tiny_patch16_384", "image_size": 384},
    "ViTamin-S": {"timm_model_name": "vitamin_small_224", "image_size": 224},
}
"""Family -> its image tower, made small."""
LARGE = (
    "ViTamin-S",
    "swin_base_patch4_window7_224",
    "PE-Core-T-16-384",
    "vit_relpos_medium_patch16_cls_224",
    "EVA02-B-16",
)
"""Families of which timm has no small model."""
END = {"argmax": 199, "eos": 2}


def write_hugging_face_config(name: str, folder: Path) -> str:
    """Write the configuration of a name on the hub; return its folder."""
    place = folder / name.replace("/", "-")
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(HUGGING_FACE[name]))
    return str(place)


def small_model(family: str, folder: Path) -> tuple[str, Any]:
    """Return the name of a small model of a family and open_clip's model with random weights, in float32.

    All parameters and running statistics are random, so that a tensor in the wrong place changes the features.
    """
    described = deepcopy(open_clip.get_model_config(family))
    described["vision_cfg"] |= FAMILIES[family]
    text = described["text_cfg"]
    if "hf_model_name" in text:
        text["hf_model_name"] = write_hugging_face_config(text["hf_model_name"], folder)
    else:
        text |= {**SMALL_TEXT, "vocab_size": 200}
        text["width"] = 64 if text.get("proj_type") == "none" else text["width"]
    if "multimodal_cfg" in described:
        described["multimodal_cfg"] |= {"width": 32, "heads": 2, "layers": 1}
    described["embed_dim"] = 64 if described["vision_cfg"].get("timm_proj") == "none" else 48
    place = folder / "model"
    place.mkdir(parents=True)
    preprocessing = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.25, 0.3]}
    (place / "open_clip_config.json").write_text(json.dumps({"model_cfg": described, "preprocess_cfg": preprocessing}))
    torch.manual_seed(0)
    name = f"local-dir:{place}"
    peer = open_clip.create_model(name, load_weights=False, pretrained_text=False).eval()
    with torch.no_grad():
        for tensor in peer.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.05 * torch.rand_like(tensor))
    return name, peer


def captions_of(peer: Any, rows: int = 4) -> torch.Tensor:
    """Return ids of captions of different lengths, as the model's tokenizer would write them."""
    tower = getattr(peer, "text", peer)
    pool = getattr(tower, "pool_type", getattr(tower, "text_pool_type", None))
    config = getattr(tower, "config", None)
    length = getattr(tower, "context_length", 20) if config is None else 20
    padding = 0 if config is None else config.pad_token_id
    random = torch.Generator().manual_seed(1)
    ids = torch.full((rows, length), padding)
    for row in range(rows):
        count = 3 + 2 * row
        ids[row, :count] = torch.randint(3, 90, (count,), generator=random)
        ids[row, count] = 2 if config is not None else END.get(pool, 1) if pool != "eos" else peer_end(peer)
    return ids


def peer_end(peer: Any) -> int:
    tower = getattr(peer, "text", peer)
    return getattr(tower, "eos_id", None) or tower.text_eos_id
