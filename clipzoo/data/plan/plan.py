"""Which sample stands in which row of which step: a pure function of the seed, known to every rank and worker.

A source's stream is epoch after epoch of all its samples, order(0), order(1), ...; steps cut the streams without
regard to where an epoch ends ("carry"), so every sample comes exactly once an epoch and no batch is short.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clipzoo.data.plan.mixture import Mixture
from clipzoo.data.plan.order import EpochOrder, Rows, Stream


class Plan:
    """The rows of every step.

    counts: for each source its shards' numbers of samples. Sample ids run through the shards in order, 0 .. n - 1.
    weights: how often a sample of the source comes, relative to the others. With one source, and with equal weights,
    n rows hold every sample once. Otherwise each source goes through its own epochs, each exactly once, at its own
    pace; the rows of a step are spread over the sources as evenly as whole numbers allow.
    """

    def __init__(
        self,
        counts: Sequence[Sequence[int]],
        weights: Sequence[float],
        seed: int,
        shuffle_window: int,
        global_batch: int,
    ) -> None:
        self.global_batch = global_batch
        self._mixture = Mixture(
            [round(weight * 1_000_000) * sum(each) for weight, each in zip(weights, counts, strict=True)]
        )
        self._streams = []
        first_id = 0
        for source, shard_counts in enumerate(counts):
            order = EpochOrder(shard_counts, first_id, seed, source, shuffle_window)
            self._streams.append(Stream(order, source, self._mixture, global_batch))
            first_id += order.samples
        self.samples = first_id

    def rows(self, step: int) -> Rows:
        first, last = step * self.global_batch, (step + 1) * self.global_batch
        parts, times = [], []
        for source, stream in enumerate(self._streams):
            start, stop = self._mixture.taken(source, first), self._mixture.taken(source, last)
            parts.append(stream.take(start, stop))
            times.append((2 * np.arange(start, stop) + 1) / self._mixture.shares[source])
        arrangement = np.argsort(np.concatenate(times), kind="stable")
        return Rows(
            np.concatenate([part.sample_id for part in parts])[arrangement],
            np.concatenate([part.epoch for part in parts])[arrangement],
        )

    def upcoming_shards(self, step: int) -> list[tuple[int, int]]:
        """(source, shard) of the windows that the step ends in, and of those that follow."""
        rows = (step + 1) * self.global_batch
        return [
            (source, shard)
            for source, stream in enumerate(self._streams)
            for shard in stream.order.upcoming_shards(max(0, self._mixture.taken(source, rows) - 1))
        ]
