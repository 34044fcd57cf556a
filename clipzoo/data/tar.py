"""Positions of the members of a tar archive, from its headers alone.

Member names serve only as labels: no path named in an archive is ever opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clipzoo.data.captions import NO_CAPTION, digest, read_captions
from clipzoo.data.faults import BadSampleError
from clipzoo.io import ANY_SIZE, DamagedFileError, readable

_BLOCK = 512
_READ_SIZE = 8192
_ZEROS = bytes(_BLOCK)
_REGULAR = b"0\0"
_LONGEST_NAME = 1 << 20
UNTERMINATED = "no end-of-archive block"


@dataclass(frozen=True)
class Member:
    """A regular file in the archive: bytes [offset, offset + size) of the archive."""

    name: str
    offset: int
    size: int


@dataclass
class Contents:
    """All complete members of an archive. flaw: why there may be more; None for an intact archive."""

    members: list[Member] = field(default_factory=list)
    flaw: str | None = None


def list_members(read: Callable[[int, int], bytes], size: int) -> Contents:
    """List the members of an archive of `size` bytes.

    read(length, offset) returns bytes of the archive, fewer only at its end. Archives joined end to end are read to
    the last one. Damage raises nothing: it ends the list and is described by `flaw`.
    """
    contents = Contents()
    if 0 < size < _BLOCK:
        contents.flaw = "not a tar archive" + _compression(read(_BLOCK, 0))
        return contents
    headers = _Headers(read)
    position = 0
    long_name: bytes | None = None
    pax: dict[str, str] = {}
    ended = False
    while position + _BLOCK <= size:
        header = headers.at(position)
        if header == _ZEROS:
            ended = True
            position += _BLOCK
            continue
        ended = False
        length, kind = _length(header, pax), header[156:157]
        contents.flaw = _header_flaw(header, position, length, kind, size)
        if contents.flaw is not None or length is None:
            return contents
        start = position + _BLOCK
        position = start + -(-length // _BLOCK) * _BLOCK
        if kind == b"L":
            long_name = read(length, start).rstrip(b"\0")
        elif kind == b"x":
            pax = _pax_records(read(length, start))
        elif kind not in b"gK":
            if kind in _REGULAR or kind == b"7":
                name = pax.get("path") or _text(long_name if long_name is not None else _name(header))
                contents.members.append(Member(name, start, length))
            long_name, pax = None, {}
    if not ended:
        cut = f"truncated: {size} bytes end inside a member"
        contents.flaw = "empty file" if size == 0 else UNTERMINATED if position == size else cut
    return contents


class _Headers:
    """Headers of the archive. Captions are small, so one read of several blocks often serves several headers."""

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._start, self._buffer = 0, b""

    def at(self, position: int) -> bytes:
        begin = position - self._start
        if begin < 0 or begin + _BLOCK > len(self._buffer):
            self._start, self._buffer, begin = position, self._read(_READ_SIZE, position), 0
        return self._buffer[begin : begin + _BLOCK]


def _header_flaw(header: bytes, position: int, length: int | None, kind: bytes, size: int) -> str | None:
    if not _is_header(header):
        return f"no tar header at byte {position}" if position else "not a tar archive" + _compression(header)
    if length is None or (kind in b"LxgK" and length > _LONGEST_NAME):
        return f"damaged tar header at byte {position}"
    end = position + _BLOCK + length
    return f"truncated: a member ends at byte {end} of {size}" if end > size else None


def _is_header(header: bytes) -> bool:
    try:
        checksum = _number(header[148:156])
    except ValueError:
        return False
    return len(header) == _BLOCK and checksum == sum(header) - sum(header[148:156]) + 8 * ord(" ")


def _length(header: bytes, pax: Mapping[str, str]) -> int | None:
    """Return the number of bytes of a member, or None if the header states none.

    A negative number counts as none: it would lead back to earlier headers without end.
    """
    try:
        length = int(pax["size"]) if "size" in pax else _number(header[124:136])
    except ValueError:
        return None
    return length if length >= 0 else None


def _number(digits: bytes) -> int:
    """Parse octal text, or GNU's base 256 for larger numbers."""
    if digits[0] & 0x80:
        return int.from_bytes(bytes([digits[0] & 0x7F]) + digits[1:], "big")
    return int(digits.strip(b" \0") or b"0", 8)


def _name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0", 1)[0]
        return prefix + b"/" + name if prefix else name
    return name


def _pax_records(payload: bytes) -> dict[str, str]:
    """Parse records "LENGTH KEY=VALUE\\n"; stop at the first one that is malformed."""
    records = {}
    begin = 0
    while begin < len(payload):
        space = payload.find(b" ", begin, begin + 20)
        digits = payload[begin : max(space, begin)]
        if not digits.isdigit() or not space < begin + int(digits) <= len(payload):
            break
        end = begin + int(digits)
        key, _, value = payload[space + 1 : end - 1].partition(b"=")
        records[_text(key)] = _text(value)
        begin = end
    return records


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace").replace("\0", "")


def _compression(header: bytes) -> str:
    formats = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
    for magic, name in formats.items():
        if header.startswith(magic):
            return f" ({name} data: a compressed archive does not allow random access, decompress it first)"
    return ""


# Samples of one shard: groups of members with the same key, and the position of their bytes.


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
