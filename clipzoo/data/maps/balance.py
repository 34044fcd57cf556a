"""MetaCLIP's balancing: weights of samples from the frequencies of the entries that occur in their captions.

Source: Xu et al. 2024, Demystifying CLIP Data, algorithm 1. Entries are sequences of words and match whole words.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from clipzoo import io
from clipzoo.data.faults import BadSampleError
from clipzoo.data.maps.samples import SampleFacts
from clipzoo.data.reader import ShardReader
from clipzoo.data.tables.formats import arrow

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class CaptionEntries(SampleFacts):
    """Map of shards to uids of samples and entries in their captions; without entries, to the counts of all of them.

    entries: from `normalised`; None counts the captions with each word and each pair of adjacent words.
    """

    entries: Sequence[str] | None

    def contents(self) -> Sequence[str]:
        digest = hashlib.sha256("\0".join(self.entries or ["counts"]).encode()).hexdigest()
        return [f"{content} {digest}" for content in super().contents()]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {entry: number for number, entry in enumerate(self.entries or ())}

    def table(self, item: int) -> pa.Table:
        reader, pa = ShardReader(self.cache, self.tables), arrow()
        most = 2 if self.entries is None else max((entry.count(" ") + 1 for entry in self.entries), default=0)
        uids, matches, counts = list[str](), list[list[int]](), Counter[str]()
        for position, key in enumerate(self.index.keys(item)):
            uids.append(key)
            matches.append([])
            with suppress(BadSampleError):
                sample = reader.sample(self.index, item, position)
                if self.tables is None:
                    uids[-1] = sample.uid(self.uid_key) or key
                words = normalised(" ".join(sample.captions(self.caption_key)[0])).split()
                spans = (words[first : first + n] for n in range(1, most + 1) for first in range(len(words) - n + 1))
                found = set(map(" ".join, spans))
                counts.update(found if self.entries is None else ())
                matches[-1] = sorted(self._numbers[entry] for entry in found & self._numbers.keys())
        if self.entries is None:
            rows = sorted(counts.items())
            columns = {"entry": pa.string(), "count": pa.int64()}
            return pa.table({name: pa.array([row[i] for row in rows], columns[name]) for i, name in enumerate(columns)})
        return pa.table({"uid": pa.array(uids, pa.string()), "entries": pa.array(matches, pa.list_(pa.int32()))})


def normalised(text: str) -> str:
    """Return the words of a text in lower case, separated by spaces; empty without a letter or digit."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def most_frequent(counts: pa.Table, top: int) -> list[str]:
    """Return the entries in most captions, the first by name among equals. counts: of a `CaptionEntries`, merged."""
    sums = counts.group_by("entry").aggregate([("count", "sum")])
    return list(sums.sort_by([("count_sum", "descending"), ("entry", "ascending")])["entry"][:top].to_pylist())


def weights_of(matches: pa.Table, threshold: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of samples, [n], and the numbers of captions with each entry.

    An entry in c captions keeps a sample with probability min(1, threshold / c), independently: a sample has the weight
    1 - prod(1 - p) over its entries, 0 without one. matches: of a `CaptionEntries`, merged.
    """
    lists = matches["entries"].combine_chunks()
    entries, lengths = np.asarray(lists.flatten()), np.diff(np.asarray(lists.offsets))
    counts = np.bincount(entries) if len(entries) else np.zeros(1, np.int64)
    left_out, starts = np.ones(len(lengths)), np.cumsum(lengths) - lengths
    if len(entries):
        factors = 1 - np.minimum(1, threshold / np.maximum(counts, 1))
        left_out[lengths > 0] = np.multiply.reduceat(factors[entries], starts[lengths > 0])
    return 1 - left_out, counts


def write_weights(path: Path, uids: Sequence[str], weights: np.ndarray) -> None:
    """Write the table of data.weights; a uid of several samples has the largest of their weights."""
    from pyarrow import parquet

    unique, places = np.unique(np.array(uids, str), return_inverse=True)
    largest = np.zeros(len(unique))
    np.maximum.at(largest, places, weights)
    with io.whole(path) as file:
        parquet.write_table(arrow().table({"uid": unique, "weight": largest}), file, compression="zstd")
