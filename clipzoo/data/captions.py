"""Captions of samples, and how often they repeat. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Any, Literal, TypeVar

import numpy as np

from clipzoo.config.vocabulary import CaptionKeys
from clipzoo.data.faults import BadSampleError
from clipzoo.data.images import LARGEST_FILE, Region

LARGEST_TEXT = 2**24
"""Bytes of the largest caption or .json that is read."""
_SORTED_AT_ONCE = 2**27
"""Digests that are sorted at a time: 1 GiB."""
_BLOCK = 2**22
"""Digests that are read at a time."""
NO_CAPTION = 0
"""Digest of a sample without a usable caption."""
TXT = ".txt"
"""Name of the .txt among caption keys."""
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")
Setting = Literal["caption", "hard", "box", "group"]
"""Settings data.<setting>_key that name keys of the .json."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class CaptionCounts:
    """Captions of n pairs by how often they occur. occurrences: {1: 40, 3: 5} means 40 captions once, 5 three times.

    Captions are equal if their words are: spaces and line breaks do not count, capital letters do.
    """

    occurrences: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, digests: np.ndarray) -> CaptionCounts:
        """Count digests, [n] uint64, except NO_CAPTION. Needs at most 3 GiB: many are read once for each remainder."""
        rounds = 1 + len(digests) // _SORTED_AT_ONCE
        occurrences: Counter[int] = Counter()
        for remainder in range(rounds):
            blocks = (digests[first : first + _BLOCK] for first in range(0, len(digests), _BLOCK))
            chosen = [block[(block != NO_CAPTION) & (block % np.uint64(rounds) == remainder)] for block in blocks]
            counts = np.unique(np.concatenate([*chosen, np.empty(0, np.uint64)]), return_counts=True)[1]
            sizes, captions = np.unique(counts, return_counts=True)
            occurrences.update(dict(zip(sizes.tolist(), captions.tolist(), strict=True)))
        return cls(dict(sorted(occurrences.items())))

    @classmethod
    def of_captions(cls, captions: Iterable[str]) -> CaptionCounts:
        """Count captions."""
        return cls.of(np.fromiter(map(digest, captions), np.uint64))

    @property
    def pairs(self) -> int:
        """Number of pairs n."""
        return sum(size * captions for size, captions in self.occurrences.items())

    def figures(self, batch: int) -> dict[str, float]:
        """Return the statistics below by name, as a run directory stores them. batch: global batch size N.

        pairs, distinct: number of pairs n, and of distinct captions K. batch: the smaller one of N and n.

        recall_bound: upper bound of recall@1 over the n pairs, in percent and in both directions, 100 K / n. Equal
        captions have one embedding: c of them rank one image first, and of their copies the first one wins, so c pairs
        contribute at most 1. A model that ranks every image's own caption first attains the bound.

        equal_in_batch: expected number of samples of a batch whose caption another sample of the batch has too. The
        batch is N of the n pairs, drawn without replacement. None of the c - 1 other pairs with the caption of one of
        its pairs is among the N - 1 other pairs with probability q(c) = prod_{k=1}^{c-1} (1 - (N - 1) / (n - k)), so
        the expectation is N / n sum over pairs of 1 - q(c).
        """
        pairs, distinct = self.pairs, sum(self.occurrences.values())
        batch = min(batch, pairs)
        equal = 0.0
        if batch > 1:
            factors = 1 - (batch - 1) / (pairs - np.arange(1, max(self.occurrences)))  # below 0 after a factor of 0
            with np.errstate(divide="ignore"):
                log_none = np.concatenate([[0.0], np.log(np.maximum(factors, 0)).cumsum()])
            counts = self.occurrences.items()
            expected = sum(size * captions * -np.expm1(log_none[size - 1]) for size, captions in counts)
            equal = float(batch / pairs * expected)
        return {
            "pairs": pairs, "distinct": distinct, "recall_bound": 100 * distinct / pairs if pairs else 0.0,
            "batch": batch, "equal_in_batch": equal,
        }  # fmt: skip


def described(figures: Mapping[str, float]) -> str:
    """Return `CaptionCounts.figures` as one line of text, the same in all output."""
    pairs, distinct, batch = (f"{figures[name]:,.0f}" for name in ("pairs", "distinct", "batch"))
    if figures["distinct"] == figures["pairs"]:
        return f"{pairs} captions, all distinct"
    return (
        f"{distinct} of {pairs} captions are distinct: recall@1 over all pairs is at most "
        f"{figures['recall_bound']:.1f} %, and {figures['equal_in_batch']:,.1f} samples of a batch of {batch} share "
        "their caption with another one"
    )


def digest(caption: str) -> int:
    """Return 8 bytes of the BLAKE2b digest of a caption's words; never NO_CAPTION."""
    return int.from_bytes(hashlib.blake2b(" ".join(caption.split()).encode(), digest_size=8).digest(), "little") or 1


class StoredSample(ABC):
    """A sample of an open shard: image, captions, hard negatives, regions, and group.

    All methods raise BadSampleError, also if there is nothing under the key. Its kind ends with the name of the
    setting: "missing_hard" for data.hard_key. joined: returns the value of another table under a key.
    """

    joined: Callable[[str], Any] | None = None

    @abstractmethod
    def image(self) -> bytes:
        """Return the encoded image."""

    @abstractmethod
    def _text(self) -> Any:
        """Return the caption without a key: that of the .txt."""

    @property
    @abstractmethod
    def _entry(self) -> Any:
        """Content of the .json, or the row of a table."""

    def value(self, key: str) -> Any:
        """Return the value under a key of the .json or row, else that of the joined table; None without one."""
        value = self._entry.get(key) if isinstance(self._entry, dict) else None
        return self.joined(key) if value is None and self.joined is not None else value

    def uid(self, key: str | None) -> str | None:
        """Return the text or number under a key ("uid" if None) that identifies the sample, None without one."""
        with suppress(BadSampleError):
            if isinstance(self._entry, dict) and (value := self._entry.get(key or "uid")) is not None:
                return str(value)
        return None

    def texts(self, key: str | None, setting: Setting = "caption") -> list[str]:
        """Return the usable texts under a key of the .json, or that of the .txt if the key is None."""
        value = self._text() if key is None else self._value(key, setting)
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise BadSampleError(f"bad_{setting}", f"{key} is {value!r:.80}, neither a text nor a list of texts")
        texts = [text for text in texts if has_text(text)]
        if not texts:
            raise BadSampleError(f"empty_{setting}", f"{key or 'the caption'} has no letter or digit")
        return texts

    def digest(self, keys: CaptionKeys | None) -> int:
        """Return the digest of the first caption; NO_CAPTION without a usable one."""
        with suppress(BadSampleError):
            return digest(self.texts(caption_keys(keys)[0])[0])
        return NO_CAPTION

    def captions(self, keys: CaptionKeys | None) -> tuple[list[str], list[float] | None]:
        """Return the usable captions of all keys, in their order, and their probabilities if the keys have some."""
        by_key = [self.texts(key) for key in caption_keys(keys)]
        probabilities = None
        if isinstance(keys, Mapping):
            shares = zip(keys.values(), by_key, strict=True)
            probabilities = [p / sum(keys.values()) / len(captions) for p, captions in shares for _ in captions]
        return [caption for captions in by_key for caption in captions], probabilities

    def regions(self, key: str) -> list[tuple[str, Region]]:
        """Return captions of regions with their places: rows of [caption, left, top, right, bottom].

        GRIT's rows [start, end, left, top, right, bottom, ...] refer to characters of the key "caption".
        """
        value = self._value(key, "box")
        regions = []
        for row in value if isinstance(value, list) else [value]:
            try:
                text, edges = row[0], row[1:]
                if not isinstance(text, str):
                    text, edges = self._value("caption", "box")[int(row[0]) : int(row[1])], row[2:6]
                left, top, right, bottom = (min(max(float(edge), 0.0), 1.0) for edge in edges)
                if not (has_text(text) and left < right and top < bottom):
                    raise ValueError
            except (TypeError, ValueError, LookupError, OverflowError):
                reason = f"{key} has {row!r:.80}, not [caption, left, top, right, bottom] with shares of the image"
                raise BadSampleError("bad_box", reason) from None
            regions.append((text, (left, top, right, bottom)))
        if not regions:
            raise BadSampleError("empty_box", f"{key} has no region")
        return regions

    def group(self, key: str) -> int:
        """Return the digest of the string or number under a key."""
        value = self._value(key, "group")
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise BadSampleError("bad_group", f"{key} is {value!r:.80}, neither a text nor a number")
        return digest(str(value))

    def _value(self, key: str, setting: Setting) -> Any:
        value = self.value(key)
        if value is None:
            entry = self._entry
            present = ", ".join(list(entry)[:8]) if isinstance(entry, dict) else type(entry).__name__
            raise BadSampleError(f"missing_{setting}", f"json has no data.{setting}_key {key!r}, but: {present}")
        return value


class TarSample(StoredSample):
    """A sample of an open tar. record: a RECORD. first: position of the file in the tar. Parses the .json once."""

    def __init__(self, file: IO[bytes], record: np.void, first: int = 0) -> None:
        self._file, self._record, self._first = file, record, first

    def image(self) -> bytes:
        return read_member(self._file.fileno(), self._record, "image", self._first)

    def _text(self) -> str:
        return decoded(read_member(self._file.fileno(), self._record, "txt", self._first))

    @cached_property
    def _entry(self) -> Any:
        try:
            return json.loads(decoded(read_member(self._file.fileno(), self._record, "json", self._first)))
        except (ValueError, RecursionError) as error:
            raise BadSampleError("bad_json", f"json: {error}") from error


def decoded(text: bytes) -> str:
    """Return a text in UTF-8. Raises BadSampleError."""
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSampleError("caption_not_utf8", str(error)) from error


def caption_keys(keys: CaptionKeys | None) -> list[str | None]:
    """Return the keys in `data.caption_key` in their order; None for the .txt."""
    names = [TXT] if keys is None else [keys] if isinstance(keys, str) else list(keys)
    return [None if name == TXT else name for name in names]


def chosen(
    setting: Setting,
    items: Sequence[Item],
    count: int,
    random: Callable[[Setting], np.random.Generator],
    notes: dict[str, str],
    probabilities: Sequence[float] | None = None,
) -> list[Item]:
    """Return `count` items: a random draw without replacement, in the order drawn.

    At most `count` items are not drawn but returned in their order. Fewer are repeated from the first, which becomes an
    entry of `notes` by kind. random: creates the generator. probabilities: of the items; None if equal.
    """
    if len(items) > count:
        # One item is drawn as in `integers`, which choice without replacement does not.
        places = random(setting).choice(len(items), count, replace=count == 1, p=probabilities)
        return [items[place] for place in places.tolist()]
    if len(items) < count:
        notes[f"repeated_{setting}"] = f"{len(items)} instead of {count}: they are repeated"
    return [items[place % len(items)] for place in range(count)]


def fitted(caption: str, tokenizer: Any, how: str, random: np.random.Generator) -> tuple[str, bool]:
    """Return the part of a caption that is used, and True if all of it does not fit into the context.

    how: "truncate" keeps the first tokens; "window" the tokens from a random word on that leaves none of the context
    empty; "sentences" a random sentence and those after it that fit. tokenizer: a `Tokenizer`, which cuts captions.
    """

    def tokens(text: str) -> int:
        return int(tokenizer([text])[0].tolist().index(tokenizer.end_token)) - control

    # Numbers of tokens before the caption, and of those that fit.
    empty = tokenizer([""])[0].tolist()
    control = empty.index(tokenizer.end_token)
    most = len(empty) - control - 1

    def is_long(text: str) -> bool:
        # A caption that fills the context fits if all tokens of its last word are in it.
        rest, _, last = text.rstrip().rpartition(" ")
        return tokens(text) == most and (not rest or tokens(rest) > most - tokens(last))

    if not is_long(caption):
        return caption, False
    words, sentences = caption.split(), [part for part in _SENTENCE_END.split(caption) if has_text(part)]
    if how == "window":
        # The last word from which the rest fills the context; the rest grows shorter with its start.
        last = bisect_left(range(len(words)), True, key=lambda first: tokens(" ".join(words[first:])) < most)
        return " ".join(words[int(random.integers(max(last, 1))) :]), True
    if how == "sentences" and len(sentences) > 1:
        first = end = int(random.integers(len(sentences)))
        while end < len(sentences) and (end == first or not is_long(" ".join(sentences[first : end + 1]))):
            end += 1
        return " ".join(sentences[first:end]), True
    return caption, True


def has_text(caption: str) -> bool:
    """Return True if the caption has a letter or digit of any script, and not only spaces, punctuation and emoji."""
    return any(character.isalnum() for character in caption)


def read_member(descriptor: int, record: np.void, role: str, first: int = 0) -> bytes:
    """Return the bytes of a member of a sample. first: position of the file in the tar. Raises BadSampleError."""
    offset, size = int(record[f"{role}_offset"]), int(record[f"{role}_size"])
    if size > (LARGEST_FILE if role == "image" else LARGEST_TEXT):
        raise BadSampleError("enormous_file", f"the {role} has {size:,} bytes")
    if not offset:
        if role == "image":
            raise BadSampleError("missing_image", "no image under this key")
        raise BadSampleError("missing_caption", f"no .{role} under this key")
    try:
        data = os.pread(descriptor, size, offset - first)
    except OSError as error:
        raise BadSampleError("shard_unreadable", f"bytes {offset} to {offset + size}: {error.strerror}") from error
    if len(data) < size:
        raise BadSampleError("shard_truncated", f"bytes {offset} to {offset + size} are beyond the end of the file")
    return data
