"""Small SigLIP models of transformers, and a tokenizer for them, as folders."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import open_clip
import torch

WORDS = ("▁a", "▁red", "▁circle", "very", "square", "▁")
CONTEXT = 16


def write_tokenizer(folder: Path) -> None:
    """Write a unigram tokenizer as T5's and SigLIP's are, with an end token and no start token."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    letters = [character for character in string.printable if not character.isspace()]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((piece, -4.0) for piece in WORDS)]
    fast = Tokenizer(models.Unigram([*pieces, *((letter, -9.0) for letter in letters)], unk_id=2))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="</s>", pad_token="</s>", unk_token="<unk>", model_max_length=CONTEXT
    ).save_pretrained(folder)


def write_siglip(folder: Path, **vision: Any) -> Any:
    """Write a SiglipModel with random weights, scale and bias, its tokenizer and its image processor; return it.

    vision: of its vision_config, in place of the small ones.
    """
    import transformers

    config = transformers.SiglipConfig(
        vision_config={"image_size": 32, "patch_size": 8, "hidden_size": 48, "intermediate_size": 100,
                       "num_hidden_layers": 2, "num_attention_heads": 3, **vision},
        text_config={"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                     "vocab_size": 110, "max_position_embeddings": CONTEXT, "projection_size": 48},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.SiglipModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        model.logit_scale.fill_(2.5)
        model.logit_bias.fill_(-12.9)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    size = {"height": config.vision_config.image_size, "width": config.vision_config.image_size}
    transformers.SiglipImageProcessor(size=size).save_pretrained(folder)
    return model


def write_open_clip_siglip(family: str, folder: Path) -> tuple[str, Any]:
    """Write the description of a model of open_clip with a small text tower, and a tokenizer for it.

    Returns:
        Its name and open_clip's model with random weights and a bias that is no default.
    """
    described = open_clip.get_model_config(family)
    described["text_cfg"] |= {"context_length": CONTEXT, "vocab_size": 110, "layers": 1}
    folder.mkdir()
    preprocessing = {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": described, "preprocess_cfg": preprocessing}))
    write_tokenizer(folder)
    torch.manual_seed(0)
    peer = open_clip.create_model(f"local-dir:{folder}", load_weights=False).eval()
    with torch.no_grad():
        peer.logit_bias.fill_(-7.3)
    return f"local-dir:{folder}", peer
