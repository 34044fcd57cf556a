"""The order of one source's samples, epoch after epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from clipzoo.data.plan.mixture import Mixture
from clipzoo.data.plan.randomness import generator
from clipzoo.errors import ConfigError

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Consecutive rows. sample_id [k]; epoch [k]: how often the sample's source had been gone through before."""

    sample_id: Ids
    epoch: Ids


class EpochOrder:
    """order(epoch) of one source: shards shuffled, then samples shuffled within windows of `shuffle_window` shards.

    A window is permuted only when it is asked for, so memory and the cost of resuming do not grow with n.
    """

    def __init__(self, counts: Sequence[int], first_id: int, seed: int, source: int, shuffle_window: int) -> None:
        self._counts = np.asarray(counts, dtype=np.int64)
        self._first_ids = first_id + np.concatenate([[0], np.cumsum(self._counts)[:-1]])
        self.samples = int(self._counts.sum())
        self._seed, self._source, self._width = seed, source, shuffle_window
        self._shards = lru_cache(maxsize=2)(self._shuffle_shards)
        self._window = lru_cache(maxsize=3)(self._shuffle_window)

    def part(self, epoch: int, start: int, stop: int) -> Ids:
        """[stop - start] sample ids: positions [start, stop) of the epoch."""
        _, starts = self._shards(epoch)
        parts = []
        window = int(np.searchsorted(starts, start, side="right")) - 1
        while start < stop:
            begin, end = int(starts[window]), int(starts[window + 1])
            if begin < end:
                parts.append(self._window(epoch, window)[start - begin : min(stop, end) - begin])
                start = max(start, min(stop, end))
            window += 1
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def upcoming_shards(self, item: int) -> list[int]:
        """Of item `item` of the stream: the shards of its window and of the next."""
        epoch, position = divmod(item, self.samples)
        shards, starts = self._shards(epoch)
        window = int(np.searchsorted(starts, position, side="right")) - 1
        first = shards[window * self._width : (window + 2) * self._width]
        if (window + 1) * self._width >= len(shards):
            first = np.concatenate([first, self._shards(epoch + 1)[0][: self._width]])
        return first.tolist()

    def __getstate__(self) -> tuple:
        return (
            self._counts,
            int(self._first_ids[0]) if len(self._first_ids) else 0,
            self._seed,
            self._source,
            self._width,
        )

    def __setstate__(self, state: tuple) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def _shuffle_shards(self, epoch: int) -> tuple[Ids, Ids]:
        """The shards' order, and the position at which each window starts, with n at the end."""
        shards = generator("shards", self._seed, epoch, self._source).permutation(len(self._counts))
        ends = np.cumsum(self._counts[shards])
        return shards, np.concatenate([[0], ends[self._width - 1 : -1 : self._width], ends[-1:]])

    def _shuffle_window(self, epoch: int, window: int) -> Ids:
        shards, _ = self._shards(epoch)
        members = shards[window * self._width : (window + 1) * self._width]
        ids = np.concatenate([np.arange(self._counts[s], dtype=np.int64) + self._first_ids[s] for s in members])
        return generator("window", self._seed, epoch, (self._source << 40) + window).permutation(ids)


class Stream:
    """order(0), order(1), ... end to end, with no sample twice in a step.

    Where a step takes the last r entries of one epoch and the first h of the next, entries of the next order that are
    among those r move right behind its first h others. For n >= 2 (r + h) that touches no epoch's tail, so an order
    depends on its own and its predecessor's raw permutation alone; below that it is worked out from epoch 0 on.
    """

    def __init__(self, order: EpochOrder, source: int, mixture: Mixture, global_batch: int) -> None:
        self.order, self._source, self._mixture, self._global_batch = order, source, mixture, global_batch
        shares = mixture.shares
        rows = global_batch if len(shares) == 1 else -(-global_batch * shares[source] // sum(shares)) + 1
        self._most = min(rows, global_batch)
        if order.samples < self._most:
            raise ConfigError(
                f"a batch takes up to {self._most} samples of a source that has {order.samples}, so it would hold one "
                "twice: lower trainer.global_batch, or add to data.shards"
            )
        self._small: tuple[int, Ids] | None = None

    def take(self, start: int, stop: int) -> Rows:
        """Items [start, stop) of the stream."""
        n = self.order.samples
        ids, epochs = [], []
        while start < stop:
            epoch, position = divmod(start, n)
            end = min(n, position + stop - start)
            ids.append(self._part(epoch, position, end))
            epochs.append(np.full(end - position, epoch, dtype=np.int64))
            start += end - position
        empty = [np.empty(0, dtype=np.int64)]
        return Rows(np.concatenate(ids or empty), np.concatenate(epochs or empty))

    def _part(self, epoch: int, start: int, stop: int) -> Ids:
        if self.order.samples < 2 * self._most:
            return self._small_order(epoch)[start:stop]
        tail, head = self._split(epoch)
        zone = tail + head
        if start >= zone or not tail:
            return self.order.part(epoch, start, stop)
        n = self.order.samples
        first = _without_repeats(self.order.part(epoch, 0, zone), self.order.part(epoch - 1, n - tail, n), head)
        return np.concatenate([first[start:stop], self.order.part(epoch, zone, max(stop, zone))])

    def _split(self, epoch: int) -> tuple[int, int]:
        """(r, h) of the step that ends the epoch before and starts this one; (0, 0) if no step holds both."""
        boundary = epoch * self.order.samples
        if boundary == 0:
            return 0, 0
        step = self._mixture.row(self._source, boundary - 1) // self._global_batch
        start = self._mixture.taken(self._source, step * self._global_batch)
        stop = self._mixture.taken(self._source, (step + 1) * self._global_batch)
        return (boundary - start, stop - boundary) if stop > boundary else (0, 0)

    def _small_order(self, epoch: int) -> Ids:
        n = self.order.samples
        if self._small is None or self._small[0] > epoch:
            self._small = 0, self.order.part(0, 0, n)
        known, order = self._small
        while known < epoch:
            known += 1
            tail, head = self._split(known)
            raw = self.order.part(known, 0, n)
            order = _without_repeats(raw, order[n - tail :], head) if tail else raw
        self._small = known, order
        return order


def _without_repeats(order: Ids, tail: Ids, head: int) -> Ids:
    """`order` with its first `head` entries outside `tail` in front, then those of `tail` met on the way, the rest."""
    repeated = np.isin(order, tail)
    scanned = int(np.searchsorted(np.cumsum(~repeated), head)) + 1
    front, conflicts = order[:scanned], repeated[:scanned]
    return np.concatenate([front[~conflicts], front[conflicts], order[scanned:]])
