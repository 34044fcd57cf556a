"""Index of a source: number of samples of every shard, and the position of their bytes.

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

from clipzoo.data.shards.scan import RECORD, split_keys

FOLDER = "clipzoo_index"
VERSION = 1
_CACHED_SHARDS = 8


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
    """Index of the shards of one source, in their order. keys(shard): keys of a shard's samples."""

    def __init__(self, shards: Sequence[Shard], locations: Sequence[str], data: Path) -> None:
        self.shards, self.locations, self.data = list(shards), list(locations), data
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

    def __reduce__(self) -> tuple[type[ShardIndex], tuple[list[Shard], list[str], Path]]:
        return ShardIndex, (self.shards, self.locations, self.data)


def load(locations: Sequence[str], folders: Sequence[Path]) -> ShardIndex | None:
    """Read the last written index from the first of the folders that has one; the shards are not checked."""
    for folder in folders:
        path = folder / f"{locations_digest(locations)}.json"
        if path.is_file():
            table = json.loads(path.read_text())
            if table["version"] == VERSION and (folder / table["data"]).is_file():
                shards = [Shard(**{**row, "state": tuple(row["state"])}) for row in table["shards"]]
                return ShardIndex(shards, locations, folder / table["data"])
    return None


def locations_digest(locations: Sequence[str]) -> str:
    """Return the file name, without suffix, of the index of these shards."""
    return hashlib.sha256("\0".join(relative_names(locations)).encode()).hexdigest()[:16]


def relative_names(locations: Sequence[str]) -> list[str]:
    """Return names relative to the common folder: index and fingerprint stay valid when the folder is moved."""
    if any(location.startswith("pipe:") for location in locations):
        return list(locations)
    folders = [location.rpartition("/")[0] + "/" for location in locations]
    common = os.path.commonprefix(folders).rpartition("/")[0] + "/"
    return [location.removeprefix(common) for location in locations]


def read_key_bytes(index: ShardIndex, shard: int) -> bytes:
    """Read the keys of a shard as they are stored in the data file."""
    with open(index.data, "rb") as file:
        file.seek(index.samples * RECORD.itemsize + index.shards[shard].key_start)
        return file.read(index.shards[shard].key_bytes)


def _read_keys(index: ShardIndex, shard: int) -> list[str]:
    return split_keys(read_key_bytes(index, shard), index.shards[shard].count)
