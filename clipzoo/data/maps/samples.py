"""Facts about the samples of shards: sizes, captions, digests, small pictures for near-duplicates, and faults."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from clipzoo import io
from clipzoo.config.vocabulary import CaptionKeys
from clipzoo.data.faults import BadSampleError
from clipzoo.data.images import read_header
from clipzoo.data.index import ShardIndex
from clipzoo.data.locations import ShardCache
from clipzoo.data.maps.engines import TableMap
from clipzoo.data.reader import ShardReader
from clipzoo.data.tables.formats import TableRules, arrow
from clipzoo.errors import ConfigError, installation, masked
from clipzoo.io.text import script_of

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 3
"""Change it together with the facts."""
GRID = 24
"""Side of the small picture of an image."""
_LEAST_TEXT = 24
"""Bytes of a caption whose language is named: that of shorter ones is often wrong."""


@dataclass(frozen=True)
class SampleFacts(TableMap):
    """Map of shards to a row of facts for each sample; `fault` is the kind of an unusable sample, otherwise null.

    tables: how the rows of tables are read; None for tars. caption_key, uid_key, max_pixels: as in ShardDataset.
    """

    index: ShardIndex
    cache: ShardCache
    tables: TableRules | None
    caption_key: CaptionKeys | None
    uid_key: str | None
    max_pixels: int

    def contents(self) -> Sequence[str]:
        settings = (VERSION, self.caption_key, self.uid_key, self.max_pixels, self.tables and self.tables.identity)
        return [f"SampleFacts {settings} {shard.digest} {shard.bytes} {shard.state}" for shard in self.index.shards]

    def table(self, item: int) -> pa.Table:
        from clipzoo.data.tokenizer import ClipTokenizer  # imports torch

        reader, encode, rows = ShardReader(self.cache, self.tables), ClipTokenizer(77).encode, []
        for position, key in enumerate(self.index.keys(item)):
            row: dict[str, Any] = {"uid": key}
            try:
                sample = reader.sample(self.index, item, position)
                if self.tables is None:
                    row["uid"] = sample.uid(self.uid_key) or key
                row |= image_facts(sample.image(), self.max_pixels)
                caption = sample.captions(self.caption_key)[0][0]
                row |= {"caption": caption, "script": script_of(caption), "language": language_of(caption)}
                row["tokens"] = len(encode(caption)) + 2  # with both control tokens
            except BadSampleError as error:
                row |= {"fault": error.kind, "reason": masked(error.reason)[:200]}
            rows.append(row)
        schema = image_schema("uid", "caption", "script", "language").append(arrow().field("tokens", arrow().int32()))
        return arrow().Table.from_pylist(rows, schema=schema)


def language_of(text: str) -> str:
    """Return the code of the most likely of 139 languages, "short" for a text that is too short for it."""
    try:
        import py3langid
    except ImportError:
        raise ConfigError(f"languages of captions need py3langid: {installation('tables')}") from None
    return str(py3langid.classify(text)[0]) if len(text.encode()) >= _LEAST_TEXT else "short"


def image_facts(encoded: bytes, max_pixels: int | None) -> dict[str, Any]:
    """Return size, digest and a small picture of an encoded image. Raises BadSampleError.

    pixels: red, green and blue of GRID x GRID pixels, as bytes. conversions: kinds of conversion to RGB.
    """
    image = read_header(encoded, max_pixels)
    sharpest = min(image.height, image.width) // (2 * GRID) if image.scalable else 1
    reduction = next((factor for factor in (8, 4, 2) if sharpest >= factor), 1)
    small = Image.fromarray(image.decode(reduction)).resize((GRID, GRID), Image.Resampling.HAMMING)
    digest = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")
    return {
        "width": image.width, "height": image.height, "bytes": len(encoded), "digest": digest,
        "pixels": small.tobytes(), "conversions": image.conversions,
    }  # fmt: skip


@cache
def image_schema(*further: str) -> pa.Schema:
    """Return the columns of `image_facts`, of faults, and further columns of text."""
    pa = arrow()
    numbers = {"width": pa.int32(), "height": pa.int32(), "bytes": pa.int32(), "digest": pa.uint64()}
    pixels = {"pixels": pa.binary(GRID * GRID * 3), "conversions": pa.list_(pa.string())}
    return pa.schema(list({**numbers, **pixels, **dict.fromkeys(("fault", "reason", *further), pa.string())}.items()))


def write_uids(path: Path, kept: Sequence[str], left_out: Sequence[str]) -> int:
    """Write the kept uids for data.uids without those of samples that are left out, and return their number."""
    uids = np.setdiff1d(np.array(kept, str), np.array(left_out, str))
    with io.whole(path) as file:
        np.save(file, uids)
    return len(uids)
