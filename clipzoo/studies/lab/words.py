"""A tokenizer of whole words, for the captions of enumerated worlds: a small text tower trains in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from clipzoo.config.vocabulary import Range
from clipzoo.types import Part, as_captions

WORDS = (
    "circle", "square", "triangle", "star", "heart", "cross", "ring", "crescent", "diamond", "arrow", "red", "orange",
    "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "a", "an", "and", "something", "picture",
    "image", "of", "this", "shows",
)  # fmt: skip


class WordTokenizer(Part):
    """Captions -> int64 [n, context_length], one id per word, padded with 0. Raises ValueError for another word."""

    start_token = 62
    end_token = 63
    vocabulary = 64

    def __init__(self, context_length: Annotated[int, Range(at_least=3)]) -> None:
        self.context_length = context_length
        self._ids = {word: number for number, word in enumerate(WORDS, 1)}

    def __call__(self, captions: str | Sequence[str]) -> Tensor:
        captions = as_captions(captions)
        rows = torch.zeros(len(captions), self.context_length, dtype=torch.int64)
        for row, caption in zip(rows, captions, strict=True):
            unknown = [word for word in caption.split() if word not in self._ids]
            if unknown:
                raise ValueError(f"{caption!r} has a word that is not in the vocabulary: {unknown[0]}")
            words = [self._ids[word] for word in caption.split()][: self.context_length - 2]
            tokens = [self.start_token, *words, self.end_token]
            row[: len(tokens)] = torch.tensor(tokens)
        return rows
