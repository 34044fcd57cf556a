"""Samples by id: image and caption, or those of a replacement if a sample cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from clipzoo.data.faults import BadSampleError, Fault
from clipzoo.data.images.transform import ImageTransform
from clipzoo.data.plan.randomness import generator
from clipzoo.data.shards.cache import ShardCache
from clipzoo.data.shards.index import ShardIndex
from clipzoo.data.shards.reader import ShardReader
from clipzoo.errors import ConfigError

_MOST_CANDIDATES = 64


@dataclass(frozen=True)
class Sample:
    """image: uint8 [3, S, S]; None if it has not been decoded. faults: replacement and conversions of this sample.

    image_key: digest of the encoded image and its crop; 0 if none was asked for.
    """

    image: Tensor | None
    caption: str
    faults: list[Fault]
    image_key: int


class SampleReader:
    """Reads samples as a pure function of (seed, epoch, sample id) and the shards."""

    def __init__(
        self,
        indexes: Sequence[ShardIndex],
        cache: ShardCache,
        transform: ImageTransform,
        caption_key: str | None,
        seed: int,
    ) -> None:
        self._indexes, self._transform, self._seed = indexes, transform, seed
        self._first_ids = np.concatenate([[0], np.cumsum([index.samples for index in indexes])])
        self._shards = ShardReader(cache, caption_key)

    @property
    def image_size(self) -> int:
        return self._transform.image_size

    def read(self, sample_id: int, epoch: int, stored_key: int | None = None) -> Sample:
        """Return the sample, or the next usable one after it in its shard (cyclically), then in the next shards.

        stored_key: digest of the image that need not be decoded, 0 for none; None leaves the digests out.

        Raises ConfigError if none of the candidates is usable.
        """
        index, *wanted = self._locate(sample_id)
        failure: BadSampleError | None = None
        for shard, position in _candidates(index, *wanted):
            try:
                image, caption, conversions, key = self._load(index, shard, position, sample_id, epoch, stored_key)
            except BadSampleError as error:
                failure = failure or error
                continue
            faults: list[Fault] = []
            if failure or conversions:
                place = _name(index, shard, position)
                faults += [Fault(sample_id, *place, kind, "converted to plain RGB", None) for kind in conversions]
            if failure:
                name = _name(index, *wanted)
                faults.append(Fault(sample_id, *name, failure.kind, failure.reason, " ".join(place)))
            return Sample(image, caption, faults, key)
        assert failure is not None
        raise ConfigError(
            f"{' '.join(_name(index, *wanted))} cannot be used ({failure.reason}), nor any of the samples that follow "
            "it: check data.shards and data.caption_key"
        )

    def name(self, sample_id: int) -> str:
        """Shard and key of a sample."""
        return " ".join(_name(*self._locate(sample_id)))

    def _locate(self, sample_id: int) -> tuple[ShardIndex, int, int]:
        """Return the index that holds a sample, its shard and its position there."""
        source = int(np.searchsorted(self._first_ids, sample_id, side="right")) - 1
        index = self._indexes[source]
        return index, *index.locate(sample_id - int(self._first_ids[source]))

    def _load(
        self, index: ShardIndex, shard: int, position: int, sample_id: int, epoch: int, stored_key: int | None
    ) -> tuple[Tensor | None, str, list[str], int]:
        """Random choices depend on `sample_id`, also if another sample is read in its place."""

        def pick(count: int) -> int:
            return int(generator("caption", self._seed, epoch, sample_id).integers(count))

        caption, encoded = self._shards.read(index, shard, position, pick)
        random = generator("augment", self._seed, epoch, sample_id)
        crop = self._transform.choose(encoded, random)
        key = 0 if stored_key is None else crop.digest()
        image = None if key and key == stored_key else self._transform.decode_crop(crop, random)
        return image, caption, crop.image.conversions, key


def _candidates(index: ShardIndex, shard: int, position: int) -> Iterator[tuple[int, int]]:
    """Yield (shard, position): first the sample itself, then its possible replacements.

    In other shards the position stays the same, so that the samples of a lost shard have different replacements.
    """
    count = index.counts[shard]
    for step in range(min(count, _MOST_CANDIDATES)):
        yield shard, (position + step) % count
    shards = len(index.counts)
    for step in range(1, min(shards, _MOST_CANDIDATES)):
        following = (shard + step) % shards
        if index.counts[following]:
            yield following, position % index.counts[following]


def _name(index: ShardIndex, shard: int, position: int) -> tuple[str, str]:
    return index.locations[shard], index.keys(shard)[position]
