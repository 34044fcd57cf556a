"""Sample in every row of every step: a pure function of the seed, known to all ranks and workers.

The stream of a source is order(0), order(1), ..., epoch after epoch of all its samples. Steps cut the streams
regardless of where an epoch ends, so every sample comes exactly once an epoch and every batch is full.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clipzoo.data.plan.mixture import Mixture
from clipzoo.data.plan.order import EpochOrder, Rows, Stream


class Plan:
    """Rows of every step.

    counts: number of samples of every shard, for each source. Sample ids run through the shards in order, 0 .. n - 1.
    weights: how often a sample of the source comes, relative to other sources. With one source, and with equal
    weights, n rows hold every sample once. Otherwise each source passes through its own epochs at its own pace, every
    sample once an epoch; each step spreads its rows over the sources as evenly as whole numbers allow.

    Raises ConfigError if a batch would hold a sample twice.
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
        pairs = zip(weights, counts, strict=True)
        self._mixture = Mixture([round(weight * 1_000_000) * sum(sizes) for weight, sizes in pairs])
        self._streams = []
        first_id = 0
        for source, shard_counts in enumerate(counts):
            order = EpochOrder(shard_counts, first_id, seed, source, shuffle_window)
            self._streams.append(Stream(order, source, self._mixture, global_batch))
            first_id += order.samples
        self.samples = first_id

    def rows(self, step: int) -> Rows:
        """Return the rows [global_batch] of a step."""
        first, last = step * self.global_batch, (step + 1) * self.global_batch
        parts, times = [], []
        for source, stream in enumerate(self._streams):
            start, stop = self._mixture.count(source, first), self._mixture.count(source, last)
            parts.append(stream.rows(start, stop))
            times.append((2 * np.arange(start, stop) + 1) / self._mixture.shares[source])
        arrangement = np.argsort(np.concatenate(times), kind="stable")
        return Rows(
            np.concatenate([part.sample_id for part in parts])[arrangement],
            np.concatenate([part.epoch for part in parts])[arrangement],
        )

    def upcoming_shards(self, step: int) -> list[tuple[int, int]]:
        """Return (source, shard) of the windows in which the step ends, and of the windows after them."""
        rows = (step + 1) * self.global_batch
        return [
            (source, shard)
            for source, stream in enumerate(self._streams)
            for shard in stream.order.upcoming_shards(max(0, self._mixture.count(source, rows) - 1))
        ]
