"""The share of one rank in the batches of a run, as loader processes compute it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from clipzoo.data.faults import Fault
from clipzoo.data.plan.plan import Plan
from clipzoo.data.samples import SampleReader
from clipzoo.data.tokenizer import Tokenizer, trim_padding
from clipzoo.errors import ConfigError
from clipzoo.types import Batch, World


class LoadedBatch(NamedTuple):
    """A batch and its faults."""

    batch: Batch
    faults: list[Fault]


class RankBatches(Dataset[LoadedBatch]):
    """Map-style dataset: item k is this rank's share of step k, the rows `rows` of the global batch."""

    def __init__(self, plan: Plan, reader: SampleReader, tokenizer: Tokenizer, rows: slice, trim_text: bool) -> None:
        self._plan, self._reader, self._tokenizer, self._rows, self._trim = plan, reader, tokenizer, rows, trim_text

    def __getitem__(self, step: int) -> LoadedBatch:
        rows = self._plan.rows(step)
        ids, epochs = rows.sample_id[self._rows], rows.epoch[self._rows]
        images: torch.Tensor | None = None
        captions: list[str] = []
        faults: list[Fault] = []
        for position, (sample_id, epoch) in enumerate(zip(ids.tolist(), epochs.tolist(), strict=True)):
            sample = self._reader.read(sample_id, epoch)
            if images is None:
                images = torch.empty(len(ids), *sample.image.shape, dtype=torch.uint8)
            images[position] = sample.image
            captions.append(sample.caption)
            faults += sample.faults
        assert images is not None
        text = self._tokenizer(captions)
        if self._trim:
            text = trim_padding(text, self._tokenizer.end_token)
        return LoadedBatch(Batch(images, text, torch.from_numpy(ids.copy())), faults)


def rank_rows(global_batch: int, world: World) -> slice:
    """Return this rank's rows of a global batch. Raises ConfigError if it cannot be divided evenly among the ranks."""
    if global_batch % world.size:
        raise ConfigError(f"trainer.global_batch {global_batch} cannot be divided among {world.size} ranks")
    size = global_batch // world.size
    return slice(world.rank * size, (world.rank + 1) * size)
