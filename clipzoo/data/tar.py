"""Samples of a tar shard: the members of the archive, listed from its headers and grouped by key.

Member names serve only as labels: no path named in an archive is ever opened.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipzoo.config.vocabulary import CaptionKeys
from clipzoo.data.captions import TarSample
from clipzoo.data.faults import BadSampleError
from clipzoo.data.locations import MISSING, ShardCache, State, is_remote, parse_sources

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif")
ROLES = ("image", "txt", "json")
# Offset 0 marks a missing member: an archive begins with a header.
# The digest of the caption, or of the first one, lets a run count repeated captions without reading them.
RECORD = np.dtype(
    [(f"{role}_{name}", kind) for role in ROLES for name, kind in (("offset", "<u8"), ("size", "<u4"))]
    + [("caption", "<u8")]
)
UNTERMINATED = "no end-of-archive block"
_BLOCK = 512
_READ_SIZE, _ZEROS_SIZE = 8192, 1 << 20
_LONGEST_NAME = 1 << 20


@dataclass
class Scan:
    """Samples of a shard; the defaults are those of a shard that cannot be read.

    records: [count] of type RECORD, in the order of the archive. bytes: size of the archive, -1 if it cannot be read.
    flaw: why there may be more samples; None for an intact shard.
    """

    flaw: str | None
    records: NDArray[np.void] = field(default_factory=lambda: np.empty(0, RECORD))
    keys: list[str] = field(default_factory=list)
    bytes: int = -1


@dataclass(frozen=True)
class TarRules:
    """How tars are read, with the interface of `TableRules`. setting: key of their paths. joined: keys of other tables.

    is_table: the key of a sample is its uid, and a shard may be a folder.
    """

    caption_key: CaptionKeys | None = None
    uid_key: str | None = None
    joined: tuple[str, ...] = ()
    setting: ClassVar[str] = "data.shards"
    identity: ClassVar[str | None] = None
    is_table: ClassVar[bool] = False
    sources = staticmethod(parse_sources)
    needs_copy = staticmethod(is_remote)
    sample = staticmethod(TarSample)

    def scan(self, cache: ShardCache, state: State | None, location: str) -> Scan:
        if state == MISSING:
            return Scan("missing")
        try:
            with os.fdopen(cache.open(location), "rb") as file:
                return scan_shard(file, self.caption_key)
        except OSError as error:
            return Scan(f"unreadable: {error.strerror or error}")

    def open(self, cache: ShardCache, location: str, state: State, size: int) -> IO[bytes]:
        try:
            file = os.fdopen(cache.open(location, size=size), "rb")
        except OSError as error:
            raise BadSampleError("shard_missing", f"{error.strerror or error}: {location}") from error
        # Closed with its last sample. A shard that is truncated according to the index is read up to its end.
        if (present := os.fstat(file.fileno()).st_size) not in (size, state[0]):
            file.close()
            raise BadSampleError("shard_changed", f"{location} has {present} bytes, {size} when it was indexed")
        return file

    def columns(self, cache: ShardCache, location: str, state: State, names: Sequence[str]) -> None:
        return None


TARS = TarRules()
"""Captions in the .txt."""


def scan_shard(file: IO[bytes], caption_key: CaptionKeys | None) -> Scan:
    """List the samples of an open shard by reading its headers and captions. caption_key: as in ShardDataset.

    Members with the same key (the name up to the first dot of its last part) form a sample wherever they are in the
    shard. A repeated member begins a second sample. A key without image and caption is not a sample.
    """
    size = os.fstat(file.fileno()).st_size
    members, flaw = list_members(file.fileno(), size)
    # Members by extension of every sample, by key and by the number of earlier samples with this key.
    samples: dict[tuple[str, int], dict[str, Member]] = {}
    repeats = Counter[tuple[str, str]]()
    for member in members:
        folder, _, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        extension = extension.lower()
        if not stem or extension not in (*IMAGE_EXTENSIONS, *ROLES):
            continue
        key = f"{folder}/{stem}" if folder else stem
        samples.setdefault((key, repeats[key, extension]), {})[extension] = member
        repeats[key, extension] += 1

    records = np.zeros(len(samples), RECORD)
    for record, sample in zip(records, samples.values(), strict=True):
        for extension, member in sample.items():
            role = extension if extension in ROLES else "image"
            # The first image is used if there are several.
            if not record[f"{role}_offset"]:
                record[f"{role}_offset"], record[f"{role}_size"] = member.offset, min(member.size, 2**32 - 1)
        record["caption"] = TarSample(file, record).digest(caption_key)
    return Scan(flaw, records, [key for key, _ in samples], size)


class Member(NamedTuple):
    """A regular file in the archive: bytes [offset, offset + size) of the archive."""

    name: str
    offset: int
    size: int


def list_members(descriptor: int, size: int) -> tuple[list[Member], str | None]:
    """Return all complete members of an open archive of `size` bytes, and why there may be more; None if it is intact.

    Concatenated archives are read to the last one. Damage ends the list and raises no error.
    """
    members: list[Member] = []
    if 0 < size < _BLOCK:
        return members, _foreign(os.pread(descriptor, _BLOCK, 0))
    position = buffer_start = 0
    buffer = b""
    long_name: bytes | None = None
    pax: dict[str, str] = {}
    ended = False
    while position + _BLOCK <= size:
        # Captions are small, so one read of several blocks often serves several headers.
        begin = position - buffer_start
        if begin < 0 or begin + _BLOCK > len(buffer):
            buffer_start, buffer, begin = position, os.pread(descriptor, _READ_SIZE, position), 0
        header = buffer[begin : begin + _BLOCK]
        ended = header == bytes(_BLOCK)
        if ended:
            # The next block that is not zero, or the end; holes of a sparse file are not read.
            while position < size:
                try:
                    position = max(position, os.lseek(descriptor, position, os.SEEK_DATA) // _BLOCK * _BLOCK)
                except OSError:  # no data up to the end
                    position = size
                    break
                content = os.pread(descriptor, _ZEROS_SIZE, position)
                zeros = len(content) - len(content.lstrip(b"\0"))
                if zeros < len(content) or not content:
                    position += zeros // _BLOCK * _BLOCK
                    break
                position += zeros
            continue
        kind, length, checksum = header[156:157], -1, -1
        with suppress(ValueError, IndexError):
            length = int(pax["size"]) if "size" in pax else _number(header[124:136])
        with suppress(ValueError, IndexError):
            checksum = _number(header[148:156])
        if len(header) != _BLOCK or checksum != sum(header) - sum(header[148:156]) + 8 * ord(" "):
            return members, f"no tar header at byte {position}" if position else _foreign(header)
        # A negative length would lead back to earlier headers without end.
        if length < 0 or (kind in b"LxgK" and length > _LONGEST_NAME):
            return members, f"damaged tar header at byte {position}"
        start = position + _BLOCK
        if start + length > size:
            return members, f"truncated: a member ends at byte {start + length} of {size}"
        position = start + -(-length // _BLOCK) * _BLOCK
        if kind == b"L":
            long_name = os.pread(descriptor, length, start).rstrip(b"\0")
        elif kind == b"x":
            # Records "LENGTH KEY=VALUE\n", up to the first one that is malformed.
            payload, pax, begin = os.pread(descriptor, length, start), {}, 0
            while begin < len(payload):
                space = payload.find(b" ", begin, begin + 20)
                digits = payload[begin : max(space, begin)]
                if not digits.isdigit() or not space < begin + int(digits) <= len(payload):
                    break
                key, _, value = payload[space + 1 : begin + int(digits) - 1].partition(b"=")
                pax[_text(key)] = _text(value)
                begin += int(digits)
        elif kind not in b"gK":
            # Regular files.
            if kind in b"0\0" or kind == b"7":
                name, prefix = (header[first:end].split(b"\0", 1)[0] for first, end in ((0, 100), (345, 500)))
                if header[257:263] == b"ustar\0" and prefix:
                    name = prefix + b"/" + name
                label = pax.get("path") or _text(name if long_name is None else long_name)
                members.append(Member(label, start, length))
            long_name, pax = None, {}
    if ended:
        return members, None
    cut = f"truncated: {size} bytes end inside a member"
    return members, "empty file" if size == 0 else UNTERMINATED if position == size else cut


def _number(digits: bytes) -> int:
    """Parse octal text, or GNU's base 256 for larger numbers."""
    if digits[0] & 0x80:
        return int.from_bytes(bytes([digits[0] & 0x7F]) + digits[1:], "big")
    return int(digits.strip(b" \0") or b"0", 8)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace").replace("\0", "")


def _foreign(header: bytes) -> str:
    """Return the flaw of a file that does not begin with a header of a tar archive."""
    formats = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
    name = next((name for magic, name in formats.items() if header.startswith(magic)), None)
    remedy = f" ({name} data: a compressed archive does not allow random access, decompress it first)"
    return "not a tar archive" + (remedy if name else "")
