"""Tokenizers as tokenizer.json and tokenizer_config.json, which `transformers.AutoTokenizer` and tokenizers load.

Ids and padding are those of clipzoo's tokenizers. Text is cleaned by rules: named entities, curly quotes, ligatures and
control characters. Repairing other broken encodings (ftfy) is left out: these files hold no code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from clipzoo import io
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.encoders.huggingface import HuggingFaceTokenizer
from clipzoo.errors import ConfigError
from clipzoo.loading import LoadedModel

ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&#x27;": "'", "&nbsp;": " "}
LIGATURES = {"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "ſt", "ﬆ": "st"}
CONTROLS = r"[\x00-\x08\x0b\x0e-\x1f\x7f\u206a-\u206f\ufeff\ufff9-\ufffc]"
SINGLE_QUOTES, DOUBLE_QUOTES = "[\u02bc\u2018-\u201b]", "[\u201c-\u201f]"
PUNCTUATION = r"[!-/:-@\[-^`{-~]"
"""ASCII punctuation except the underscore, which becomes a space."""
PROBE = [
    "", "a red circle", "Two BLUE squares! above_a (green) triangle.", "it's 12 o'clock  \t in\nParis", "naïve café",
    "“quoted” &amp; ‘curly’ &lt;b&gt;", "東京 🎉", "! ?", "<s> </s> <pad> [SEP] <eos>", "long " * 600,
]  # fmt: skip
"""Captions on which a tokenizer of the hub is compared with its files."""


def tokenizer_files(tokenizer: Any) -> tuple[Any, dict[str, Any]]:
    """Return a fast tokenizer and its tokenizer_config.json. Raises ConfigError if these cannot represent it."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    kind, length = type(tokenizer), tokenizer.context_length
    if kind is ClipTokenizer:
        vocabulary, merges, pattern = tokenizer.tables()
        texts = {token: text for text, token in vocabulary.items()}
        pad, start, end = 0, texts[tokenizer.start_token], texts[tokenizer.end_token]
        fast = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, end_of_word_suffix="</w>"))
        fast.normalizer = normalizers.Sequence(_cleaning("lower"))
        words = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
        fast.decoder = decoders.ByteLevel()
        # Control tokens are not added tokens, so that text that spells one is ordinary text.
        controls = [(start, tokenizer.start_token), (end, tokenizer.end_token)]
        fast.post_processor = processors.TemplateProcessing(single=f"{start} $A {end}", special_tokens=controls)
        names = {"bos_token": start, "eos_token": end, "unk_token": end, "pad_token": texts[0]}
    elif kind is HuggingFaceTokenizer:
        source, pad = tokenizer.source, tokenizer.pad_token
        tokenizer_text = f"its tokenizer, {type(source).__name__} of {tokenizer.name},"
        if not source.is_fast:
            raise ConfigError(f"{tokenizer_text} runs in Python and has no tokenizer.json")
        if tokenizer.strip_end or not tokenizer.ends_itself:
            raise ConfigError(f"{tokenizer_text} ends captions in a way that tokenizer.json cannot represent")
        content = json.loads(source.backend_tokenizer.to_str())
        # Added special tokens would be recognised in text. The post-processor and the model keep their ids.
        vocabulary = content["model"]["vocab"]
        in_model = set(vocabulary) if isinstance(vocabulary, dict) else {text for text, _ in vocabulary}
        tokens = content["added_tokens"]
        content["added_tokens"] = [token for token in tokens if not (token["special"] and token["content"] in in_model)]
        fast = Tokenizer.from_str(json.dumps(content))
        if cleaning := _cleaning(tokenizer.clean):
            fast.normalizer = normalizers.Sequence([*cleaning, *filter(None, [fast.normalizer])])
        roles = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token")
        names = {name: text for name in roles if (text := getattr(source, name))}
    else:
        raise ConfigError(
            f"its tokenizer is {kind.__name__}, only ClipTokenizer and HuggingFaceTokenizer can be written"
        )
    fast.enable_truncation(length)
    fast.enable_padding(pad_id=pad, pad_token=fast.id_to_token(pad), length=length)
    if kind is HuggingFaceTokenizer and [one.ids for one in fast.encode_batch(PROBE)] != tokenizer(PROBE).tolist():
        raise ConfigError(f"{tokenizer_text} gives other tokens than its tokenizer.json would")
    return fast, {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "padding_side": "right",
        "split_special_tokens": True, **names,
    }  # fmt: skip


def _cleaning(kind: str) -> list[Any]:
    """Return the normalizers that clean text as open_clip does. kind: see `HuggingFaceTokenizer`."""
    from tokenizers import Regex, normalizers

    if kind == "none":
        return []
    replaced = [*ENTITIES.items(), ("&amp;", "&"), *ENTITIES.items(), *LIGATURES.items()]
    patterns = [(CONTROLS, ""), (SINGLE_QUOTES, "'"), (DOUBLE_QUOTES, '"')]
    if kind == "canonicalize":
        patterns += [("_", " "), (PUNCTUATION, "")]
    return [
        *(normalizers.Replace(old, new) for old, new in replaced),
        normalizers.NFC(),
        *(normalizers.Replace(Regex(old), new) for old, new in [*patterns, (r"\s+", " ")]),
        normalizers.Strip(),
        *([] if kind == "whitespace" else [normalizers.Lowercase()]),
    ]


def image_settings(model: LoadedModel) -> dict[str, Any]:
    """Return the image processor of transformers with exactly the pixels of `LoadedModel.transform`.

    That for timm's models: CLIPImageProcessor resizes tensors, not PIL images, and rounds the central crop down.
    """
    size, encoder = model.encoder.image_size, model.config["encoder"]
    mode = {"shortest": "center", "squash": "squash"}.get(model.transform.resize_mode)
    if mode is None:
        raise ConfigError(f"transformers has no resize_mode={model.transform.resize_mode}: export to another format")
    transform = {
        "input_size": [3, size, size], "interpolation": model.transform.interpolation, "crop_pct": 1.0,
        "crop_mode": mode, "mean": list(encoder["mean"]), "std": list(encoder["std"]),
    }  # fmt: skip
    return {"image_processor_type": "TimmWrapperImageProcessor", "pretrained_cfg": transform}


def write_preprocessing(model: LoadedModel, folder: Path, processor: str | None = None) -> None:
    """Write the tokenizer's files and preprocessor_config.json. processor: class of transformers that joins both."""
    fast, settings = tokenizer_files(model.tokenizer)
    # A text tower that attends to padding takes no mask.
    settings["model_input_names"] = ["input_ids"] if model.encoder.needs_padding else ["input_ids", "attention_mask"]
    io.write_whole(folder / "tokenizer.json", fast.to_str())
    io.write_json(folder / "tokenizer_config.json", settings)
    processor_entry = {} if processor is None else {"processor_class": processor}
    io.write_json(folder / "preprocessor_config.json", {**processor_entry, **image_settings(model)})


def tokenizer_faults(model: LoadedModel) -> list[str]:
    """Return the reason why the tokenizer cannot be written."""
    try:
        tokenizer_files(model.tokenizer)
    except ConfigError as error:
        return [str(error)]
    return []


def save_weights(state: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a .safetensors file, which never holds code, atomically. Raises WriteError."""
    from safetensors.torch import save

    # transformers reads only files that name the framework.
    content = save({key: value.detach().cpu().contiguous() for key, value in state.items()}, {"format": "pt"})
    with io.whole(path) as file:
        file.write(content)
