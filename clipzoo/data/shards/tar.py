"""Positions of the members of a tar archive, from its headers alone.

Member names serve only as labels: no path named in an archive is ever opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
