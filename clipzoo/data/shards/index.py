"""The index of a source: how many samples each shard has and where their bytes lie.

Two files: `<digest>.json`, a table of the shards, and the `.bin` that it names: records, then keys.
A sample's id is its source's first id + its shard's start + its position in the shard.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from clipzoo.data.shards.scan import RECORD, split_keys

FOLDER = "clipzoo_index"
VERSION = 1
_SHARDS_NAMED = 8


@dataclass(frozen=True)
class Shard:
    """A row of the table.

    bytes: the archive's size as its samples were listed. state: the file's size and time of change when last looked
    at; a size below `bytes` means that it has been cut since (-1: gone), and its samples keep their ids all the same.
    key_start, key_bytes: its keys among all keys. digest: of keys, offsets and sizes. flaw: what stopped the listing.
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
    """The index of one source's shards, in their order."""

    def __init__(self, shards: Sequence[Shard], locations: Sequence[str], data: Path) -> None:
        self.shards, self.locations, self.data = list(shards), list(locations), data
        self.counts = np.array([shard.count for shard in shards], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])
        self.samples = int(self.starts[-1])
        self._records: np.ndarray | None = None
        self._keys = lru_cache(_SHARDS_NAMED)(partial(_read_keys, self))

    @property
    def records(self) -> np.ndarray:
        """[n] of RECORD, memory-mapped when first asked for, so in the process that reads."""
        if self._records is None:
            self._records = (
                np.memmap(self.data, RECORD, mode="r", shape=(self.samples,)) if self.samples else np.empty(0, RECORD)
            )
        return self._records

    def records_of(self, shard: int) -> np.ndarray:
        """[count] of RECORD."""
        return self.records[self.starts[shard] : self.starts[shard + 1]]

    def keys(self, shard: int) -> list[str]:
        """The names of a shard's samples."""
        return self._keys(shard)

    def locate(self, position: int) -> tuple[int, int]:
        """A sample's number in the source -> (shard, position in it)."""
        shard = int(np.searchsorted(self.starts, position, side="right")) - 1
        return shard, position - int(self.starts[shard])

    @property
    def fingerprint(self) -> str:
        """Of the shards' names, order, sizes and samples."""
        facts = [(shard.name, shard.count, shard.bytes, shard.digest) for shard in self.shards]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def __getstate__(self) -> tuple:
        return self.shards, self.locations, self.data

    def __setstate__(self, state: tuple) -> None:
        self.__init__(*state)  # type: ignore[misc]


def load(locations: Sequence[str], folders: Sequence[Path]) -> ShardIndex | None:
    """The index as it was written last, in the first of the folders that has one; the shards are not looked at."""
    for folder in folders:
        path = folder / f"{set_digest(locations)}.json"
        if path.is_file():
            table = json.loads(path.read_text())
            if table["version"] == VERSION and (folder / table["data"]).is_file():
                shards = [Shard(**{**row, "state": tuple(row["state"])}) for row in table["shards"]]
                return ShardIndex(shards, locations, folder / table["data"])
    return None


def set_digest(locations: Sequence[str]) -> str:
    """What the index of these shards is called."""
    return hashlib.sha256("\0".join(relative_names(locations)).encode()).hexdigest()[:16]


def relative_names(locations: Sequence[str]) -> list[str]:
    """Relative to the shards' common folder, so that a set that has moved keeps its index and its fingerprint."""
    if any(location.startswith("pipe:") for location in locations):
        return list(locations)
    folders = [location.rpartition("/")[0] + "/" for location in locations]
    common = os.path.commonprefix(folders).rpartition("/")[0] + "/"
    return [location.removeprefix(common) for location in locations]


def read_key_bytes(index: ShardIndex, number: int) -> bytes:
    """A shard's keys as they lie in the data file."""
    with open(index.data, "rb") as file:
        file.seek(index.samples * RECORD.itemsize + index.shards[number].key_start)
        return file.read(index.shards[number].key_bytes)


def _read_keys(index: ShardIndex, number: int) -> list[str]:
    return split_keys(read_key_bytes(index, number), index.shards[number].count)
