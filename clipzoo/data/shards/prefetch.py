"""Download of remote shards before they are needed."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Sequence

from clipzoo.data.plan.plan import Plan
from clipzoo.data.shards.cache import ShardCache
from clipzoo.data.shards.index import ShardIndex
from clipzoo.data.shards.locations import is_remote
from clipzoo.errors import ConfigError, TrainingError

_THREADS = 4


class Prefetcher:
    """Downloads the remote shards of the current window and of the next one. Call `advance` after every step."""

    def __init__(self, plan: Plan, indexes: Sequence[ShardIndex], cache: ShardCache) -> None:
        self._plan, self._indexes, self._cache = plan, indexes, cache
        self._requested: set[tuple[int, int]] = set()
        self._queue: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._closed = False
        self._remote = any(is_remote(location) for index in indexes for location in index.locations)
        if self._remote:
            for _ in range(_THREADS):
                threading.Thread(target=self._download, name="prefetch", daemon=True).start()

    def advance(self, step: int) -> None:
        """Request the shards that are needed after `step`."""
        if not self._remote:
            return
        upcoming = self._plan.upcoming_shards(step)
        for source, shard in upcoming:
            index = self._indexes[source]
            if (source, shard) not in self._requested and is_remote(index.locations[shard]):
                self._queue.put((index.locations[shard], index.shards[shard].bytes))
        self._requested = set(upcoming)

    def close(self) -> None:
        """Stop. A download that has begun is completed in the background."""
        self._closed = True
        for _ in range(_THREADS):
            self._queue.put(None)

    def _download(self) -> None:
        while (request := self._queue.get()) is not None:
            if self._closed:
                return
            location, size = request
            # The reader of the shard reports the error.
            with contextlib.suppress(OSError, ConfigError, TrainingError):
                os.close(self._cache.open(location, size=size))
