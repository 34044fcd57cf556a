"""Index of a source: number of samples of every shard, and the position of their bytes, and how often captions repeat.

The index is two files: `<digest>.json`, a table of the shards, and the `.bin` named in it, which holds records and
then keys. The id of a sample is the first id of its source + the start of its shard + its position in the shard.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from clipzoo import io
from clipzoo.data.shards.captions import CaptionCounts
from clipzoo.data.shards.scan import RECORD, split_keys
from clipzoo.errors import masked

FOLDER = "clipzoo_index"
VERSION = 2
REMEDY = "the index is built again"
_CACHED_SHARDS = 8
MOST = 2**44
"""Samples of a shard, and bytes of its keys: sums over a hundred thousand shards are 64-bit integers."""
_VERIFIED_BYTES = 2**29
"""Bytes of an index that are verified when it is loaded: about a second."""


@dataclass(frozen=True)
class Shard:
    """A row of the table of shards.

    bytes: size of the archive when its samples were listed. state: size and modification time of the file when it was
    last checked; a size below `bytes` means that the shard was cut since then (-1: deleted). Its samples keep their
    ids. key_start, key_bytes: position of its keys among all keys. digest: of keys, offsets and sizes. flaw: why the
    list of samples may be incomplete.
    """

    name: str
    count: int
    bytes: int
    state: tuple[int, int]
    key_start: int
    key_bytes: int
    digest: str
    duplicates: int
    flaw: str | None


class ShardIndex:
    """Index of the shards of one source, in their order. keys(shard): keys of a shard's samples.

    captions: how often the captions repeat; of samples with several captions, the first one.
    """

    def __init__(self, shards: Sequence[Shard], locations: Sequence[str], data: Path, captions: CaptionCounts) -> None:
        self.shards, self.locations, self.data, self.captions = list(shards), list(locations), data, captions
        self.counts = np.array([shard.count for shard in shards], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])
        self.samples = int(self.starts[-1])
        self._records: np.ndarray | None = None
        self.keys: Callable[[int], list[str]] = lru_cache(_CACHED_SHARDS)(partial(_read_keys, self))

    @property
    def records(self) -> np.ndarray:
        """[n] of RECORD. Memory-mapped on first use, in the process that reads."""
        if self._records is None:
            self._records = (
                np.memmap(self.data, RECORD, mode="r", shape=(self.samples,)) if self.samples else np.empty(0, RECORD)
            )
        return self._records

    def records_of(self, shard: int) -> np.ndarray:
        """Return the records [count] of a shard."""
        return self.records[self.starts[shard] : self.starts[shard + 1]]

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (shard, position in the shard) of sample 0 .. n - 1 of the source."""
        shard = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return shard, sample - int(self.starts[shard])

    @property
    def fingerprint(self) -> str:
        """Digest of the names, order, sizes and samples of the shards."""
        facts = [(shard.name, shard.count, shard.bytes, shard.digest) for shard in self.shards]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def __reduce__(self) -> tuple[type[ShardIndex], tuple[list[Shard], list[str], Path, CaptionCounts]]:
        return ShardIndex, (self.shards, self.locations, self.data, self.captions)


def load(locations: Sequence[str], folders: Sequence[Path], caption_key: str | None = None) -> ShardIndex | None:
    """Read the last written index from the first of the folders that has one; the shards are not checked.

    A damaged index is named in the log and counts as none.
    """
    damage = io.DamageLog()
    for folder in folders:
        path = folder / f"{index_name(locations, caption_key)}.json"
        if path.is_file() and (index := damage.read(partial(_read, path, locations), None)) is not None:
            return index
    return None


def digest_of(key_bytes: bytes, records: bytes) -> str:
    """Return the digest of a shard's keys and records."""
    return hashlib.sha256(key_bytes + records).hexdigest()[:16]


def index_name(locations: Sequence[str], caption_key: str | None = None) -> str:
    """Return the file name, without suffix, of the index of these shards with the captions under `caption_key`."""
    names = [*relative_names(locations), *([] if caption_key is None else ["caption_key", caption_key])]
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:16]


def relative_names(locations: Sequence[str]) -> list[str]:
    """Return names relative to the common folder: index and fingerprint stay valid when the folder is moved."""
    # A token in a URL is no part of the shard's name.
    names = masked(list(locations))
    if any(name.startswith("pipe:") for name in names):
        return names
    folders = [name.rpartition("/")[0] + "/" for name in names]
    common = os.path.commonprefix(folders).rpartition("/")[0] + "/"
    return [name.removeprefix(common) for name in names]


def read_key_bytes(index: ShardIndex, shard: int) -> bytes:
    """Read the keys of a shard as they are stored in the data file."""
    with io.readable(index.data, io.ANY_SIZE, REMEDY) as file:
        file.seek(index.samples * RECORD.itemsize + index.shards[shard].key_start)
        return file.read(index.shards[shard].key_bytes)


def _read(path: Path, locations: Sequence[str]) -> ShardIndex | None:
    """Read and verify an index; None for one of another version. Raises DamagedFileError."""
    table = io.read_json(path, 64 * io.MB, REMEDY)
    io.require_fields(path, table, {"version": int, "data": str, "shards": list}, REMEDY)
    if table["version"] != VERSION:
        return None
    io.require_fields(path, table, {"captions": list}, REMEDY)
    names = [row["name"] for row in table["shards"] if _is_row(row)]
    if names != relative_names(locations) or len(names) != len(table["shards"]):
        raise io.DamagedFileError(path, "does not describe the shards", REMEDY)
    if Path(table["data"]).name != table["data"] or not table["data"]:
        raise io.DamagedFileError(path, f"names {io.shortened(table['data'])}, not a file beside it", REMEDY)
    shards = [Shard(**{**row, "state": tuple(row["state"])}) for row in table["shards"]]
    if sum(shard.count for shard in shards) * RECORD.itemsize > 2**63:
        raise io.DamagedFileError(path, "counts more samples than a file can hold", REMEDY)
    if not all(isinstance(row, list) and len(row) == 2 and all(map(_is_count, row)) for row in table["captions"]):
        raise io.DamagedFileError(path, "does not count the captions", REMEDY)
    captions = CaptionCounts({size: number for size, number in table["captions"]})
    index = ShardIndex(shards, locations, io.below(path.parent, table["data"]), captions)
    _verify(index)
    return index


def _is_count(number: object) -> bool:
    return isinstance(number, int) and 0 < number < 2**63


def _is_row(row: object) -> bool:
    """Return True for a mapping with the fields of `Shard`, in the form that JSON gives them."""
    if not isinstance(row, dict) or row.keys() != Shard.__dataclass_fields__.keys():
        return False
    state = row["state"] if isinstance(row["state"], list) and len(row["state"]) == 2 else [None]
    numbers = [row["bytes"], *state, *(row[name] for name in ("count", "key_start", "key_bytes", "duplicates"))]
    bounds = [(-1, 2**63)] * 2 + [(0, 2**63)] + [(0, MOST)] * 4
    return all(isinstance(row[name], str) for name in ("name", "digest")) and all(
        type(number) is int and low <= number < high for number, (low, high) in zip(numbers, bounds, strict=False)
    )


def _verify(index: ShardIndex) -> None:
    """Raise DamagedFileError unless the data file has its size, and the records and keys that the digests describe.

    In a file larger than _VERIFIED_BYTES, shards at equal distances are verified.
    """
    with io.readable(index.data, io.ANY_SIZE, REMEDY) as file:
        size = file.seek(0, os.SEEK_END)
        expected = index.samples * RECORD.itemsize + sum(shard.key_bytes for shard in index.shards)
        if size != expected:
            raise io.DamagedFileError(index.data, f"has {size} bytes, not {expected}", REMEDY)
        for number in range(0, len(index.shards), 1 + size // _VERIFIED_BYTES):
            shard = index.shards[number]
            file.seek(int(index.starts[number]) * RECORD.itemsize)
            records = file.read(shard.count * RECORD.itemsize)
            file.seek(index.samples * RECORD.itemsize + shard.key_start)
            if shard.digest != digest_of(file.read(shard.key_bytes), records):
                raise io.DamagedFileError(index.data, f"has damaged records or keys of {shard.name}", REMEDY)


def _read_keys(index: ShardIndex, shard: int) -> list[str]:
    return split_keys(read_key_bytes(index, shard), index.shards[shard].count)
