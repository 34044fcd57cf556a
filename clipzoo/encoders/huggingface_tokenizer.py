"""Tokenizers of the Hugging Face hub. Need the extra `hf`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from clipzoo.errors import ConfigError, installation
from clipzoo.io.weights import from_hub
from clipzoo.types import Part, Range, as_captions

Cleaning = Literal["none", "whitespace", "lower", "canonicalize"]


class HuggingFaceTokenizer(Part):
    """Captions -> int64 [n, context_length]; a caption that is too long keeps its first tokens and its end token.

    Control tokens in a caption, such as "[SEP]", are plain text. The tokenizer is loaded on first use.

    name: on the hub, or a folder. clean: how open_clip prepares text for some models; none leaves captions unchanged.
    strip_end: replace the end token by 0, as CLIPA's models are trained.
    """

    def __init__(
        self,
        name: str,
        context_length: Annotated[int, Range(at_least=3)],
        clean: Cleaning = "none",
        strip_end: bool = False,
    ) -> None:
        self.context_length = context_length
        self.name, self.clean, self.strip_end = name, clean, strip_end
        self._tokenizer: Any = None
        self._clean_caption: Callable[[str], str] | None = None
        self._ends_itself = True
        self._end = self._pad = 0

    @property
    def source(self) -> Any:
        """The tokenizer of transformers."""
        self._load()
        return self._tokenizer

    @property
    def ends_itself(self) -> bool:
        """True if the tokenizer of transformers adds the end token."""
        self._load()
        return self._ends_itself

    @property
    def pad_token(self) -> int:
        """Id of the padding."""
        self._load()
        return self._pad

    @property
    def end_token(self) -> int:
        """Id that ends a caption; all positions after its first occurrence are padding."""
        self._load()
        return 0 if self.strip_end else self._end

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        self._load()
        return len(self._tokenizer)

    def pieces(self, ids: list[int]) -> list[str]:
        """Return the text of each token."""
        return [self.source.decode([token]) for token in ids]

    def __call__(self, captions: str | Sequence[str]) -> Tensor:
        captions = as_captions(captions)
        self._load()
        if self._clean_caption is not None:
            captions = [self._clean_caption(caption) for caption in captions]
        length = self.context_length - (not self._ends_itself)
        rows = self._tokenizer(captions, truncation=True, max_length=length)["input_ids"]
        ids = torch.full((len(rows), self.context_length), self._pad, dtype=torch.int64)
        for target, row in zip(ids, rows, strict=True):
            whole = row if self._ends_itself else [*row, self._end]
            target[: len(whole)] = torch.tensor(whole)
        return torch.where(ids == self._end, 0, ids) if self.strip_end else ids

    def _load(self) -> None:
        if self._tokenizer is not None:
            return
        transformers = require_transformers("encoder.tokenizer")
        with from_hub(
            self.name,
            f"encoder.tokenizer.name={self.name} is not a folder with a tokenizer, and cannot be loaded from the "
            "Hugging Face hub",
        ):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                self.name, split_special_tokens=True, trust_remote_code=False
            )
        if self.clean != "none":
            from open_clip.tokenizer import get_clean_fn

            self._clean_caption = get_clean_fn(self.clean)
        empty = tokenizer("")["input_ids"]
        ends = [end for end in (tokenizer.sep_token_id, tokenizer.eos_token_id) if end is not None]
        if not ends:
            raise ConfigError(f"the tokenizer {self.name} has no token that ends a text: choose another")
        self._ends_itself = bool(empty) and empty[-1] in ends
        self._end = empty[-1] if self._ends_itself else tokenizer.eos_token_id or ends[0]
        self._pad = self._end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._tokenizer = tokenizer

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.context_length, self.clean, self.strip_end)


def require_transformers(what: str) -> Any:
    """Return the package transformers. what: needs it, for the message. Raises ConfigError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"{what} needs transformers: {installation('hf')}") from None
    return transformers
