"""Remote shards are fetched while the windows before them are being read."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence

from clipzoo.data.plan.plan import Plan
from clipzoo.data.shards.files import ShardFiles
from clipzoo.data.shards.index import ShardIndex
from clipzoo.data.shards.sources import is_remote

_THREADS = 4


class Ahead:
    """Call `reached` after every step: shards of the step's window and of the next are brought into the cache."""

    def __init__(self, plan: Plan, indexes: Sequence[ShardIndex], files: ShardFiles) -> None:
        self._plan, self._indexes, self._files = plan, indexes, files
        self._asked: set[tuple[int, int]] = set()
        self._queue: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._closed = False
        self._remote = any(is_remote(location) for index in indexes for location in index.locations)
        if self._remote:
            for _ in range(_THREADS):
                threading.Thread(target=self._fetch, name="ahead", daemon=True).start()

    def reached(self, step: int) -> None:
        if not self._remote:
            return
        upcoming = self._plan.upcoming_shards(step)
        for source, shard in upcoming:
            index = self._indexes[source]
            if (source, shard) not in self._asked and is_remote(index.locations[shard]):
                self._queue.put((index.locations[shard], index.shards[shard].bytes))
        self._asked = set(upcoming)

    def close(self) -> None:
        """Nothing more is fetched; what is being fetched is finished for those who read it later."""
        self._closed = True
        for _ in range(_THREADS):
            self._queue.put(None)

    def _fetch(self) -> None:
        while (wanted := self._queue.get()) is not None:
            if self._closed:
                return
            location, size = wanted
            # Who reads the shard will say what is wrong with it.
            with contextlib.suppress(OSError):
                self._files.path(location, size=size)
