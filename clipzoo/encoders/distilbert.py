"""DistilBERT as a text tower, with its tokenizer: NUCLR's text encoder. Needs the extra `hf`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from clipzoo.encoders.base import Tower
from clipzoo.encoders.huggingface import pretrained_model
from clipzoo.encoders.text import end_positions
from clipzoo.errors import ConfigError, installation
from clipzoo.io.weights import from_hub
from clipzoo.types import Features, NonNegativeCount, Part, Range, as_captions

NOWHERE = "is not a folder, and cannot be loaded from the Hugging Face hub"


class DistilBertTower(Tower):
    """Token ids [b, L] -> Features: pooled at the first token ([CLS]); padding is not attended to.

    pretrained: a name on the Hugging Face hub or a folder; null for random weights of the base model's shape.
    end_token: id of the separator; positions after its first occurrence are padding.
    """

    trunk: Any

    def __init__(self, pretrained: str | None, end_token: NonNegativeCount) -> None:
        super().__init__()
        transformers = _transformers("encoder.text_tower")
        if pretrained is None:
            self.trunk = transformers.DistilBertModel(transformers.DistilBertConfig())
        else:
            key = "encoder.text_tower.pretrained"
            with from_hub(
                pretrained, f"{key}={pretrained} is not a folder, and cannot be loaded from the Hugging Face hub"
            ):
                self.trunk, _ = pretrained_model("DistilBertModel", pretrained)
        self.width = self.trunk.config.dim
        self.end_token = end_token

    def forward(self, text: Tensor) -> Features:
        positions = torch.arange(text.shape[1], device=text.device)
        mask = positions <= end_positions(text, self.end_token)[:, None]  # [b, L]
        tokens = self.trunk(input_ids=text.where(mask, 0), attention_mask=mask.long()).last_hidden_state
        return Features(tokens[:, 0], tokens, mask)

    def layers(self) -> list[nn.Module]:
        return list(self.trunk.transformer.layer)


class DistilBertTokenizer(Part):
    """Captions -> [n, context_length] int64, [CLS] words [SEP], padded with 0; truncated captions keep their [SEP].

    Control tokens in a caption, such as "[SEP]", are plain text.
    name: a name on the hub, or a folder; loaded on first use.
    context_length: maximum number of tokens L of a caption.
    """

    end_token = 102

    def __init__(self, name: str, context_length: Annotated[int, Range(at_least=3, at_most=512)]) -> None:
        self.context_length = context_length
        self._name = name
        self._tokenizer: Any = None

    def pieces(self, ids: list[int]) -> list[str]:
        """Return the text of each token."""
        return [self._source().decode([token]) for token in ids]

    def __call__(self, captions: str | Sequence[str]) -> Tensor:
        captions = as_captions(captions)
        length = self.context_length
        tokens = self._source()(captions, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        return tokens["input_ids"]

    def _source(self) -> Any:
        if self._tokenizer is None:
            kind = _transformers("encoder.tokenizer").AutoTokenizer
            with from_hub(self._name, f"encoder.tokenizer.name={self._name} {NOWHERE}"):
                self._tokenizer = kind.from_pretrained(self._name, split_special_tokens=True, trust_remote_code=False)
        return self._tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self._name, "context_length": self.context_length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _transformers(key: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"{key} is DistilBERT, which needs transformers: {installation('hf')}") from None
    return transformers
