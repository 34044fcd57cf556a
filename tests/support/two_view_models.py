"""Small models of transformers with random weights that embed images and text, as folders."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch

KINDS = (
    "align", "altclip", "chinese_clip", "metaclip_2", "vision-text-dual-encoder", "aimv2", "clip_with_wide_layers",
    "clip_with_resize", "siglip_with_other_epsilon", "siglip_2",
)  # fmt: skip
WORDS = ("a", "red", "green", "blue", "circle", "square", "squares", "very", "two", "number", *map(str, range(10)))
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def write_words(folder: Path, kind: str, length: int) -> int:
    """Write a tokenizer of whole words with the control tokens of BERT or RoBERTa; return its number of tokens."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    is_bert = kind == "bert"
    pad, start, end, unknown = ("[PAD]", "[CLS]", "[SEP]", "[UNK]") if is_bert else ("<pad>", "<s>", "</s>", "<unk>")
    controls = [pad, unknown, start, end] if is_bert else [start, pad, end, unknown]
    words = [*controls, *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, words.index(start)), (end, words.index(end))]
    )
    roles = {"cls_token": start, "sep_token": end} if is_bert else {"bos_token": start, "eos_token": end}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, unk_token=unknown, model_max_length=length, **roles
    ).save_pretrained(folder)
    return len(words)


def write_gemma(folder: Path, length: int) -> int:
    """Write a tokenizer of letters in the classes of Gemma's, as those of SigLIP 2; return its number of tokens."""
    import transformers

    texts = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\u2581", *string.ascii_letters, *string.digits]
    transformers.GemmaTokenizer(
        vocab={text: index for index, text in enumerate(texts)}, merges=[], add_bos_token=False, add_eos_token=True,
        padding_side="right", model_max_length=length,
    ).save_pretrained(folder)  # fmt: skip
    return len(texts)


def write_two_view_model(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Write the model of a kind, its tokenizer and its image processor; return it."""
    import transformers as t

    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    roberta = {**SMALL, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    processor = t.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    count = write_words(
        folder, "bert" if kind in ("align", "chinese_clip", "vision-text-dual-encoder") else "roberta", 16
    )
    match kind:
        case "align":
            processor = t.EfficientNetImageProcessor(
                size={"height": 46, "width": 46}, crop_size={"height": 39, "width": 39}, do_center_crop=True,
                rescale_factor=1 / 127.5, rescale_offset=True, do_normalize=False, include_top=False, resample=2,
            )  # fmt: skip
            config = t.AlignConfig(
                text_config={**SMALL, "vocab_size": count}, projection_dim=32, temperature_init_value=0.05,
                vision_config={"image_size": 60, "width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 48},
            )  # fmt: skip
        case "altclip":
            config = t.AltCLIPConfig(
                text_config={**roberta, "vocab_size": count, "project_dim": 24, "max_position_embeddings": 18},
                vision_config=vision, projection_dim=16,
            )  # fmt: skip
        case "chinese_clip":
            config = t.ChineseCLIPConfig(
                text_config={**SMALL, "vocab_size": count}, vision_config=vision, projection_dim=16
            )
        case "metaclip_2":
            config = t.MetaClip2Config(
                text_config={**roberta, "vocab_size": count, "max_position_embeddings": 16}, vision_config=vision,
                projection_dim=16,
            )  # fmt: skip
        case "vision-text-dual-encoder":
            config = t.VisionTextDualEncoderConfig(
                vision_config=t.ViTConfig(**vision).to_dict(), projection_dim=16,
                text_config=t.BertConfig(**SMALL, vocab_size=count).to_dict(),
            )  # fmt: skip
        case "aimv2":
            config = t.Aimv2Config(
                text_config={**SMALL, "vocab_size": count, "max_position_embeddings": 16, "eos_token_id": 2},
                vision_config=vision, projection_dim=16,
            )  # fmt: skip
        case "clip_with_wide_layers" | "clip_with_resize":
            wide = {} if kind == "clip_with_wide_layers" else {"intermediate_size": 128}
            config = t.CLIPConfig(
                text_config={**roberta, **wide, "vocab_size": count, "max_position_embeddings": 16},
                vision_config={**vision, **wide}, projection_dim=16,
            )  # fmt: skip
            if not wide:
                processor = t.CLIPImageProcessor(size={"shortest_edge": 38}, crop_size={"height": 32, "width": 32})
        case "siglip_with_other_epsilon" | "siglip_2":
            own = {} if kind == "siglip_2" else {"layer_norm_eps": 1e-5}
            if own == {}:
                count = write_gemma(folder, 16)
            config = t.SiglipConfig(
                text_config={**roberta, "vocab_size": count, "max_position_embeddings": 16, "projection_size": 32},
                vision_config={**vision, **own},
            )  # fmt: skip
            processor = t.SiglipImageProcessor(size={"height": 32, "width": 32})
    torch.manual_seed(0)
    model: Any = t.AutoModel.from_config(config, trust_remote_code=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    processor.save_pretrained(folder)
    return model
