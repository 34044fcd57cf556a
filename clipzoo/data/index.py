"""The index of a source: how many samples each shard has and where their bytes lie, built once and kept.

Two files: `<digest>.json`, a table of the shards, and the `.bin` that it names: records, then keys.
A sample's id is its source's first id + its shard's start + its position in the shard.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from clipzoo.data.files import MISSING, ShardFiles
from clipzoo.data.scan import RECORD, Scan, scan_shard
from clipzoo.errors import ConfigError

FOLDER = "clipzoo_index"
_VERSION = 1
_SHARDS_A_PROCESS = 8
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
        self._keys = lru_cache(_SHARDS_NAMED)(partial(_split_keys, self))

    @property
    def records(self) -> np.ndarray:
        """[n] of RECORD, memory-mapped when first asked for, so in the process that reads."""
        if self._records is None:
            self._records = (
                np.memmap(self.data, RECORD, mode="r", shape=(self.samples,)) if self.samples else np.empty(0, RECORD)
            )
        return self._records

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
        path = folder / f"{_digest(locations)}.json"
        if path.is_file():
            table = json.loads(path.read_text())
            if table["version"] == _VERSION and (folder / table["data"]).is_file():
                shards = [Shard(**{**row, "state": tuple(row["state"])}) for row in table["shards"]]
                return ShardIndex(shards, locations, folder / table["data"])
    return None


def load_or_build(
    locations: Sequence[str], files: ShardFiles, folders: Sequence[Path], processes: int | None = None
) -> ShardIndex:
    """The index of these shards, up to date: only shards that are new or have changed are read.

    folders: it is written to the first that allows it. processes: at most so many read; None for one a core.
    """
    known = load(locations, folders)
    states = files.states(locations)
    before: list[Shard | None] = list(known.shards) if known else [None] * len(locations)
    stale = [
        number
        for number, (old, state) in enumerate(zip(before, states, strict=True))
        if old is None or (state is not None and state != old.state)
    ]
    if known and not stale:
        return known
    names = _names(locations)
    scans = _scan_all([locations[number] for number in stale], files, processes)
    shards: list[Shard] = [row for row in before if row is not None] if known else [None] * len(locations)  # type: ignore[list-item]
    fresh: dict[int, Scan] = {}
    for number, scan in zip(stale, scans, strict=True):
        old, state = before[number], states[number] or (scan.bytes, 0)
        if known and old and scan.flaw and _is_start_of(scan, known, number):
            shards[number] = replace(old, state=state, flaw=scan.flaw)
        else:
            shards[number] = _row(names[number], scan, state)
            fresh[number] = scan
    refusals = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return _write(folder, shards, locations, fresh, known)
        except OSError as error:
            refusals.append(f"{folder} ({error.strerror})")
    raise ConfigError(
        f"the index of {locations[0]} and its like can be written nowhere: {', '.join(refusals) or 'no folder given'}; "
        "set data.index_folder to a folder of yours"
    )


def _digest(locations: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(_names(locations)).encode()).hexdigest()[:16]


def _names(locations: Sequence[str]) -> list[str]:
    """Relative to the shards' common folder, so that a set that has moved keeps its index and its fingerprint."""
    if any(location.startswith("pipe:") for location in locations):
        return list(locations)
    folders = [location.rpartition("/")[0] + "/" for location in locations]
    common = os.path.commonprefix(folders).rpartition("/")[0] + "/"
    return [location.removeprefix(common) for location in locations]


def _scan_all(locations: Sequence[str], files: ShardFiles, processes: int | None) -> list[Scan]:
    scan: Callable[[str], Scan] = partial(_scan, files)
    count = min(processes or os.cpu_count() or 1, len(locations) // _SHARDS_A_PROCESS)
    if count < 2:
        return [scan(location) for location in locations]
    # Not forked: the process may hold CUDA, NCCL and their threads by now.
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        return list(pool.map(scan, locations, chunksize=4))


def _scan(files: ShardFiles, location: str) -> Scan:
    try:
        path = files.path(location)
    except OSError as error:
        return Scan(np.empty(0, RECORD), [], MISSING[0], flaw=f"unreadable: {error}")
    return scan_shard(path)


def _is_start_of(scan: Scan, known: ShardIndex, number: int) -> bool:
    """Whether the scan found nothing but the first of the samples known of this shard; its last may lack members."""
    count, start = len(scan.records), int(known.starts[number])
    if count > known.shards[number].count or scan.keys != known.keys(number)[:count]:
        return False
    before = known.records[start : start + count]
    if not np.array_equal(scan.records[:-1], before[:-1]):
        return False
    return not count or all(new in (0, old) for new, old in zip(scan.records[-1], before[-1], strict=True))


def _row(name: str, scan: Scan, state: tuple[int, int]) -> Shard:
    keys = _key_bytes(scan)
    digest = hashlib.sha256(keys + scan.records.tobytes()).hexdigest()[:16]
    return Shard(name, len(scan.records), scan.bytes, state, 0, len(keys), digest, scan.duplicates, scan.flaw)


def _write(
    folder: Path, shards: list[Shard], locations: Sequence[str], fresh: dict[int, Scan], known: ShardIndex | None
) -> ShardIndex:
    """Atomic, data before table: a reader finds the old index or the new one, whatever dies in between."""

    def parts() -> Iterator[bytes]:
        for number in range(len(shards)):
            if number in fresh:
                yield fresh[number].records.tobytes()
            elif known:
                yield known.records[known.starts[number] : known.starts[number + 1]].tobytes()
        for number in range(len(shards)):
            yield _key_bytes(fresh[number]) if number in fresh else _read_keys(known, number) if known else b""

    key_start = 0
    for number, shard in enumerate(shards):
        shards[number] = replace(shard, key_start=key_start)
        key_start += shard.key_bytes
    content = hashlib.sha256()
    temporary = folder / f".{_digest(locations)}.{os.uname().nodename}.{os.getpid()}"
    with open(temporary, "wb") as file:
        for part in parts():
            content.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    # Named by its content: a run that holds an older one goes on undisturbed.
    data = folder / f"{_digest(locations)}-{content.hexdigest()[:12]}.bin"
    os.replace(temporary, data)
    table = {"version": _VERSION, "data": data.name, "shards": [asdict(shard) for shard in shards]}
    temporary.write_text(json.dumps(table))
    os.replace(temporary, folder / f"{_digest(locations)}.json")
    return ShardIndex(shards, locations, data)


def _key_bytes(scan: Scan) -> bytes:
    return "\0".join(scan.keys).encode()


def _split_keys(index: ShardIndex, number: int) -> list[str]:
    return _read_keys(index, number).decode().split("\0") if index.shards[number].count else []


def _read_keys(index: ShardIndex, number: int) -> bytes:
    with open(index.data, "rb") as file:
        file.seek(index.samples * RECORD.itemsize + index.shards[number].key_start)
        return file.read(index.shards[number].key_bytes)
