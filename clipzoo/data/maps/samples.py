"""Facts about the samples of shards (sizes, captions, digests, small pictures, faults), and MetaCLIP's weights."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from clipzoo import io
from clipzoo.data.faults import BadSampleError
from clipzoo.data.images import read_header
from clipzoo.data.index import ShardIndex
from clipzoo.data.maps.engines import TableMap
from clipzoo.data.reader import ShardReader
from clipzoo.data.tables.formats import arrow
from clipzoo.errors import imported, masked
from clipzoo.io.text import script_of

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 3
"""Change it together with the facts."""
GRID = 24
"""Side of the small picture of an image."""
_LEAST_TEXT = 24
"""Bytes of a caption whose language, one of 139, is named: that of shorter ones is often wrong."""


@dataclass(frozen=True)
class SampleFacts(TableMap):
    """Map of shards to a row of facts for each sample; `fault` is the kind of an unusable sample, otherwise null.

    max_pixels: as in ShardDataset.
    """

    index: ShardIndex
    reader: ShardReader
    max_pixels: int

    def contents(self) -> Sequence[str]:
        rules = self.reader.rules
        settings = (VERSION, rules.caption_key, rules.uid_key, self.max_pixels, rules.identity)
        return [f"SampleFacts {settings} {shard.digest} {shard.bytes} {shard.state}" for shard in self.index.shards]

    def table(self, item: int) -> pa.Table:
        from clipzoo.data.tokenizer import ClipTokenizer  # imports torch

        py3langid = imported("py3langid", "languages of captions need", "tables")
        encode, rows, rules = ClipTokenizer(77).encode, [], self.reader.rules
        for position, key in enumerate(self.index.keys(item)):
            row: dict[str, Any] = {"uid": key}
            try:
                sample = self.reader.sample(self.index, item, position)
                row["uid"] = sample.uid(rules.uid_key) or key
                row |= image_facts(sample.image(), self.max_pixels)
                caption = sample.captions(rules.caption_key)[0][0]
                is_short = len(caption.encode()) < _LEAST_TEXT
                language = "short" if is_short else str(py3langid.classify(caption)[0])
                row |= {"caption": caption, "script": script_of(caption), "language": language}
                row["tokens"] = len(encode(caption)) + 2  # with both control tokens
            except BadSampleError as error:
                row |= {"fault": error.kind, "reason": masked(error.reason)[:200]}
            rows.append(row)
        schema = image_schema("uid", "caption", "script", "language").append(arrow().field("tokens", arrow().int32()))
        return arrow().Table.from_pylist(rows, schema=schema)


def image_facts(encoded: bytes, max_pixels: int | None) -> dict[str, Any]:
    """Return size, digest and a small picture of an encoded image. Raises BadSampleError.

    pixels: red, green and blue of GRID x GRID pixels, as bytes. conversions: kinds of conversion to RGB.
    """
    image = read_header(encoded, max_pixels)
    sharpest = min(image.height, image.width) // (2 * GRID) if image.scalable else 1
    reduction = next((factor for factor in (8, 4, 2) if sharpest >= factor), 1)
    small = Image.fromarray(image.decode(reduction)).resize((GRID, GRID), Image.Resampling.HAMMING)
    digest = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")
    return {
        "width": image.width, "height": image.height, "bytes": len(encoded), "digest": digest,
        "pixels": small.tobytes(), "conversions": image.conversions,
    }  # fmt: skip


@cache
def image_schema(*further: str) -> pa.Schema:
    """Return the columns of `image_facts`, of faults, and further columns of text."""
    pa = arrow()
    numbers = {"width": pa.int32(), "height": pa.int32(), "bytes": pa.int32(), "digest": pa.uint64()}
    pixels = {"pixels": pa.binary(GRID * GRID * 3), "conversions": pa.list_(pa.string())}
    return pa.schema(list({**numbers, **pixels, **dict.fromkeys(("fault", "reason", *further), pa.string())}.items()))


def write_uids(path: Path, kept: Sequence[str], left_out: Sequence[str]) -> int:
    """Write the kept uids for data.uids without those of samples that are left out, and return their number."""
    uids = np.setdiff1d(np.array(kept, str), np.array(left_out, str))
    with io.whole(path) as file:
        np.save(file, uids)
    return len(uids)


# MetaCLIP's balancing: weights of samples from the frequencies of the entries that occur in their captions.
# Source: Xu et al. 2024, Demystifying CLIP Data, algorithm 1. Entries are sequences of words and match whole words.


@dataclass(frozen=True)
class CaptionEntries(SampleFacts):
    """Map of shards to uids of samples and entries in their captions; without entries, to the counts of all of them.

    entries: from `normalised`; None counts the captions with each word and each pair of adjacent words.
    """

    entries: Sequence[str] | None

    def contents(self) -> Sequence[str]:
        digest = hashlib.sha256("\0".join(self.entries or ["counts"]).encode()).hexdigest()
        return [f"{content} {digest}" for content in super().contents()]

    def table(self, item: int) -> pa.Table:
        pa, rules, numbers = arrow(), self.reader.rules, {entry: i for i, entry in enumerate(self.entries or ())}
        most = 2 if self.entries is None else max((entry.count(" ") + 1 for entry in self.entries), default=0)
        uids, matches, counts = list[str](), list[list[int]](), Counter[str]()
        for position, key in enumerate(self.index.keys(item)):
            uids.append(key)
            matches.append([])
            with suppress(BadSampleError):
                sample = self.reader.sample(self.index, item, position)
                uids[-1] = sample.uid(rules.uid_key) or key
                words = normalised(" ".join(sample.captions(rules.caption_key)[0])).split()
                spans = (words[first : first + n] for n in range(1, most + 1) for first in range(len(words) - n + 1))
                found = set(map(" ".join, spans))
                counts.update(found if self.entries is None else ())
                matches[-1] = sorted(numbers[entry] for entry in found & numbers.keys())
        if self.entries is None:
            rows = sorted(counts.items())
            columns = {"entry": pa.string(), "count": pa.int64()}
            return pa.table({name: pa.array([row[i] for row in rows], columns[name]) for i, name in enumerate(columns)})
        return pa.table({"uid": pa.array(uids, pa.string()), "entries": pa.array(matches, pa.list_(pa.int32()))})


def normalised(text: str) -> str:
    """Return the words of a text in lower case, separated by spaces; empty without a letter or digit."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def write_weights(path: Path, matches: pa.Table, threshold: int) -> tuple[np.ndarray, np.ndarray]:
    """Write the table of data.weights; return the weights of samples, [n], and the numbers of captions with each entry.

    An entry in c captions keeps a sample with probability min(1, threshold / c), independently: a sample has the weight
    1 - prod(1 - p) over its entries, 0 without one. A uid of several samples has the largest of their weights.
    matches: of a `CaptionEntries`, merged.
    """
    from pyarrow import parquet

    lists = matches["entries"].combine_chunks()
    entries, lengths = np.asarray(lists.flatten()), np.diff(np.asarray(lists.offsets))
    counts = np.bincount(entries, minlength=1)
    left_out, starts = np.ones(len(lengths)), np.cumsum(lengths) - lengths
    factors = 1 - np.minimum(1, threshold / np.maximum(counts, 1))
    left_out[lengths > 0] = np.multiply.reduceat(factors[entries], starts[lengths > 0])
    weights = 1 - left_out
    table = arrow().table({"uid": matches["uid"], "weight": weights}).group_by("uid").aggregate([("weight", "max")])
    table = table.rename_columns(["uid", "weight"]).sort_by("uid")
    with io.whole(path) as file:
        parquet.write_table(table, file, compression="zstd")
    return weights, counts
