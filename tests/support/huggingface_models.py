"""A small BERT with a tokenizer of its own, as a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path

import torch

WORDS = ("a", "red", "green", "blue", "picture", "number", ",", *map(str, range(10)))


def write_bert(folder: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    controls = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=controls)
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    whole.save_pretrained(folder)
    settings = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=len(words),
        max_position_embeddings=24,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertModel(settings, add_pooling_layer=False).save_pretrained(folder)
