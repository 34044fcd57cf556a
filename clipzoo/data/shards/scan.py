"""Samples of one shard: groups of members with the same key, and the position of their bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clipzoo.data.faults import BadSampleError
from clipzoo.data.shards.captions import NO_CAPTION, digest, read_captions
from clipzoo.data.shards.tar import Member, list_members
from clipzoo.io import ANY_SIZE, DamagedFileError, readable

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm")
ROLES = ("image", "txt", "json")
# Offset 0 marks a missing member: the first header of the archive is there.
# The digest of the caption, or of the first one, lets a run count repeated captions without reading them.
RECORD = np.dtype(
    [(f"{role}_{name}", kind) for role in ROLES for name, kind in (("offset", "<u8"), ("size", "<u4"))]
    + [("caption", "<u8")]
)


@dataclass
class Scan:
    """Samples of a shard.

    records: [count] of RECORD, in the order of the archive. key_bytes: the samples' keys, joined by zero bytes.
    bytes: size of the archive, -1 if it cannot be read. duplicates: number of samples whose key occurred before.
    flaw: why there may be more samples; None for an intact shard.
    """

    records: NDArray[np.void]
    key_bytes: bytes
    bytes: int
    duplicates: int = 0
    flaw: str | None = None

    @property
    def keys(self) -> list[str]:
        return split_keys(self.key_bytes, len(self.records))


def split_keys(key_bytes: bytes, count: int) -> list[str]:
    return key_bytes.decode().split("\0") if count else []


def unreadable_shard(flaw: str) -> Scan:
    """Return the scan of a shard that cannot be opened: no samples."""
    return Scan(np.empty(0, RECORD), b"", -1, flaw=flaw)


def scan_shard(path: str, caption_key: str | None = None) -> Scan:
    """List the samples of a shard by reading its headers and captions. caption_key: see `read_captions`.

    Members with the same key (the name up to the first dot of its last part) form a sample wherever they are in the
    shard. If a key repeats a member, a second sample with that key begins. A key without image and caption is no
    sample.
    """
    try:
        with readable(Path(path), ANY_SIZE) as file:
            return scan_descriptor(file.fileno(), caption_key)
    except DamagedFileError as error:
        return unreadable_shard(error.fault.removeprefix("is "))


def scan_descriptor(descriptor: int, caption_key: str | None = None) -> Scan:
    """List the samples of an open shard; see `scan_shard`."""
    try:
        size = os.fstat(descriptor).st_size
        contents = list_members(lambda length, offset: os.pread(descriptor, length, offset), size)
    except OSError as error:
        return unreadable_shard(f"unreadable: {error.strerror}")
    samples, duplicates = _group_by_key(contents.members)
    records = np.zeros(len(samples), RECORD)
    for role in ROLES:
        members = [sample.members.get(role) for sample in samples]
        records[f"{role}_offset"] = [member.offset if member else 0 for member in members]
        records[f"{role}_size"] = [min(member.size, 2**32 - 1) if member else 0 for member in members]
    records["caption"] = [_caption_digest(descriptor, record, caption_key) for record in records]
    keys = "\0".join(sample.key for sample in samples).encode()
    return Scan(records, keys, size, duplicates, contents.flaw)


def _caption_digest(descriptor: int, record: np.void, caption_key: str | None) -> int:
    try:
        return digest(read_captions(descriptor, record, caption_key)[0])
    except BadSampleError:
        return NO_CAPTION


@dataclass
class _Sample:
    key: str
    members: dict[str, Member] = field(default_factory=dict)
    extensions: set[str] = field(default_factory=set)


def _group_by_key(members: list[Member]) -> tuple[list[_Sample], int]:
    """Return the samples in the order of the archive, and how many of them repeat a key."""
    by_key: dict[str, list[_Sample]] = {}
    samples: list[_Sample] = []
    for member in members:
        folder, _, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        extension = extension.lower()
        role = "image" if extension in IMAGE_EXTENSIONS else extension
        if not stem or role not in ROLES:
            continue
        key = f"{folder}/{stem}" if folder else stem
        same_key = by_key.setdefault(key, [])
        sample = next((sample for sample in same_key if extension not in sample.extensions), None)
        if sample is None:
            sample = _Sample(key)
            same_key.append(sample)
            samples.append(sample)
        sample.extensions.add(extension)
        sample.members.setdefault(role, member)
    return samples, len(samples) - len(by_key)
