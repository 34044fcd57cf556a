"""Read captions and encoded images from shards, and download remote shards ahead of their use."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import IO, Any

import numpy as np

from clipzoo.data.captions import StoredSample, TarSample
from clipzoo.data.faults import BadSampleError
from clipzoo.data.index import Shard, ShardIndex
from clipzoo.data.locations import ShardCache, copy_name, copy_ranges, is_remote, states
from clipzoo.data.plan import Nodes, Plan
from clipzoo.data.tables.formats import JoinedTable, Rules
from clipzoo.data.tar import ROLES, TARS
from clipzoo.errors import ConfigError, TrainingError

_OPEN_SHARDS = 64
_DOWNLOAD_THREADS = 4
_SAMPLE_THREADS = 16
_KNOWN_SIZES = 4096
_GAP_BYTES = 2**20
"""Bytes between two members from which they are requested separately."""
Span = tuple[ShardIndex, int, int, int, bool]
"""Index, shard, first and end position of samples; whether they are this node's segment, which is kept in the cache."""


class ShardReader:
    """Reads samples at random; the most recently used shards stay open. Other processes open their own.

    rules: how the shards are read. joined: a table with further values by uid. nodes: a remote shard is copied only in
    this node's segment, and samples outside it are requested singly; None copies whole shards.
    """

    def __init__(
        self, cache: ShardCache, rules: Rules = TARS, joined: JoinedTable | None = None, nodes: Nodes | None = None
    ) -> None:
        self.cache, self.rules, self._joined, self._nodes = cache, rules, joined, nodes
        self._opened = lru_cache(_OPEN_SHARDS)(self.open)
        self._opened_span = lru_cache(_OPEN_SHARDS)(self._open_span)
        self._fetched: dict[Span, tuple[IO[bytes], int]] = {}
        self._size = lru_cache(_KNOWN_SIZES)(_remote_size)

    def __reduce__(self) -> tuple[type[ShardReader], tuple[Any, ...]]:
        return ShardReader, (self.cache, self.rules, self._joined, self._nodes)

    def sample(self, index: ShardIndex, shard: int, position: int) -> StoredSample:
        """Return a sample, which is read on access. Raises BadSampleError."""
        record = index.records[index.starts[shard] + position]
        sample: StoredSample
        if (span := self._span(index, shard, position)) is not None:
            file, first = self._fetched.get(span) or self._opened_span(*span)
            sample = TarSample(file, record, first)
        else:
            sample = self.rules.sample(self._opened(index.locations[shard], index.shards[shard]), record)
        if self._joined is not None:
            sample.joined = partial(self._joined.value, sample.uid(self.rules.uid_key) or index.keys(shard)[position])
        return sample

    def open(self, location: str, shard: Shard) -> Any:
        """Return an open table or tar, from a copy if needed. Raises BadSampleError if it is missing or has changed."""
        return self.rules.open(self.cache, location, shard.state, shard.bytes)

    def copy(self, index: ShardIndex, shard: int) -> None:
        """Make the local copy of a shard, or of this node's segment. Raises as `open` does."""
        if self._nodes is None or not is_remote(index.locations[shard]):
            self.open(index.locations[shard], index.shards[shard])
            return
        first, end = self._nodes.segment(shard, int(index.counts[shard]))
        if first < end:
            self._open_span(index, shard, first, end, True)

    def fetch(self, samples: Iterable[tuple[ShardIndex, int, int]]) -> None:
        """Request those of the next samples that are in other nodes' segments, in parallel. `sample` reports errors."""
        self._fetched = {}

        def request(span: Span) -> None:
            with contextlib.suppress(ConfigError, TrainingError, BadSampleError):
                self._fetched[span] = self._open_span(*span)

        spans = (self._span(*sample) for sample in samples)
        with ThreadPoolExecutor(_SAMPLE_THREADS) as pool:
            list(pool.map(request, [span for span in spans if span is not None and not span[-1]]))

    def _span(self, index: ShardIndex, shard: int, position: int) -> Span | None:
        """Return the part of a remote shard that is read for a sample; None if whole shards are read."""
        if self._nodes is None or not is_remote(index.locations[shard]):
            return None
        first, end = self._nodes.segment(shard, int(index.counts[shard]))
        is_own = first <= position < end
        return (index, shard, first, end, True) if is_own else (index, shard, position, position + 1, False)

    def _open_span(self, index: ShardIndex, shard: int, first: int, end: int, is_kept: bool) -> tuple[IO[bytes], int]:
        """Return a file with samples first .. end - 1 of a remote shard, and its position in the shard.

        is_kept: the file is in the cache, not in memory. Raises as `open` does.
        """
        location, row = index.locations[shard], index.shards[shard]
        records, ranges = index.records_of(shard)[first:end], list[tuple[int, int]]()
        offsets = np.concatenate([records[f"{role}_offset"] for role in ROLES]).astype(np.int64)
        ends = offsets + np.concatenate([records[f"{role}_size"] for role in ROLES])
        if len(order := np.argsort(offsets)[(offsets == 0).sum() :]):
            offsets, ends = offsets[order], np.maximum.accumulate(ends[order])
            gaps = np.flatnonzero(offsets[1:] - ends[:-1] > _GAP_BYTES)
            ranges = list(zip(offsets[[0, *gaps + 1]].tolist(), ends[[*gaps, -1]].tolist(), strict=True))
        size = partial(self._size, location, row)
        file: IO[bytes]
        try:
            if is_kept:
                # A copy is reused if the shard had one of its known sizes then.
                start, stop = (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)
                lengths = {max(0, min(stop, known) - start) for known in (row.bytes, row.state[0])}
                name = copy_name(location, repr((location, ranges)))
                write = partial(copy_ranges, location, ranges, size)
                file = os.fdopen(self.cache.copy(name, write, lengths.__contains__), "rb")
            else:
                file = os.fdopen(os.memfd_create("sample"), "w+b", buffering=0)
                copy_ranges(location, ranges, size, file)
        except OSError as error:
            raise BadSampleError("shard_missing", f"{error.strerror or error}: {location}") from error
        return file, ranges[0][0] if ranges else 0


def _remote_size(location: str, shard: Shard) -> int:
    """Return the present size of a remote shard. Raises BadSampleError if it is missing or has changed."""
    (state,) = states([location])
    size = shard.bytes if state is None else state[0]
    if size < 0:
        raise BadSampleError("shard_missing", f"no such file: {location}")
    if size not in (shard.bytes, shard.state[0]):
        raise BadSampleError("shard_changed", f"{location} has {size} bytes, {shard.bytes} when it was indexed")
    return size


class Prefetcher:
    """Makes local copies of the shards of the current window and of the next one. Call `advance` after every step."""

    def __init__(self, plan: Plan, indexes: Sequence[ShardIndex], reader: ShardReader) -> None:
        self._plan, self._indexes, self._reader = plan, indexes, reader
        self._requested: set[tuple[int, int]] = set()
        self._queue: queue.SimpleQueue[tuple[ShardIndex, int] | None] = queue.SimpleQueue()
        self._closed = False
        self._remote = any(reader.rules.needs_copy(location) for index in indexes for location in index.locations)
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
            if (source, shard) not in self._requested and self._reader.rules.needs_copy(location):
                self._queue.put((self._indexes[source], shard))
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
                self._reader.copy(*request)
