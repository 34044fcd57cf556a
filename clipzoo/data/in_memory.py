"""Pairs that are held in memory as two tensors: the data of small studies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from clipzoo.data.plan.plan import Plan
from clipzoo.data.rank_batches import rank_rows
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.types import Batch


class PairData:
    """Batches of n pairs, in the same order and with the same promises as those of shards.

    image, text: [n, ...] each, row i of one belongs to row i of the other; what the encoder takes. A batch of all n
    samples holds each of them once.
    """

    def __init__(self, image: Tensor, text: Tensor) -> None:
        if len(image) != len(text):
            raise ConfigError(f"{len(image)} images cannot be paired with {len(text)} texts")
        self._image, self._text = image, text
        self.samples = len(image)

    def open(self, cache: Path | None, world: World) -> None:
        """Nothing to index: the pairs are in memory."""

    @property
    def fingerprint(self) -> str:
        """Of the pairs themselves: a run resumes only on the same."""
        digest = hashlib.sha256()
        for view in (self._image, self._text):
            digest.update(view.contiguous().cpu().numpy().tobytes())
        return digest.hexdigest()

    def counters(self) -> dict[str, int]:
        """Nothing can be unreadable."""
        return {}

    def check(self, seed: int, global_batch: int) -> None:
        """Raise ConfigError if a batch of this size would hold a pair twice."""
        self._plan(seed, global_batch)

    def _plan(self, seed: int, global_batch: int) -> Plan:
        """The pairs of every step."""
        return Plan([[self.samples]], [1.0], seed, 1, global_batch)

    def batches(
        self,
        *,
        seed: int,
        global_batch: int,
        world: World,
        start_step: int,
        stop_step: int,
        trim_text: bool,
    ) -> Iterator[Batch]:
        """This rank's rows [rank * b, (rank + 1) * b) of steps start_step .. stop_step - 1; views are never trimmed."""
        rows = rank_rows(global_batch, world)
        plan = self._plan(seed, global_batch)
        for step in range(start_step, stop_step):
            ids = torch.from_numpy(plan.rows(step).sample_id[rows].copy())
            yield Batch(self._image[ids], self._text[ids], ids)
