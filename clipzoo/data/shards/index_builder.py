"""Building an index and keeping it up to date."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from clipzoo import io
from clipzoo.data.children import map_in_children
from clipzoo.data.shards.cache import ShardCache
from clipzoo.data.shards.captions import CaptionCounts
from clipzoo.data.shards.index import (
    VERSION,
    Shard,
    ShardIndex,
    digest_of,
    index_name,
    load,
    read_key_bytes,
    relative_names,
)
from clipzoo.data.shards.locations import State, is_remote, states
from clipzoo.data.shards.scan import RECORD, Scan, scan_descriptor, scan_shard, unreadable_shard
from clipzoo.errors import ConfigError

_SHARDS_PER_PROCESS = 8


def load_or_build(
    locations: Sequence[str],
    cache: ShardCache,
    folders: Sequence[Path],
    processes: int | None = None,
    caption_key: str | None = None,
) -> ShardIndex:
    """Return an up-to-date index of the shards; only new and changed shards are read.

    folders: a new index is written to the first of them that is writable. processes: limit of the reading processes;
    None for one per core. caption_key: of the captions that are counted, see `read_captions`. Raises ConfigError if no
    folder is writable.
    """
    known = load(locations, folders, caption_key)
    now = states(locations)
    before: list[Shard | None] = list(known.shards) if known else [None] * len(locations)
    stale = [_is_stale(shard, state) for shard, state in zip(before, now, strict=True)]
    if known and not any(stale):
        return known
    stale_locations = [location for location, read in zip(locations, stale, strict=True) if read]
    scans = _scan_all(stale_locations, cache, processes, caption_key)
    names = relative_names(locations)
    name = index_name(locations, caption_key)
    with _open_folder(folders, locations[0]) as folder, _Writer(folder, name) as writer:
        for number, (shard, state) in enumerate(zip(before, now, strict=True)):
            scan = next(scans) if stale[number] else None
            if scan is None or (known and scan.flaw and _is_start_of(scan, known, number)):
                assert known and shard
                row = replace(shard, state=state or shard.state, flaw=scan.flaw) if scan else shard
                writer.add(row, known.records_of(number).tobytes(), read_key_bytes(known, number))
            else:
                row = _row(names[number], scan, state or (scan.bytes, 0))
                writer.add(row, scan.records.tobytes(), scan.key_bytes)
        # A source without samples, such as a mistyped one, leaves no files behind.
        if not any(shard.count for shard in writer.shards):
            return ShardIndex(writer.shards, locations, folder / "nothing", CaptionCounts())
        return ShardIndex(writer.shards, locations, *writer.finish())


def _is_stale(known: Shard | None, state: State | None) -> bool:
    if known is None:
        return True
    # The state of a pipe is unknown until it is read: an intact shard is trusted.
    return known.flaw is not None if state is None else state != known.state


def _scan_all(
    locations: Sequence[str], cache: ShardCache, processes: int | None, caption_key: str | None
) -> Iterator[Scan]:
    scan: Callable[[str], Scan] = partial(_scan, cache, caption_key)
    count = min(processes or os.cpu_count() or 1, len(locations) // _SHARDS_PER_PROCESS)
    if count < 2:
        yield from map(scan, locations)
        return
    yield from map_in_children(scan, locations, count, chunk=4)


def _scan(cache: ShardCache, caption_key: str | None, location: str) -> Scan:
    if not is_remote(location):
        return scan_shard(location, caption_key)
    try:
        descriptor = cache.open(location)
    except OSError as error:
        return unreadable_shard(f"unreadable: {error}")
    try:
        return scan_descriptor(descriptor, caption_key)
    finally:
        os.close(descriptor)


def _is_start_of(scan: Scan, known: ShardIndex, number: int) -> bool:
    """Return True if the scan holds only the first known samples of this shard; its last one may lack members."""
    count = len(scan.records)
    if count > known.shards[number].count or scan.keys != known.keys(number)[:count]:
        return False
    before = known.records_of(number)[:count]
    if not np.array_equal(scan.records[:-1], before[:-1]):
        return False
    return not count or all(new in (0, old) for new, old in zip(scan.records[-1], before[-1], strict=True))


def _row(name: str, scan: Scan, state: State) -> Shard:
    digest = digest_of(scan.key_bytes, scan.records.tobytes())
    return Shard(name, len(scan.records), scan.bytes, state, 0, len(scan.key_bytes), digest, scan.duplicates, scan.flaw)


@contextmanager
def _open_folder(folders: Sequence[Path], example: str) -> Iterator[Path]:
    """Yield the first writable folder. A folder that is created here and stays empty is removed."""
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
                with suppress(OSError):  # not empty
                    folder.rmdir()
        return
    raise ConfigError(
        f"the index of {example} and the other shards cannot be written: {', '.join(refusals) or 'no folder given'}; "
        "set data.index_folder to a folder that you can write to"
    )


class _Writer:
    """Writes an index shard by shard, with memory independent of the number of samples.

    The writes are atomic, data before table: a reader sees the old index or the new one, whatever is interrupted. The
    data file is named by its content, so a run that reads an older one is not disturbed.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self.shards: list[Shard] = []
        self._folder, self._digest = folder, digest
        self._key_start = 0
        self._content = hashlib.sha256()

    def __enter__(self) -> _Writer:
        with io.explained(self._folder):
            # Without a name: a kill leaves nothing.
            self._files = [tempfile.TemporaryFile(dir=self._folder) for _ in range(2)]  # noqa: SIM115 - closed on exit
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            with suppress(OSError):  # a full disk, of which `add` or `finish` has told
                file.close()

    def add(self, shard: Shard, records: bytes, keys: bytes) -> None:
        self.shards.append(replace(shard, key_start=self._key_start))
        self._key_start += len(keys)
        for file, content in zip(self._files, (records, keys), strict=True):
            with io.explained(self._folder):
                file.write(content)
            self._content.update(content)

    def finish(self) -> tuple[Path, CaptionCounts]:
        """Write the table; return the path of the data file, and how often captions repeat."""
        data = self._folder / f"{self._digest}-{self._content.hexdigest()[:12]}.bin"
        with io.whole(data) as target:
            for file in self._files:
                file.seek(0)
                shutil.copyfileobj(file, target)
        samples = sum(shard.count for shard in self.shards)
        captions = CaptionCounts.of(np.memmap(data, RECORD, mode="r", shape=(samples,))["caption"])
        table = {
            "version": VERSION, "data": data.name, "captions": list(captions.occurrences.items()),
            "shards": [asdict(shard) for shard in self.shards],
        }  # fmt: skip
        io.write_whole(self._folder / f"{self._digest}.json", json.dumps(table))
        return data, captions
