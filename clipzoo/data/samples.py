"""One row of a batch: a sample's image and caption, or those of another one if it cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from clipzoo.data.images.crops import ImageReader
from clipzoo.data.plan.randomness import generator
from clipzoo.data.shards.faults import BadSampleError, Finding
from clipzoo.data.shards.files import ShardFiles
from clipzoo.data.shards.index import ShardIndex
from clipzoo.data.shards.reading import RawReader
from clipzoo.errors import ConfigError

_REPLACEMENTS = 64


@dataclass(frozen=True)
class Row:
    """image: [3, S, S] uint8."""

    image: Tensor
    caption: str
    findings: list[Finding]


class SampleReader:
    """Rows by sample id: a pure function of (seed, epoch, id) and the shards, whatever was read before."""

    def __init__(
        self, indexes: Sequence[ShardIndex], files: ShardFiles, images: ImageReader, caption_key: str | None, seed: int
    ) -> None:
        self._indexes, self._images, self._seed = indexes, images, seed
        self._first_ids = np.concatenate([[0], np.cumsum([index.samples for index in indexes])])
        self._raw = RawReader(files, caption_key)

    def row(self, sample_id: int, epoch: int) -> Row:
        """The sample, or the next good one after it in its shard (wrapping), then in the next shards.

        Raises ConfigError when none of many is good.
        """
        findings: list[Finding] = []
        source = int(np.searchsorted(self._first_ids, sample_id, side="right")) - 1
        index = self._indexes[source]
        wanted = index.locate(sample_id - int(self._first_ids[source]))
        failure: BadSampleError | None = None
        for shard, position in _candidates(index, *wanted):
            try:
                image, caption, notes = self._sample(index, shard, position, sample_id, epoch)
            except BadSampleError as error:
                failure = failure or error
                continue
            name = index.locations[shard]
            if failure or notes:
                key = index.keys(shard)[position]
                findings += [Finding(sample_id, name, key, note, "converted to plain RGB", None) for note in notes]
            if failure:
                replaced_by = f"{name} {key}"
                findings.append(Finding(sample_id, *_name(index, *wanted), failure.kind, failure.reason, replaced_by))
            return Row(image, caption, findings)
        assert failure is not None
        raise ConfigError(
            f"{' '.join(_name(index, *wanted))} cannot be used ({failure.reason}), nor can any of the samples that "
            "follow it: check data.shards and data.caption_key"
        )

    def _sample(
        self, index: ShardIndex, shard: int, position: int, sample_id: int, epoch: int
    ) -> tuple[Tensor, str, list[str]]:
        """All random choices are the row's, also for a sample that takes another's place."""

        def pick(count: int) -> int:
            return int(generator("caption", self._seed, epoch, sample_id).integers(count))

        caption, encoded = self._raw.read(index, shard, position, pick)
        image, notes = self._images(encoded, generator("augment", self._seed, epoch, sample_id))
        return image, caption, notes


def _candidates(index: ShardIndex, shard: int, position: int) -> Iterator[tuple[int, int]]:
    """The sample itself first; in other shards the same position: many take a lost shard's place, not one."""
    count = index.counts[shard]
    for step in range(min(count, _REPLACEMENTS)):
        yield shard, (position + step) % count
    shards = len(index.counts)
    for ahead in range(1, min(shards, _REPLACEMENTS)):
        following = (shard + ahead) % shards
        if index.counts[following]:
            yield following, position % index.counts[following]


def _name(index: ShardIndex, shard: int, position: int) -> tuple[str, str]:
    return index.locations[shard], index.keys(shard)[position]
