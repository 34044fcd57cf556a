"""Making an index and keeping it up to date."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import IO

import numpy as np

from clipzoo.data.shards.files import MISSING, ShardFiles
from clipzoo.data.shards.index import VERSION, Shard, ShardIndex, load, read_key_bytes, relative_names, set_digest
from clipzoo.data.shards.scan import RECORD, Scan, scan_shard
from clipzoo.errors import ConfigError

_SHARDS_A_PROCESS = 8


def load_or_build(
    locations: Sequence[str], files: ShardFiles, folders: Sequence[Path], processes: int | None = None
) -> ShardIndex:
    """The index of these shards, up to date: only shards that are new or have changed are read.

    folders: it is written to the first that allows it. processes: at most so many read; None for one a core.
    """
    known = load(locations, folders)
    states = files.states(locations)
    before: list[Shard | None] = list(known.shards) if known else [None] * len(locations)
    stale = [_is_stale(old, state) for old, state in zip(before, states, strict=True)]
    if known and not any(stale):
        return known
    scans = _scan_all([each for each, wanted in zip(locations, stale, strict=True) if wanted], files, processes)
    names = relative_names(locations)
    with _open_folder(folders, locations[0]) as folder, _Writer(folder, set_digest(locations)) as writer:
        for number, (old, state) in enumerate(zip(before, states, strict=True)):
            scan = next(scans) if stale[number] else None
            if scan is None or (known and scan.flaw and _is_start_of(scan, known, number)):
                assert known and old
                row = replace(old, state=state or old.state, flaw=scan.flaw) if scan else old
                writer.add(row, known.records_of(number).tobytes(), read_key_bytes(known, number))
            else:
                row = _row(names[number], scan, state or (scan.bytes, 0))
                writer.add(row, scan.records.tobytes(), scan.key_bytes)
        # A set without a sample, such as one that is mistyped, leaves nothing behind.
        holds = any(shard.count for shard in writer.shards)
        return ShardIndex(writer.shards, locations, writer.finish() if holds else folder / "nothing")


def _is_stale(known: Shard | None, state: tuple[int, int] | None) -> bool:
    if known is None:
        return True
    # Of a pipe nothing can be told beforehand: what was whole is trusted until it is read.
    return known.flaw is not None if state is None else state != known.state


def _scan_all(locations: Sequence[str], files: ShardFiles, processes: int | None) -> Iterator[Scan]:
    scan: Callable[[str], Scan] = partial(_scan, files)
    count = min(processes or os.cpu_count() or 1, len(locations) // _SHARDS_A_PROCESS)
    if count < 2:
        yield from map(scan, locations)
        return
    # Not forked: the process may hold CUDA, NCCL and their threads by now.
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        yield from pool.map(scan, locations, chunksize=4)


def _scan(files: ShardFiles, location: str) -> Scan:
    try:
        path = files.path(location)
    except OSError as error:
        return Scan(np.empty(0, RECORD), b"", MISSING[0], flaw=f"unreadable: {error}")
    return scan_shard(path)


def _is_start_of(scan: Scan, known: ShardIndex, number: int) -> bool:
    """Whether the scan found nothing but the first of the samples known of this shard; its last may lack members."""
    count = len(scan.records)
    if count > known.shards[number].count or scan.keys != known.keys(number)[:count]:
        return False
    before = known.records_of(number)[:count]
    if not np.array_equal(scan.records[:-1], before[:-1]):
        return False
    return not count or all(new in (0, old) for new, old in zip(scan.records[-1], before[-1], strict=True))


def _row(name: str, scan: Scan, state: tuple[int, int]) -> Shard:
    digest = hashlib.sha256(scan.key_bytes + scan.records.tobytes()).hexdigest()[:16]
    return Shard(name, len(scan.records), scan.bytes, state, 0, len(scan.key_bytes), digest, scan.duplicates, scan.flaw)


@contextmanager
def _open_folder(folders: Sequence[Path], example: str) -> Iterator[Path]:
    """The first of the folders that can be written."""
    refusals = []
    for folder in folders:
        new = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".{os.uname().nodename}.{os.getpid()}.probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            refusals.append(f"{folder} ({error.strerror})")
            continue
        try:
            yield folder
        finally:
            if new:
                with suppress(OSError):  # unless something was written
                    folder.rmdir()
        return
    raise ConfigError(
        f"the index of {example} and its like can be written nowhere: {', '.join(refusals) or 'no folder given'}; "
        "set data.index_folder to a folder of yours"
    )


class _Writer:
    """Writes an index shard by shard, so that memory does not grow with the set.

    Atomic, data before table: a reader finds the old index or the new one, whatever dies in between. The data are named
    by their content: a run that reads older ones goes on undisturbed.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self.shards: list[Shard] = []
        self._folder, self._digest = folder, digest
        self._part = folder / f".{digest}.{os.uname().nodename}.{os.getpid()}"
        self._keys = self._part.with_name(self._part.name + ".keys")
        self._key_start = 0
        self._content = hashlib.sha256()

    def __enter__(self) -> _Writer:
        self._files: list[IO[bytes]] = [path.open("w+b") for path in (self._part, self._keys)]
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()
        self._part.unlink(missing_ok=True)
        self._keys.unlink(missing_ok=True)

    def add(self, shard: Shard, records: bytes, keys: bytes) -> None:
        self.shards.append(replace(shard, key_start=self._key_start))
        self._key_start += len(keys)
        for file, part in zip(self._files, (records, keys), strict=True):
            file.write(part)
            self._content.update(part)

    def finish(self) -> Path:
        """The data file."""
        records, keys = self._files
        keys.seek(0)
        shutil.copyfileobj(keys, records)
        records.flush()
        os.fsync(records.fileno())
        data = self._folder / f"{self._digest}-{self._content.hexdigest()[:12]}.bin"
        os.replace(self._part, data)
        table = {"version": VERSION, "data": data.name, "shards": [asdict(shard) for shard in self.shards]}
        self._part.write_text(json.dumps(table))
        os.replace(self._part, self._folder / f"{self._digest}.json")
        return data
