"""The share of one rank in the batches of a run, as loader processes compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from clipzoo.data.faults import Fault
from clipzoo.data.plan.plan import Plan
from clipzoo.data.samples import SampleReader
from clipzoo.data.tokenizer import Tokenizer, caption_lengths, trim_padding
from clipzoo.errors import ConfigError, number_of
from clipzoo.types import Batch, World

StoredKeys = Callable[[Tensor], Tensor]
"""Sample ids [b] -> digests of the images whose features are stored, [b] int64; 0 where there are none."""


class LoadedBatch(NamedTuple):
    """A batch and its faults."""

    batch: Batch
    faults: list[Fault]


class RankBatches(Dataset[LoadedBatch]):
    """Map-style dataset: item k is this rank's share of step k, the rows `rows` of the global batch.

    An image whose digest is among `stored_keys` is not decoded: it is black. A batch without decoded images takes no
    memory for them. stored_keys: None decodes all images and computes no digests.
    """

    def __init__(
        self,
        plan: Plan,
        reader: SampleReader,
        tokenizer: Tokenizer,
        rows: slice,
        trim_text: bool,
        stored_keys: StoredKeys | None = None,
    ) -> None:
        self._plan, self._reader, self._tokenizer, self._rows, self._trim = plan, reader, tokenizer, rows, trim_text
        self._stored_keys = stored_keys

    def __getitem__(self, step: int) -> LoadedBatch:
        rows = self._plan.rows(step)
        ids, epochs = torch.from_numpy(rows.sample_id[self._rows].copy()), rows.epoch[self._rows].tolist()
        stored = [None] * len(ids) if self._stored_keys is None else self._stored_keys(ids).tolist()
        size = self._reader.image_size
        images = torch.zeros(1, dtype=torch.uint8).expand(len(ids), 3, size, size)
        captions: list[str] = []
        keys: list[int] = []
        faults: list[Fault] = []
        for position, place in enumerate(zip(ids.tolist(), epochs, stored, strict=True)):
            sample = self._reader.read(*place)
            if sample.image is not None:
                if not images.is_contiguous():
                    images = images.contiguous()
                images[position] = sample.image
            captions.append(sample.caption)
            keys.append(sample.image_key)
            faults += sample.faults
        text = self._tokenizer(captions)
        lengths = None
        if self._trim:
            lengths = caption_lengths(text, self._tokenizer.end_token)
            text = trim_padding(text, self._tokenizer.end_token)
        image_keys = None if self._stored_keys is None else torch.tensor(keys)
        return LoadedBatch(Batch(images, text, ids, image_keys, lengths), faults)


def rank_rows(global_batch: int, world: World) -> slice:
    """Return this rank's rows of a global batch. Raises ConfigError if it cannot be divided evenly among the ranks."""
    if global_batch % world.size:
        raise ConfigError(
            f"trainer.global_batch {global_batch} cannot be divided among {number_of(world.size, 'rank')}"
        )
    size = global_batch // world.size
    return slice(world.rank * size, (world.rank + 1) * size)
