"""Read captions and encoded images from shards, and download remote shards ahead of their use."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from clipzoo.data.captions import StoredSample, TarSample
from clipzoo.data.faults import BadSampleError
from clipzoo.data.index import Shard, ShardIndex
from clipzoo.data.locations import ShardCache, is_remote
from clipzoo.data.plan import Plan
from clipzoo.data.tables.formats import JoinedTable, TableRules, TableSample
from clipzoo.errors import ConfigError, TrainingError

_OPEN_SHARDS = 64
_DOWNLOAD_THREADS = 4


class ShardReader:
    """Reads samples at random; the most recently used shards stay open.

    tables: how tables are read; None for tars. joined: a table with further values by uid. uid_key: as in ShardDataset.
    """

    def __init__(
        self,
        cache: ShardCache,
        tables: TableRules | None = None,
        joined: JoinedTable | None = None,
        uid_key: str | None = None,
    ) -> None:
        self._cache, self._tables, self._joined, self._uid_key = cache, tables, joined, uid_key
        self._opened = lru_cache(_OPEN_SHARDS)(self.open)

    def sample(self, index: ShardIndex, shard: int, position: int) -> StoredSample:
        """Return a sample, which is read on access. Raises BadSampleError."""
        record = index.records[index.starts[shard] + position]
        opened = self._opened(index.locations[shard], index.shards[shard])
        is_tar, row = self._tables is None, int(record["image_offset"]) - 1
        sample: StoredSample = TarSample(opened, record) if is_tar else TableSample(opened, row)
        if self._joined is not None:
            sample.joined = partial(self._joined.value, sample.uid(self._uid_key) or index.keys(shard)[position])
        return sample

    def open(self, location: str, shard: Shard) -> Any:
        """Return an open table or tar, from a copy if needed. Raises BadSampleError if it is missing or has changed."""
        if self._tables is not None:
            return self._tables.open(self._cache, location, shard.state)
        try:
            file = os.fdopen(self._cache.open(location, size=shard.bytes), "rb")
        except OSError as error:
            raise BadSampleError("shard_missing", f"{error.strerror or error}: {location}") from error
        # Closed with its last sample. A shard that is truncated according to the index is read up to its end.
        if (size := os.fstat(file.fileno()).st_size) not in (shard.bytes, shard.state[0]):
            file.close()
            raise BadSampleError("shard_changed", f"{location} has {size} bytes, {shard.bytes} when it was indexed")
        return file

    def needs_copy(self, location: str) -> bool:
        """Return True if `open` reads a local copy of the shard."""
        return is_remote(location) or (self._tables is not None and self._tables.format_of(location) != "arrow")


class Prefetcher:
    """Makes local copies of the shards of the current window and of the next one. Call `advance` after every step."""

    def __init__(self, plan: Plan, indexes: Sequence[ShardIndex], reader: ShardReader) -> None:
        self._plan, self._indexes, self._reader = plan, indexes, reader
        self._requested: set[tuple[int, int]] = set()
        self._queue: queue.SimpleQueue[tuple[str, Shard] | None] = queue.SimpleQueue()
        self._closed = False
        self._remote = any(reader.needs_copy(location) for index in indexes for location in index.locations)
        if self._remote:
            for _ in range(_DOWNLOAD_THREADS):
                threading.Thread(target=self._download, name="prefetch", daemon=True).start()

    def advance(self, step: int) -> None:
        """Request the shards that are needed after `step`."""
        if not self._remote:
            return
        upcoming = self._plan.upcoming_shards(step)
        for source, shard in upcoming:
            location = self._indexes[source].locations[shard]
            if (source, shard) not in self._requested and self._reader.needs_copy(location):
                self._queue.put((location, self._indexes[source].shards[shard]))
        self._requested = set(upcoming)

    def close(self) -> None:
        """Stop. A download that has begun is completed in the background."""
        self._closed = True
        for _ in range(_DOWNLOAD_THREADS):
            self._queue.put(None)

    def _download(self) -> None:
        while (request := self._queue.get()) is not None and not self._closed:
            # The reader of the shard reports the error.
            with contextlib.suppress(ConfigError, TrainingError, BadSampleError):
                self._reader.open(*request)
