"""Name ranks that are slower than the others for long, and the cause.

A step takes equally long on all ranks, because they exchange tensors in it. The time of a rank is therefore its own
time (`Throughput.own`) and what the slowest rank needs besides: the length of a step if no rank were slower than this.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

from clipzoo.distributed.world import World
from clipzoo.training.inspection.throughput import CAUSES, OwnTime

BLOCKS = 4
"""Parts of the period, in all of which a slow rank is slow: one long pause does not count."""
CAUSE_TEXTS = {
    "data": "it waits for data: compare its disk, network and CPU cores with those of the other ranks",
    "transfer": "it waits for batches on their way to its device: compare its memory and the link to its device",
    "computation": "its computation is slow: compare clocks, temperature and other processes of its device",
    "checkpoint": "it waits for its checkpoint files: compare its disk",
}  # fmt: skip
log = logging.getLogger(__name__)

Log = Callable[[int, Mapping[str, Any]], None]


@dataclass(frozen=True)
class _Block:
    """Seconds and steps of a time, and each rank's own seconds by cause."""

    seconds: float
    steps: float
    own: list[list[float]]

    def __add__(self, other: _Block | None) -> _Block:
        if other is None:
            return self
        own = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(self.own, other.own, strict=True)]
        return _Block(self.seconds + other.seconds, self.steps + other.steps, own)

    def excesses(self) -> list[float]:
        """Return by how much each rank's time exceeds the median of the ranks, as a share of it."""
        times = self._times()
        median = median_low(times)
        return [time / median - 1 if median > 0 else 0.0 for time in times]

    def described(self, rank: int) -> SlowRank:
        """Describe a slow rank. The cause is the rank's own phase that exceeds the median over ranks by most."""
        medians = [median_low(column) for column in zip(*self.own, strict=True)]
        place = max(range(len(CAUSES)), key=lambda index: self.own[rank][index] - medians[index])
        own, median = self.own[rank][place] / self.steps, medians[place] / self.steps
        return SlowRank(rank, self.excesses()[rank], self.seconds, CAUSES[place], own, median)

    def _times(self) -> list[float]:
        own = [sum(row) for row in self.own]
        shared = max(self.seconds - max(own), 0.0)
        return [seconds + shared for seconds in own]


@dataclass(frozen=True)
class SlowRank:
    """A rank that was slower than the median of the ranks by the share `excess` for `seconds`, and why.

    own: seconds per step that the rank spent on the cause; median: of all ranks.
    """

    rank: int
    excess: float
    seconds: float
    cause: str
    own: float
    median: float

    def report(self, step: int, world: World, log_event: Log) -> None:
        """Name the rank and its host in the log and in metrics.jsonl, on the first rank. Collective."""
        host = world.gather_object(socket.gethostname())[self.rank]
        if not world.is_first:
            return
        log.warning(
            "rank %d on %s has been %.0f %% slower than the median of the ranks for %.0f seconds: %s (%.3g s a step, "
            "median %.3g s)",
            *(self.rank, host, 100 * self.excess, self.seconds, CAUSE_TEXTS[self.cause], self.own, self.median),
        )
        log_event(step, {"event": "slow_rank", "host": host, **asdict(self)})


class SlowRanks:
    """Finds slow ranks in the own times of all ranks, each of them once.

    threshold: share by which a slow rank's time exceeds the median of the ranks. period: seconds that it must last.
    """

    def __init__(self, threshold: float, period: float) -> None:
        self._threshold, self._period = threshold, period
        self._block: _Block | None = None
        self._slow: dict[int, _Block] = {}
        self._found: set[int] = set()

    @staticmethod
    def row(own: OwnTime) -> list[float]:
        """Return the numbers of a rank that `judge` needs of all ranks."""
        return [own.seconds, float(own.steps), *own.causes]

    def judge(self, rows: Sequence[Sequence[float]]) -> tuple[dict[str, float], list[SlowRank]]:
        """Return the slowest rank of a reading and its excess, for the log line, and the slow ranks that are new.

        rows: `row` of all ranks, in rank order. Equal rows give equal results on all ranks.
        """
        (seconds, steps), own = rows[0][:2], [list(row[2:]) for row in rows]
        if len(rows) == 1 or steps < 1:
            return {}, []
        excesses = _Block(seconds, steps, own).excesses()
        slowest = max(range(len(rows)), key=excesses.__getitem__)
        values = {"slowest_rank": slowest, "slowest_rank_excess": excesses[slowest]}
        self._block = _Block(seconds, steps, own) + self._block
        if self._block.seconds < self._period / BLOCKS:
            return values, []
        block, self._block = self._block, None
        return values, self._new(block)

    def _new(self, block: _Block) -> list[SlowRank]:
        slow = [rank for rank, excess in enumerate(block.excesses()) if excess > self._threshold]
        self._slow = {rank: block + self._slow.get(rank) for rank in slow}
        new = [rank for rank in slow if self._slow[rank].seconds >= self._period and rank not in self._found]
        self._found.update(new)
        return [self._slow[rank].described(rank) for rank in new]
