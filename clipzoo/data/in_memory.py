"""Pairs that are held in memory as two tensors: the data of small studies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from clipzoo.data.plan.plan import Plan
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

    def open(self, cache: Path | None) -> None:
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

    def plan(self, seed: int, global_batch: int) -> Plan:
        """Which pairs come in which step. Raises where a batch would hold a pair twice."""
        return Plan([[self.samples]], [1.0], seed, 1, global_batch)

    def batches(
        self,
        *,
        seed: int,
        global_batch: int,
        rank: int,
        world_size: int,
        start_step: int,
        stop_step: int,
        trim_text: bool,
    ) -> Iterator[Batch]:
        """This rank's rows [rank * b, (rank + 1) * b) of steps start_step .. stop_step - 1; views are never trimmed."""
        if global_batch % world_size:
            raise ConfigError(f"trainer.global_batch {global_batch} cannot be divided among {world_size} ranks")
        plan = self.plan(seed, global_batch)
        local = global_batch // world_size
        mine = slice(rank * local, (rank + 1) * local)
        for step in range(start_step, stop_step):
            ids = torch.from_numpy(plan.rows(step).sample_id[mine].copy())
            yield Batch(self._image[ids], self._text[ids], ids)
