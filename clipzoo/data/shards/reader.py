"""Reading of a sample's caption and encoded image from its shard."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from clipzoo.data.faults import BadSampleError
from clipzoo.data.shards.cache import ShardCache
from clipzoo.data.shards.index import ShardIndex

_OPEN_SHARDS = 64


class ShardReader:
    """Reads samples at random. caption_key: key of the .json that holds the caption; None for the .txt."""

    def __init__(self, cache: ShardCache, caption_key: str | None) -> None:
        self._open = _OpenShards(cache)
        self._caption_key = caption_key

    def read(
        self, index: ShardIndex, shard: int, position: int, pick: Callable[[int], int] = lambda count: 0
    ) -> tuple[str, bytes]:
        """Return caption and encoded image of a sample.

        pick(count) chooses one of several captions. Raises BadSampleError.
        """
        descriptor = self._open(index, shard)
        record = index.records[index.starts[shard] + position]
        if self._caption_key is None:
            captions = [_decode(_read(descriptor, record, "txt"))]
        else:
            captions = _captions(_decode(_read(descriptor, record, "json")), self._caption_key)
        captions = [caption for caption in captions if has_text(caption)]
        if not captions:
            raise BadSampleError("empty_caption", "the caption has no letter or digit")
        caption = captions[pick(len(captions)) if len(captions) > 1 else 0]
        return caption, _read(descriptor, record, "image")


def has_text(caption: str) -> bool:
    """Return True if the caption has a letter or digit of any script; spaces, punctuation and emoji alone are none."""
    return any(character.isalnum() for character in caption)


class _OpenShards:
    """File descriptors of the most recently used shards."""

    def __init__(self, cache: ShardCache) -> None:
        self._cache = cache
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def __call__(self, index: ShardIndex, shard: int) -> int:
        """Return a descriptor of the shard. Raises BadSampleError if it is missing or differs from the index."""
        location = index.locations[shard]
        if location in self._descriptors:
            self._descriptors.move_to_end(location)
            return self._descriptors[location]
        entry = index.shards[shard]
        try:
            descriptor = self._cache.open(location, size=entry.bytes)
        except OSError as error:
            raise BadSampleError("shard_missing", f"{error.strerror or error}: {location}") from error
        size = os.fstat(descriptor).st_size
        # A shard that the index knows to be cut is read as far as it goes.
        if size not in (entry.bytes, entry.state[0]):
            os.close(descriptor)
            raise BadSampleError("shard_changed", f"{location} has {size} bytes, {entry.bytes} when it was indexed")
        self._descriptors[location] = descriptor
        if len(self._descriptors) > _OPEN_SHARDS:
            os.close(self._descriptors.popitem(last=False)[1])
        return descriptor


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


def _captions(text: str, key: str) -> list[str]:
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise BadSampleError("bad_json", f"json: {error}") from error
    if not isinstance(entry, dict) or entry.get(key) is None:
        present = ", ".join(list(entry)[:8]) if isinstance(entry, dict) else type(entry).__name__
        raise BadSampleError("missing_caption", f"json has no data.caption_key {key!r}, but: {present}")
    value = entry[key]
    captions = value if isinstance(value, list) else [value]
    if not all(isinstance(caption, str) for caption in captions):
        raise BadSampleError("bad_caption", f"{key} is {value!r:.80}, neither a text nor a list of texts")
    return captions


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSampleError("caption_not_utf8", str(error)) from error
