"""Read captions and encoded images from shards, and download remote shards ahead of their use."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache, partial

from clipzoo.data.captions import StoredSample, TarSample
from clipzoo.data.faults import BadSampleError
from clipzoo.data.index import ShardIndex
from clipzoo.data.locations import ShardCache, is_remote
from clipzoo.data.plan import Plan
from clipzoo.data.tables.formats import JoinedTable, OpenTable, TableSample
from clipzoo.errors import ConfigError, TrainingError

_OPEN_SHARDS = 64
_DOWNLOAD_THREADS = 4


class ShardReader:
    """Reads samples at random; the most recently used shards stay open.

    joined: a table with further values by uid. uid_key: as in ShardDataset.
    """

    def __init__(self, cache: ShardCache, joined: JoinedTable | None = None, uid_key: str | None = None) -> None:
        self._cache, self._joined, self._uid_key = cache, joined, uid_key
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        self._table = lru_cache(_OPEN_SHARDS)(partial(open_table, cache))

    def sample(self, index: ShardIndex, shard: int, position: int) -> StoredSample:
        """Return a sample, which is read on access. Raises BadSampleError."""
        record = index.records[index.starts[shard] + position]
        sample: StoredSample
        if index.tables is None:
            sample = TarSample(self._open(index, shard), record)
        else:
            sample = TableSample(self._table(index, shard), int(record["image_offset"]) - 1)
        if self._joined is not None:
            sample.joined = partial(self._joined.value, sample.uid(self._uid_key) or index.keys(shard)[position])
        return sample

    def _open(self, index: ShardIndex, shard: int) -> int:
        """Return a descriptor of the shard. Raises BadSampleError if it is missing or differs from the index."""
        location = index.locations[shard]
        if location in self._descriptors:
            self._descriptors.move_to_end(location)
            return self._descriptors[location]
        entry = index.shards[shard]
        try:
            descriptor = self._cache.open(location, size=entry.bytes)
        except OSError as error:
            raise BadSampleError("shard_missing", f"{error.strerror or error}: {location}") from error
        size = os.fstat(descriptor).st_size
        # A shard that is truncated according to the index is read up to its end.
        if size not in (entry.bytes, entry.state[0]):
            os.close(descriptor)
            raise BadSampleError("shard_changed", f"{location} has {size} bytes, {entry.bytes} when it was indexed")
        self._descriptors[location] = descriptor
        if len(self._descriptors) > _OPEN_SHARDS:
            os.close(self._descriptors.popitem(last=False)[1])
        return descriptor


def open_table(cache: ShardCache, index: ShardIndex, shard: int) -> OpenTable:
    """Open a table as it was indexed. Raises BadSampleError."""
    assert index.tables is not None
    return index.tables.open(cache, index.locations[shard], index.shards[shard].state)


class Prefetcher:
    """Makes local copies of the shards of the current window and of the next one. Call `advance` after every step.

    Remote shards are downloaded; tables that need a copy are decoded.
    """

    def __init__(self, plan: Plan, indexes: Sequence[ShardIndex], cache: ShardCache) -> None:
        self._plan, self._indexes, self._cache = plan, indexes, cache
        self._requested: set[tuple[int, int]] = set()
        self._queue: queue.SimpleQueue[tuple[ShardIndex, int] | None] = queue.SimpleQueue()
        self._closed = False
        self._remote = any(_needs_copy(index, shard) for index in indexes for shard in range(len(index.locations)))
        if self._remote:
            for _ in range(_DOWNLOAD_THREADS):
                threading.Thread(target=self._download, name="prefetch", daemon=True).start()

    def advance(self, step: int) -> None:
        """Request the shards that are needed after `step`."""
        if not self._remote:
            return
        upcoming = self._plan.upcoming_shards(step)
        for source, shard in upcoming:
            index = self._indexes[source]
            if (source, shard) not in self._requested and _needs_copy(index, shard):
                self._queue.put((index, shard))
        self._requested = set(upcoming)

    def close(self) -> None:
        """Stop. A download that has begun is completed in the background."""
        self._closed = True
        for _ in range(_DOWNLOAD_THREADS):
            self._queue.put(None)

    def _download(self) -> None:
        while (request := self._queue.get()) is not None and not self._closed:
            index, shard = request
            # The reader of the shard reports the error.
            with contextlib.suppress(OSError, ConfigError, TrainingError, BadSampleError):
                if index.tables is None:
                    os.close(self._cache.open(index.locations[shard], size=index.shards[shard].bytes))
                else:
                    open_table(self._cache, index, shard)


def _needs_copy(index: ShardIndex, shard: int) -> bool:
    location = index.locations[shard]
    return is_remote(location) or (index.tables is not None and index.tables.format_of(location) != "arrow")
