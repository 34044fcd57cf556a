"""Captions of samples, and how often they repeat. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from clipzoo.data.faults import BadSampleError
from clipzoo.data.images import LARGEST_FILE

LARGEST_TEXT = 2**24
"""Bytes of the largest caption or .json that is read."""
_SORTED_AT_ONCE = 2**27
"""Digests that are sorted at a time: 1 GiB."""
_BLOCK = 2**22
"""Digests that are read at a time."""
NO_CAPTION = 0
"""Digest of a sample without a usable caption."""


@dataclass(frozen=True)
class CaptionCounts:
    """Captions of n pairs by how often they occur. occurrences: {1: 40, 3: 5} means 40 captions once, 5 three times.

    Captions are equal if their words are: spaces and line breaks do not count, capital letters do.
    """

    occurrences: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, digests: np.ndarray) -> CaptionCounts:
        """Count digests, [n] uint64, except NO_CAPTION.

        Needs at most 3 GiB: more than _SORTED_AT_ONCE digests are read several times, once for each remainder.
        """
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

        recall_bound: upper bound of recall@1 over the n pairs, in percent and in both directions, 100 K / n. Text to
        image: c equal captions have one embedding, so they rank the images alike and have one image in first place,
        which belongs to at most one of the c pairs. Image to text: the c copies of a caption have equal scores; ranked
        by column, as clipzoo does, the first copy wins and belongs to one pair; ranked at random, each of the c images
        finds its own copy with probability 1 / c. Either way a group of c pairs contributes at most 1 (in expectation),
        and K groups contribute K of n. A model that ranks every image's own caption first attains it.

        equal_in_batch: expected number of samples of a batch whose caption another sample of the batch has too. The
        batch is N of the n pairs, drawn without replacement. A pair is in it with probability N / n; none of the c - 1
        other pairs with its caption is then among the N - 1 further draws from n - 1 pairs with probability
        q(c) = C(n - c, N - 1) / C(n - 1, N - 1) = prod_{k=1}^{c-1} (1 - (N - 1) / (n - k)), the hypergeometric
        distribution at 0. The expectation is N / n sum over pairs of 1 - q(c).
        """
        pairs, distinct = self.pairs, sum(self.occurrences.values())
        batch = min(batch, pairs)
        equal = 0.0
        if batch > 1:
            factors = 1 - (batch - 1) / (pairs - np.arange(1, max(self.occurrences)))  # below 0 after a factor of 0
            with np.errstate(divide="ignore"):
                log_none = np.concatenate([[0.0], np.log(np.maximum(factors, 0)).cumsum()])
            counts = self.occurrences.items()
            equal = float(
                batch / pairs * sum(size * captions * -np.expm1(log_none[size - 1]) for size, captions in counts)
            )
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


def read_captions(descriptor: int, record: np.void, caption_key: str | None) -> list[str]:
    """Return the usable captions of a sample of an open shard.

    record: a RECORD. caption_key: key of the .json that holds the caption or captions; None for the .txt.
    Raises BadSampleError, also without a usable caption.
    """
    try:
        text = read_member(descriptor, record, "txt" if caption_key is None else "json").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSampleError("caption_not_utf8", str(error)) from error
    captions = [text]
    if caption_key is not None:
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadSampleError("bad_json", f"json: {error}") from error
        if not isinstance(entry, dict) or entry.get(caption_key) is None:
            present = ", ".join(list(entry)[:8]) if isinstance(entry, dict) else type(entry).__name__
            raise BadSampleError("missing_caption", f"json has no data.caption_key {caption_key!r}, but: {present}")
        value = entry[caption_key]
        captions = value if isinstance(value, list) else [value]
        if not all(isinstance(caption, str) for caption in captions):
            reason = f"{caption_key} is {value!r:.80}, neither a text nor a list of texts"
            raise BadSampleError("bad_caption", reason)
    captions = [caption for caption in captions if has_text(caption)]
    if not captions:
        raise BadSampleError("empty_caption", "the caption has no letter or digit")
    return captions


def has_text(caption: str) -> bool:
    """Return True if the caption has a letter or digit of any script, and not only spaces, punctuation and emoji."""
    return any(character.isalnum() for character in caption)


def read_member(descriptor: int, record: np.void, role: str) -> bytes:
    """Return the bytes of a member of a sample. Raises BadSampleError."""
    offset, size = int(record[f"{role}_offset"]), int(record[f"{role}_size"])
    if size > (LARGEST_FILE if role == "image" else LARGEST_TEXT):
        raise BadSampleError("enormous_file", f"the {role} has {size:,} bytes")
    if not offset:
        if role == "image":
            raise BadSampleError("missing_image", "no image under this key")
        raise BadSampleError("missing_caption", f"no .{role} under this key")
    try:
        data = os.pread(descriptor, size, offset)
    except OSError as error:
        raise BadSampleError("shard_unreadable", f"bytes {offset} to {offset + size}: {error.strerror}") from error
    if len(data) < size:
        raise BadSampleError("shard_truncated", f"bytes {offset} to {offset + size} are beyond the end of the file")
    return data
