"""Tokenizer of captions with CLIP's byte-pair vocabulary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Protocol

import numpy as np
import torch
from torch import Tensor

from clipzoo.config.vocabulary import Range
from clipzoo.io.weights import import_alone
from clipzoo.types import Part, as_captions

if TYPE_CHECKING:
    from open_clip.tokenizer import SimpleTokenizer
    from regex import Pattern

_PLAIN = re.compile(r"[ -%'-~\t\n]*")
_CACHED_WORDS = 100_000


class Tokenizer(Protocol):
    """Maps captions to token ids, int64 [n, context_length]; every row ends with `end_token`, then padding."""

    context_length: int
    end_token: int

    def __call__(self, captions: str | Sequence[str]) -> Tensor: ...


class ClipTokenizer(Part):
    """CLIP's tokenizer with open_clip's vocabulary and merges: captions -> int64 [n, context_length], padded with 0.

    A caption that is too long keeps its first tokens and still ends with end-of-text. Text that spells a control
    token, such as "<end_of_text>", is encoded as ordinary text (in open_clip it would end the caption).

    context_length: maximum number of tokens L of a caption.
    """

    start_token = 49406
    end_token = 49407
    vocabulary = 49408

    def __init__(self, context_length: Annotated[int, Range(at_least=3)]) -> None:
        self.context_length = context_length
        self._words: dict[str, list[int]] = {}

    def __call__(self, captions: str | Sequence[str]) -> Tensor:
        captions = as_captions(captions)
        ids = np.zeros((len(captions), self.context_length), dtype=np.int64)
        for row, caption in zip(ids, captions, strict=True):
            tokens = [self.start_token, *self.encode(caption)[: self.context_length - 2], self.end_token]
            row[: len(tokens)] = tokens
        return torch.from_numpy(ids)

    def encode(self, caption: str) -> list[int]:
        """Return the token ids of a caption, without control tokens and of any length."""
        if len(self._words) > _CACHED_WORDS:
            self._words.clear()
        source, pattern = _load()
        # Repairing broken encodings and HTML entities takes longer than tokenization, and leaves printable ASCII
        # without "&" unchanged.
        text = caption.lower() if _PLAIN.fullmatch(caption) else source.clean_fn(caption)
        tokens: list[int] = []
        for word in pattern.findall(text):
            if word not in self._words:
                symbols = "".join(source.byte_encoder[byte] for byte in word.encode("utf-8"))
                self._words[word] = [source.encoder[piece] for piece in source.bpe(symbols).split(" ")]
                # open_clip's cache grows without limit; this one suffices.
                source.cache.clear()
            tokens += self._words[word]
        return tokens

    def pieces(self, ids: list[int]) -> list[str]:
        """Return the text of each token."""
        source = _load()[0]
        texts = [bytearray(source.byte_decoder[letter] for letter in source.decoder[token]) for token in ids]
        return [text.decode("utf-8", errors="replace").replace("</w>", "") for text in texts]

    def tables(self) -> tuple[dict[str, int], list[tuple[str, str]], str]:
        """Return the vocabulary by text, the merges in order, and the pattern of words, to build the same tokenizer."""
        source, pattern = _load()
        return source.encoder, sorted(source.bpe_ranks, key=source.bpe_ranks.__getitem__), pattern.pattern

    def __reduce__(self) -> tuple[type[ClipTokenizer], tuple[int]]:
        return ClipTokenizer, (self.context_length,)


def caption_lengths(ids: Tensor, end_token: int) -> Tensor:
    """Return the number of tokens [b] of captions [b, L], up to and including the first end-of-text."""
    return (ids == end_token).int().argmax(1) + 1


def trim_padding(ids: Tensor, end_token: int) -> Tensor:
    """Cut the columns that are padding in all rows: [b, L] -> [b, L'], where L' is a multiple of 8 or equals L."""
    # Multiples of 8 keep the number of different shapes small.
    longest = int(caption_lengths(ids, end_token).max())
    return ids[:, : min(-(-longest // 8) * 8, ids.shape[1])].contiguous()


@cache
def _load() -> tuple[SimpleTokenizer, Pattern[str]]:
    import regex

    source = import_alone("open_clip.tokenizer").SimpleTokenizer()
    control, pattern = "<start_of_text>|<end_of_text>|", source.pat.pattern
    assert pattern.startswith(control), pattern
    return source, regex.compile(pattern.removeprefix(control), regex.IGNORECASE)
