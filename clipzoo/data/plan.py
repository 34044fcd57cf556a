"""Sample order: the sample in every row of every step, a pure function of the seed, known to all ranks and workers.

The stream of a source is order(0), order(1), ..., epoch after epoch of all its samples. Steps cut the streams
regardless of where an epoch ends, so every sample occurs exactly once an epoch and every batch is full.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from clipzoo.errors import ConfigError, number_of

Ids = NDArray[np.int64]
Counts = Sequence[Sequence[int] | Ids]
"""Number of samples of every shard, for each source."""
Purpose = Literal["shards", "window", "augment", "caption", "hard", "box"]
_PURPOSES = {purpose: number for number, purpose in enumerate(get_args(Purpose), start=1)}


def generator(purpose: Purpose, seed: int, epoch: int, index: int, draw: int = 0) -> np.random.Generator:
    """Return a generator for (purpose, seed, epoch, index, draw): the same numbers on every rank, worker and resume."""
    key = np.array([seed % 2**64, _PURPOSES[purpose]], dtype=np.uint64)
    counter = np.array([0, draw, index, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(_Key(key), counter))  # type: ignore[arg-type]


class _Key(ISeedSequence):
    """Gives Philox its key. Philox(key=key) is the same but asks the system for random bytes that it does not use."""

    def __init__(self, key: NDArray[np.uint64]) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: object = None) -> NDArray[np.uint64]:
        return self._key


class Rows(NamedTuple):
    """Consecutive rows of a run. sample_id, epoch: [k] each; epoch counts the completed passes over the source."""

    sample_id: Ids
    epoch: Ids


UNIT = 2**20
"""Units of a weight of 1."""


class Weights(NamedTuple):
    """Expected numbers of times that the samples of a source are seen.

    units: [n] int32, in a pass, at most UNIT. sums: [shards] of the samples of every shard; a multiple of UNIT in all.
    passes: number of passes of an epoch.
    """

    units: NDArray[np.int32]
    sums: Ids
    passes: int

    @property
    def rows(self) -> int:
        """Rows of a pass."""
        return int(self.sums.sum()) // UNIT


class Plan:
    """Sample order of a run: the rows of every step.

    counts: number of samples of every shard, for each source. Sample ids run through the shards in order, 0 .. n - 1.
    weights: how often a sample of the source occurs, relative to other sources. With one source, and with equal
    weights, n rows hold every sample once. Otherwise each source passes through its own epochs at its own pace, every
    sample once an epoch; each step spreads its rows over the sources as evenly as whole numbers allow.
    growth: the number of steps after which samples were appended, and the counts with them, for every growth. The
    epoch of n rows that has begun then is completed without them, and so is every source's own epoch.
    of_samples: weights of the samples of every source, instead of growth. A pass is a systematic sample along its
    permutation: it has a fixed number of rows, no sample twice, and each one as often as its weight on average.

    Raises ConfigError if a batch would hold a sample twice.
    """

    def __init__(
        self,
        counts: Counts,
        weights: Sequence[float],
        seed: int,
        shuffle_window: int,
        global_batch: int,
        growth: Sequence[tuple[int, Counts]] = (),
        of_samples: Sequence[Weights] = (),
    ) -> None:
        self.seed, self.shuffle_window, self.global_batch = seed, shuffle_window, global_batch
        self.of_samples, self.stages = of_samples, list[Stage]()
        row = 0
        for step, sizes in [(0, counts), *growth]:
            if self.stages:
                before = self.stages[-1]
                row += max(0, -(-(step * global_batch - row) // before.samples)) * before.samples
            items = [self.count(source, row) for source in range(len(sizes))]
            samples = [int(np.sum(shards)) for shards in sizes]
            samples = [weighted.passes * weighted.rows for weighted in of_samples] or samples
            shares = [round(weight * 1_000_000) * n for weight, n in zip(weights, samples, strict=not growth)]
            self.stages.append(Stage(row, items, Mixture(shares), sizes, sum(samples)))
        self.samples = self.stages[-1].samples
        ids = first_ids([stage.counts for stage in self.stages])
        self._streams = [Stream(self, source, first) for source, first in enumerate(ids)]

    def rows(self, step: int) -> Rows:
        """Return the rows [global_batch] of a step."""
        first, last = step * self.global_batch, (step + 1) * self.global_batch
        cuts, rows = [first, *(stage.row for stage in self.stages if first < stage.row < last), last], []
        for first, last in pairwise(cuts):
            # These rows are of one stage.
            stage = next(stage for stage in reversed(self.stages) if stage.row <= first)
            parts, times = [], []
            for source, (before, share) in enumerate(zip(stage.items, stage.mixture.shares, strict=True)):
                start, stop = self.count(source, first), self.count(source, last)
                parts.append(self._streams[source].rows(start, stop))
                times.append((2 * np.arange(start - before, stop - before) + 1) / share)
            arrangement = np.argsort(np.concatenate(times), kind="stable")
            rows.append([np.concatenate(columns)[arrangement] for columns in zip(*parts, strict=True)])
        return Rows(*map(np.concatenate, zip(*rows, strict=True)))

    def row(self, source: int, item: int) -> int:
        """Return the row of the run that holds item `item` of the source."""
        stages = (stage for stage in reversed(self.stages) if source < len(stage.items))
        stage = next(stage for stage in stages if stage.items[source] <= item)
        return stage.row + stage.mixture.row(source, item - stage.items[source])

    def count(self, source: int, rows: int) -> int:
        """Return how many items of the source are among the first `rows` rows."""
        stages = (stage for stage in reversed(self.stages) if source < len(stage.items))
        stage = next((stage for stage in stages if stage.row <= rows), None)
        return 0 if stage is None else stage.items[source] + stage.mixture.count(source, rows - stage.row)

    def upcoming_shards(self, step: int) -> list[tuple[int, int]]:
        """Return (source, shard) of the windows in which the step ends, and of the windows after them."""
        rows = (step + 1) * self.global_batch
        return [
            (source, shard)
            for source, stream in enumerate(self._streams)
            for shard in stream.upcoming_shards(max(0, self.count(source, rows) - 1))
        ]


class Stage(NamedTuple):
    """The sources between two growths of the dataset.

    row: first row of the run. items: items of every source in earlier rows. counts: samples of every shard.
    """

    row: int
    items: Sequence[int]
    mixture: Mixture
    counts: Counts
    samples: int


def first_ids(stages: Sequence[Counts]) -> list[Ids]:
    """Return the first sample id of every shard, for each source.

    stages: number of samples of every shard of the sources, first and after each growth. Appended samples follow all
    earlier ones. Only the last shard of a single source can grow.
    """
    ids: list[Ids] = []
    total = 0
    for counts in stages:
        for source, sizes in enumerate(np.asarray(shards, dtype=np.int64) for shards in counts):
            if source == len(ids):
                ids.append(np.empty(0, dtype=np.int64))
            known = len(ids[source])
            total = max(total, int(sizes[:known].sum()))
            ids[source] = np.concatenate([ids[source], total + np.cumsum(sizes[known:]) - sizes[known:]])
            total += int(sizes[known:].sum())
    return ids


@dataclass(frozen=True)
class Mixture:
    """Assigns every row of the run to one of the sources, in proportion to their integer `shares`.

    Item t of source i is due at (2 t + 1) / (2 share_i). Rows take items in the order in which they are due; ties go
    to the source that comes first. The arithmetic is exact at every step.
    """

    shares: Sequence[int]

    def row(self, source: int, item: int) -> int:
        """Return the row of the run that holds item `item` of the source."""
        share = self.shares[source]
        row = item
        for index, other_share in enumerate(self.shares):
            if index < source:
                row += ((2 * item + 1) * other_share - share) // (2 * share) + 1
            elif index > source:
                row += -((share - (2 * item + 1) * other_share) // (2 * share))
        return row

    def count(self, source: int, rows: int) -> int:
        """Return how many items of the source are among the first `rows` rows."""
        return rows if len(self.shares) == 1 else bisect_left(range(rows), rows, key=partial(self.row, source))


class Stream:
    """order(0), order(1), ... of one source end to end, without repeating a sample within a step.

    In order(epoch) the shards are shuffled, then samples within windows of `shuffle_window` shards. A window is
    permuted when it is first read, so memory and the cost of resuming do not grow with n.

    If a step takes the last r entries of one epoch and the first h of the next, entries of the next order that are
    among those r move directly after the first h other entries. With n >= 2 (r + h) this never changes the end of an
    epoch, so an order depends only on its own and its predecessor's permutation. With fewer samples the orders are
    computed from epoch 0 on.

    first_ids: first sample id of every shard.
    """

    def __init__(self, plan: Plan, source: int, first_ids: Ids) -> None:
        self._plan, self._source, self._width, self._first_ids = plan, source, plan.shuffle_window, first_ids
        self._weights = plan.of_samples[source] if plan.of_samples else None
        # The most items in a step; a step with rows of two stages rounds twice.
        self._most, self._passes = 0, list[_Passes]()
        for stage in plan.stages:
            if source < len(stage.items):
                counts, shares = np.asarray(stage.counts[source], dtype=np.int64), stage.mixture.shares
                rows = plan.global_batch if len(shares) == 1 else -(-plan.global_batch * shares[source] // sum(shares))
                self._most = min(max(self._most, rows + 1 + (len(plan.stages) > 1)), plan.global_batch)
                done = first_item = 0
                if self._passes:
                    epoch, item, _, n = self._passes[-1]
                    begun = max(0, -(-(stage.items[source] - item) // n))
                    done, first_item = epoch + begun, item + begun * n
                rows = int(counts.sum()) if self._weights is None else self._weights.rows
                self._passes.append(_Passes(done, first_item, counts, rows))
        if (fewest := min(passes.samples for passes in self._passes)) < self._most:
            raise ConfigError(
                f"a batch takes up to {number_of(self._most, 'sample')} of a source that has only {fewest}, "
                "so it would repeat a sample: lower trainer.global_batch, or add shards to data.shards"
            )
        self._small: tuple[int, Ids] | None = None
        self._shards = lru_cache(maxsize=2)(self._shuffle_shards)
        self._window = lru_cache(maxsize=3)(self._shuffle_window)

    def _of(self, epoch: int) -> _Passes:
        """Return the samples of an epoch."""
        return next(passes for passes in reversed(self._passes) if passes.epoch <= epoch)

    def _place(self, item: int) -> tuple[int, int]:
        """Return the epoch and the position in it of item `item` of the stream."""
        epoch, first, _, n = next(passes for passes in reversed(self._passes) if passes.item <= item)
        return epoch + (item - first) // n, (item - first) % n

    def rows(self, start: int, stop: int) -> Rows:
        """Return items start .. stop - 1 of the stream."""
        ids, epochs = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        while start < stop:
            epoch, position = self._place(start)
            last_n, n = self._of(max(0, epoch - 1)).samples, self._of(epoch).samples
            end = min(n, position + stop - start)
            if min(last_n, n) < 2 * self._most:
                # The order of a small source is computed from the previous order.
                if self._small is None or self._small[0] > epoch:
                    self._small = 0, self._shuffled(0, 0, self._of(0).samples)
                last_epoch, order = self._small
                for current_epoch in range(last_epoch + 1, epoch + 1):
                    tail, head = self._boundary(current_epoch)
                    permutation = self._shuffled(current_epoch, 0, self._of(current_epoch).samples)
                    order = _without_repeats(permutation, order[len(order) - tail :], head) if tail else permutation
                self._small = epoch, order
                ids.append(order[position:end])
            else:
                tail, head = self._boundary(epoch)
                if position < (zone := tail + head):
                    last = self._shuffled(epoch - 1, last_n - tail, last_n)
                    ids.append(_without_repeats(self._shuffled(epoch, 0, zone), last, head)[position:end])
                ids.append(self._shuffled(epoch, max(position, zone), end))
            epochs.append(np.full(end - position, epoch, dtype=np.int64))
            start += end - position
        return Rows(np.concatenate(ids), np.concatenate(epochs))

    def upcoming_shards(self, item: int) -> list[int]:
        """Return the shards of the window that holds item `item` of the stream, and of the next window."""
        epoch, position = self._place(item)
        shards, starts, _ = self._shards(epoch)
        window = int(np.searchsorted(starts, position, side="right")) - 1
        upcoming = shards[window * self._width : (window + 2) * self._width]
        if (window + 1) * self._width >= len(shards):
            upcoming = np.concatenate([upcoming, self._shards(epoch + 1)[0][: self._width]])
        return upcoming.tolist()

    def _boundary(self, epoch: int) -> tuple[int, int]:
        """Return (r, h) of the step that ends the previous epoch and starts this one; (0, 0) if there is none."""
        first_epoch, first_item, _, n = self._of(epoch)
        boundary = first_item + (epoch - first_epoch) * n
        if boundary == 0:
            return 0, 0
        plan, batch = self._plan, self._plan.global_batch
        step = plan.row(self._source, boundary - 1) // batch
        start, stop = (plan.count(self._source, rows) for rows in (step * batch, (step + 1) * batch))
        return (boundary - start, stop - boundary) if stop > boundary else (0, 0)

    def _shuffled(self, epoch: int, start: int, stop: int) -> Ids:
        """Return positions start .. stop - 1 of the epoch's permutation, before repeats within a step are moved."""
        _, starts, _ = self._shards(epoch)
        parts = []
        window = int(np.searchsorted(starts, start, side="right")) - 1
        while start < stop:
            begin, end = int(starts[window]), int(starts[window + 1])
            if begin < end:
                parts.append(self._window(epoch, window)[start - begin : min(stop, end) - begin])
                start = max(start, min(stop, end))
            window += 1
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _shuffle_shards(self, epoch: int) -> tuple[Ids, Ids, Ids]:
        """Return the order of the shards, the first position of each window, followed by n, and both in units."""
        counts = self._of(epoch).counts
        random = generator("shards", self._plan.seed, epoch, self._source)
        shards, unit, first = random.permutation(len(counts)), 1, 0
        if self._weights is not None:
            counts, unit, first = self._weights.sums, UNIT, int(random.integers(UNIT))
        ends = first + np.cumsum(counts[shards])
        starts = np.concatenate([[first], ends[self._width - 1 : -1 : self._width], ends[-1:]])
        return shards, starts // unit, starts

    def _shuffle_window(self, epoch: int, window: int) -> Ids:
        shards, _, starts = self._shards(epoch)
        members = shards[window * self._width : (window + 1) * self._width]
        counts = self._of(epoch).counts
        ids = np.concatenate([np.arange(counts[s], dtype=np.int64) + self._first_ids[s] for s in members])
        ids = generator("window", self._plan.seed, epoch, (self._source << 40) + window).permutation(ids)
        if self._weights is None:
            return ids
        ends = starts[window] + np.cumsum(self._weights.units[ids - self._first_ids[0]], dtype=np.int64)
        return ids[np.diff(ends // UNIT, prepend=starts[window] // UNIT) > 0]


class _Passes(NamedTuple):
    """Epochs of a source from `epoch` on, the first of which begins with item `item` of its stream, of equal samples.

    counts: number of samples of every shard. samples: their sum.
    """

    epoch: int
    item: int
    counts: Ids
    samples: int


@dataclass(frozen=True)
class Nodes:
    """Assigns the rows of a step to the nodes that read their bytes.

    Every shard is cut into one segment of samples per node. A node owns the same segments in all epochs, so it reads
    1 / nodes of the dataset, and the rows of a step are spread over nodes like a random draw. Surplus rows of a node,
    about 0.4 sqrt(N / nodes) of them, go to nodes with too few; these read single samples of another segment.

    of_ranks: the node of every rank, 0 .. nodes - 1. rank: this rank.
    """

    of_ranks: Sequence[int]
    rank: int

    @property
    def count(self) -> int:
        return max(self.of_ranks) + 1

    def owners(self, shard: Ids, position: Ids, samples: Ids) -> Ids:
        """Return the nodes that own samples. All [k]: number of the shard, position in the shard, and its samples."""
        return (position * self.count // samples + shard) % self.count

    def segment(self, shard: int, samples: int) -> tuple[int, int]:
        """Return the first position and the end of this node's segment of a shard."""
        piece = (self.of_ranks[self.rank] - shard) % self.count
        return -(-piece * samples // self.count), -(-(piece + 1) * samples // self.count)

    def rows(self, owners: Ids) -> Ids:
        """Return this rank's rows [b] of a step in ascending order. owners: of the rows [N]; b = N / ranks."""
        size, node = len(owners) // len(self.of_ranks), self.of_ranks[self.rank]
        first = size * self.of_ranks[: self.rank].count(node)
        return np.flatnonzero(self.readers(owners) == node)[first : first + size]

    def readers(self, owners: Ids) -> Ids:
        """Return the nodes [N] that read the rows of a step: their owners, except for surplus rows."""
        size = len(owners) // len(self.of_ranks)
        quotas, counts = np.bincount(self.of_ranks) * size, np.bincount(owners, minlength=self.count)
        by_owner = np.argsort(owners, kind="stable")
        turn = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        surplus = by_owner[turn >= np.repeat(quotas, counts)]
        readers = owners.copy()
        readers[np.sort(surplus)] = np.repeat(np.arange(self.count), np.maximum(quotas - counts, 0))
        return readers


def _without_repeats(order: Ids, tail: Ids, head: int) -> Ids:
    """Return `order` rearranged: its first `head` entries outside `tail`, the skipped entries, then the rest."""
    repeated = np.isin(order, tail)
    scanned = int(np.searchsorted(np.cumsum(~repeated), head)) + 1
    front, conflicts = order[:scanned], repeated[:scanned]
    return np.concatenate([front[~conflicts], front[conflicts], order[scanned:]])
