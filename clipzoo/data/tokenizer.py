"""Captions to token ids, with CLIP's byte-pair vocabulary."""

from __future__ import annotations

import re
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_PLAIN = re.compile(r"[ -%'-~\t\n]*")
_CACHED_WORDS = 100_000


class Tokenizer(Protocol):
    """What the data layer asks of a tokenizer: ids [n, context_length] int64, each row ended by `end_token`."""

    context_length: int
    end_token: int

    def __call__(self, captions: list[str]) -> Tensor: ...


class ClipTokenizer:
    """CLIP's tokenizer (open_clip's vocabulary and merges): captions -> [n, context_length] int64, padded with 0.

    A caption that is too long keeps its first tokens and still ends with end-of-text. Text that spells a control
    token, such as "<end_of_text>", stays text: its letters are encoded like any other (in open_clip it would end the
    caption there).
    """

    start_token = 49406
    end_token = 49407
    vocabulary = 49408

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length
        self._vocabulary: Any = None
        self._pattern: Any = None
        self._words: dict[str, list[int]] = {}

    def __call__(self, captions: list[str]) -> Tensor:
        ids = np.zeros((len(captions), self.context_length), dtype=np.int64)
        for row, caption in zip(ids, captions, strict=True):
            tokens = [self.start_token, *self.encode(caption)[: self.context_length - 2], self.end_token]
            row[: len(tokens)] = tokens
        return torch.from_numpy(ids)

    def encode(self, caption: str) -> list[int]:
        """The ids of the words alone, however many."""
        if self._vocabulary is None:
            self._load()
        if len(self._words) > _CACHED_WORDS:
            self._words.clear()
        tokens: list[int] = []
        for word in self._pattern.findall(self._clean(caption)):
            known = self._words.get(word)
            if known is None:
                known = self._words[word] = self._encode_word(word)
            tokens += known
        return tokens

    def __getstate__(self) -> dict[str, Any]:
        return {"context_length": self.context_length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _load(self) -> None:
        import regex
        from open_clip.tokenizer import SimpleTokenizer  # 1.4 s, hence not at the top

        self._vocabulary = SimpleTokenizer()
        control, pattern = "<start_of_text>|<end_of_text>|", self._vocabulary.pat.pattern
        assert pattern.startswith(control), pattern
        self._pattern = regex.compile(pattern.removeprefix(control), regex.IGNORECASE)

    def _clean(self, caption: str) -> str:
        # Printable ASCII without "&" is a fixed point of the repair of broken encodings and of HTML entities,
        # which costs more than all the rest.
        if _PLAIN.fullmatch(caption):
            return caption.lower()
        return self._vocabulary.clean_fn(caption)

    def _encode_word(self, word: str) -> list[int]:
        source = self._vocabulary
        symbols = "".join(source.byte_encoder[byte] for byte in word.encode("utf-8"))
        pieces = source.bpe(symbols)
        # Its own cache never forgets; ours above is enough.
        source.cache.clear()
        return [source.encoder[piece] for piece in pieces.split(" ")]


def caption_lengths(ids: Tensor, end_token: int) -> Tensor:
    """[b, L] -> [b], tokens up to and including the first end-of-text."""
    return (ids == end_token).int().argmax(1) + 1


def trimmed(ids: Tensor, end_token: int) -> Tensor:
    """[b, L] -> [b, L'] without the columns that are padding in every row; L' is a multiple of 8, or L.

    A multiple, so that few shapes occur.
    """
    longest = int(caption_lengths(ids, end_token).max())
    return ids[:, : min(-(-longest // 8) * 8, ids.shape[1])].contiguous()
