"""One shard's samples: which members belong together, and where their bytes lie."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clipzoo.data.shards.tar import Member, list_members

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm")
ROLES = ("image", "txt", "json")
# An offset of 0 means that the sample has no such member: there a header lies.
RECORD = np.dtype([(f"{role}_{what}", kind) for role in ROLES for what, kind in (("offset", "<u8"), ("size", "<u4"))])


@dataclass
class Scan:
    """records: [count] of RECORD, in the order of the archive. key_bytes: their names, joined by zero bytes.
    duplicates: how many names were taken before. flaw: why there may have been more, or None."""

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


def scan_shard(path: str) -> Scan:
    """Reads the headers alone. A shard that cannot be opened has no samples and says why.

    Members are joined by key (the name up to the first dot of its last part) wherever they stand in the shard. A key
    that comes again with a member it has already is another sample of the same name. What has neither image nor
    caption is no sample.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        return Scan(np.empty(0, RECORD), b"", -1, flaw=_reason(error))
    try:
        size = os.fstat(descriptor).st_size
        contents = list_members(lambda length, offset: os.pread(descriptor, length, offset), size)
    except OSError as error:
        return Scan(np.empty(0, RECORD), b"", -1, flaw=_reason(error))
    finally:
        os.close(descriptor)
    samples, duplicates = _join(contents.members)
    records = np.zeros(len(samples), RECORD)
    for role in ROLES:
        found = [sample.members.get(role) for sample in samples]
        records[f"{role}_offset"] = [member.offset if member else 0 for member in found]
        records[f"{role}_size"] = [min(member.size, 2**32 - 1) if member else 0 for member in found]
    keys = "\0".join(sample.key for sample in samples).encode()
    return Scan(records, keys, size, duplicates, contents.flaw)


@dataclass
class _Sample:
    key: str
    members: dict[str, Member] = field(default_factory=dict)
    extensions: set[str] = field(default_factory=set)


def _join(members: list[Member]) -> tuple[list[_Sample], int]:
    by_key: dict[str, list[_Sample]] = {}
    ordered: list[_Sample] = []
    for member in members:
        folder, _, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        extension = extension.lower()
        role = "image" if extension in IMAGE_EXTENSIONS else extension
        if not stem or role not in ROLES:
            continue
        same_key = by_key.setdefault(f"{folder}/{stem}" if folder else stem, [])
        sample = next((each for each in same_key if extension not in each.extensions), None)
        if sample is None:
            sample = _Sample(f"{folder}/{stem}" if folder else stem)
            same_key.append(sample)
            ordered.append(sample)
        sample.extensions.add(extension)
        sample.members.setdefault(role, member)
    return ordered, sum(len(same_key) - 1 for same_key in by_key.values())


def _reason(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else f"unreadable: {error.strerror}"
