"""One row of a batch: read a sample's bytes, decode its image, pick its caption; replace it if it cannot be used."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from clipzoo.data.files import ShardFiles
from clipzoo.data.health import BadSampleError, Finding
from clipzoo.data.images import ImageReader
from clipzoo.data.index import ShardIndex
from clipzoo.data.randomness import generator
from clipzoo.errors import ConfigError

_OPEN_SHARDS = 64
_REPLACEMENTS = 64
_SHARDS_TRIED = 64


@dataclass(frozen=True)
class Row:
    image: Tensor
    caption: str
    findings: list[Finding]


class SampleReader:
    """Rows by sample id: a pure function of (seed, epoch, id) and the shards, whatever was read before."""

    def __init__(
        self, indexes: Sequence[ShardIndex], files: ShardFiles, images: ImageReader, caption_key: str | None, seed: int
    ) -> None:
        self._indexes, self._images, self._caption_key, self._seed = indexes, images, caption_key, seed
        self._first_ids = np.concatenate([[0], np.cumsum([index.samples for index in indexes])])
        self._open = OpenShards(files)

    def row(self, sample_id: int, epoch: int) -> Row:
        """The sample, or the next good one after it in its shard (wrapping), then in the next shards."""
        findings: list[Finding] = []
        first: tuple[int, int, BadSampleError] | None = None
        source = int(np.searchsorted(self._first_ids, sample_id, side="right")) - 1
        index = self._indexes[source]
        wanted = index.locate(sample_id - int(self._first_ids[source]))
        for shard, position in _candidates(index, *wanted):
            try:
                image, caption, notes = self._sample(index, shard, position, sample_id, epoch)
            except BadSampleError as error:
                first = first or (shard, position, error)
                continue
            key = index.keys(shard)[position] if first or notes else ""
            name = index.shards[shard].name
            if first:
                findings.append(_finding(index, sample_id, *first, replaced_by=f"{name} {key}"))
            findings += [Finding(sample_id, name, key, note, "converted", None) for note in notes]
            return Row(image, caption, findings)
        assert first is not None
        shard, position, cause = first
        raise ConfigError(
            f"no usable sample near {index.shards[shard].name} {index.keys(shard)[position]} ({cause.reason}), "
            "nor among the samples that follow it: check data.shards and data.caption_key"
        )

    def _sample(
        self, index: ShardIndex, shard: int, position: int, sample_id: int, epoch: int
    ) -> tuple[Tensor, str, list[str]]:
        descriptor = self._open(index, shard)
        record = index.records[index.starts[shard] + position]
        caption = self._caption(descriptor, record, sample_id, epoch)
        encoded = _read(descriptor, record, "image")
        image, notes = self._images(encoded, generator("augment", self._seed, epoch, sample_id))
        return image, caption, notes

    def _caption(self, descriptor: int, record: np.void, sample_id: int, epoch: int) -> str:
        if self._caption_key is None:
            return _required(_text(_read(descriptor, record, "txt")))
        text = _text(_read(descriptor, record, "json"))
        try:
            entry = json.loads(text)
        except ValueError as error:
            raise BadSampleError("bad_json", f"json: {error}") from error
        if not isinstance(entry, dict) or entry.get(self._caption_key) is None:
            has = ", ".join(list(entry)[:8]) if isinstance(entry, dict) else type(entry).__name__
            raise BadSampleError("missing_caption", f"json has no data.caption_key {self._caption_key!r}, but: {has}")
        value = entry[self._caption_key]
        captions = value if isinstance(value, list) else [value]
        if not all(isinstance(caption, str) for caption in captions):
            raise BadSampleError(
                "bad_caption", f"{self._caption_key} is {value!r:.80}, neither a text nor a list of texts"
            )
        captions = [caption for caption in captions if caption.strip()]
        if len(captions) < 2:
            return _required("".join(captions))
        return captions[generator("caption", self._seed, epoch, sample_id).integers(len(captions))]


class OpenShards:
    """File descriptors of the shards used last."""

    def __init__(self, files: ShardFiles) -> None:
        self._files = files
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def __call__(self, index: ShardIndex, shard: int) -> int:
        """Raises BadSampleError for a shard that is gone or is not the one indexed."""
        location = index.locations[shard]
        if location in self._descriptors:
            self._descriptors.move_to_end(location)
            return self._descriptors[location]
        entry = index.shards[shard]
        try:
            descriptor = os.open(self._files.path(location, size=entry.bytes), os.O_RDONLY)
        except OSError as error:
            raise BadSampleError("shard_missing", f"{error.strerror or error}: {location}") from error
        size = os.fstat(descriptor).st_size
        # Smaller and known to be so: what is left of it is still good.
        if size != entry.state[0] and size != entry.bytes:
            os.close(descriptor)
            raise BadSampleError("shard_changed", f"{location} has {size} bytes, {entry.bytes} when it was indexed")
        self._descriptors[location] = descriptor
        if len(self._descriptors) > _OPEN_SHARDS:
            os.close(self._descriptors.popitem(last=False)[1])
        return descriptor

    def __getstate__(self) -> ShardFiles:
        return self._files

    def __setstate__(self, files: ShardFiles) -> None:
        self.__init__(files)  # type: ignore[misc]


def _candidates(index: ShardIndex, shard: int, position: int) -> Iterator[tuple[int, int]]:
    count = index.counts[shard]
    for step in range(min(count, _REPLACEMENTS)):
        yield shard, (position + step) % count
    shards = len(index.counts)
    for ahead in range(1, min(shards, _SHARDS_TRIED)):
        following = (shard + ahead) % shards
        if index.counts[following]:
            yield following, position % index.counts[following]


def _read(descriptor: int, record: np.void, role: str) -> bytes:
    offset, size = int(record[f"{role}_offset"]), int(record[f"{role}_size"])
    if not offset:
        if role == "image":
            raise BadSampleError("missing_image", "no image under this key")
        raise BadSampleError("missing_caption", f"no .{role} under this key")
    try:
        data = os.pread(descriptor, size, offset)
    except OSError as error:
        raise BadSampleError("shard_unreadable", f"bytes {offset} to {offset + size}: {error.strerror}") from error
    if len(data) < size:
        raise BadSampleError("shard_truncated", f"bytes {offset} to {offset + size} lie beyond the end of the file")
    return data


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSampleError("caption_not_utf8", str(error)) from error


def _required(caption: str) -> str:
    if not caption.strip():
        raise BadSampleError("empty_caption", "the caption is empty")
    return caption


def _finding(
    index: ShardIndex, sample_id: int, shard: int, position: int, error: BadSampleError, *, replaced_by: str
) -> Finding:
    key = index.keys(shard)[position]
    return Finding(sample_id, index.shards[shard].name, key, error.kind, error.reason, replaced_by)
