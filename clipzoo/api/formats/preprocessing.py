"""Preprocessing as files of transformers: the tokenizer, and the resize, crop and normalisation of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.api.loading import LoadedModel
from clipzoo.data.tokenizer import ClipTokenizer

ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&#x27;": "'", "&nbsp;": " "}
LIGATURES = {"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "ſt", "ﬆ": "st"}
CONTROLS = r"[\x00-\x08\x0b\x0e-\x1f\x7f\u206a-\u206f\ufeff\ufff9-\ufffc]"
SINGLE_QUOTES, DOUBLE_QUOTES = "[\u02bc\u2018-\u201b]", "[\u201c-\u201f]"


def write_tokenizer(tokenizer: ClipTokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which `transformers.AutoTokenizer` and tokenizers load.

    Ids and padding are those of `ClipTokenizer`. Text is cleaned by rules: named entities, curly quotes, ligatures and
    control characters. Repairing other broken encodings (ftfy) is left out: these files hold no code.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocabulary, merges, pattern = tokenizer.tables()
    start, end = (_text_of(vocabulary, token) for token in (tokenizer.start_token, tokenizer.end_token))
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, end_of_word_suffix="</w>"))
    replaced = [*ENTITIES.items(), ("&amp;", "&"), *ENTITIES.items(), *LIGATURES.items()]
    patterns = [(CONTROLS, ""), (SINGLE_QUOTES, "'"), (DOUBLE_QUOTES, '"'), (r"\s+", " ")]
    fast.normalizer = normalizers.Sequence(
        [
            *(normalizers.Replace(old, new) for old, new in replaced),
            normalizers.NFC(),
            *(normalizers.Replace(Regex(old), new) for old, new in patterns),
            normalizers.Strip(),
            normalizers.Lowercase(),
        ]
    )
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    # Control tokens are no added tokens: text that spells one is ordinary text.
    controls = [(start, tokenizer.start_token), (end, tokenizer.end_token)]
    fast.post_processor = processors.TemplateProcessing(single=f"{start} $A {end}", special_tokens=controls)
    fast.enable_truncation(tokenizer.context_length)
    pad = _text_of(vocabulary, 0)
    fast.enable_padding(pad_id=0, pad_token=pad, length=tokenizer.context_length)
    io.write_whole(folder / "tokenizer.json", fast.to_str())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": tokenizer.context_length,
        "bos_token": start, "eos_token": end, "unk_token": end, "pad_token": pad, "padding_side": "right",
        "split_special_tokens": True, "model_input_names": ["input_ids", "attention_mask"],
    }  # fmt: skip
    io.write_json(folder / "tokenizer_config.json", settings)


def _text_of(vocabulary: dict[str, int], token: int) -> str:
    """Return the text of a token's id."""
    return next(name for name, number in vocabulary.items() if number == token)


def image_settings(model: LoadedModel) -> dict[str, Any]:
    """Return the image processor of transformers with exactly the pixels of `LoadedModel.transform`.

    transformers' CLIPImageProcessor resizes tensors and rounds the central crop down; the one for timm's models uses
    torchvision's transforms of PIL images, as clipzoo and open_clip do.
    """
    size, encoder = model.encoder.image_size, model.config["encoder"]
    transform = {
        "input_size": [3, size, size], "interpolation": model.transform.interpolation, "crop_pct": 1.0,
        "crop_mode": "center", "mean": list(encoder["mean"]), "std": list(encoder["std"]),
    }  # fmt: skip
    return {"image_processor_type": "TimmWrapperImageProcessor", "pretrained_cfg": transform}


def write_preprocessing(model: LoadedModel, folder: Path, processor: str | None = None) -> None:
    """Write the tokenizer's files and preprocessor_config.json. processor: class of transformers that joins both."""
    write_tokenizer(model.tokenizer, folder)  # type: ignore[arg-type]
    named = {} if processor is None else {"processor_class": processor}
    io.write_json(folder / "preprocessor_config.json", {**named, **image_settings(model)})


def tokenizer_faults(model: LoadedModel) -> list[str]:
    """Return the reason why the tokenizer cannot be written."""
    if isinstance(model.tokenizer, ClipTokenizer):
        return []
    return [f"its tokenizer is {type(model.tokenizer).__name__}, only ClipTokenizer can be written"]
