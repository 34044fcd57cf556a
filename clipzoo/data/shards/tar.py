"""Where the members of a tar archive lie, from its headers alone.

A member's name is only ever a label: nothing here or above opens a path that an archive names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_BLOCK = 512
_AHEAD = 8192
_ZEROS = bytes(_BLOCK)
_REGULAR = b"0\0"
_LONGEST_NAME = 1 << 20
UNTERMINATED = "no end-of-archive block"


@dataclass(frozen=True)
class Member:
    """A regular file in the archive: its bytes are [offset, offset + size) of the archive."""

    name: str
    offset: int
    size: int


@dataclass
class Contents:
    """Every member that lies wholly in the archive; `flaw` says why there may have been more."""

    members: list[Member] = field(default_factory=list)
    flaw: str | None = None


def list_members(read: Callable[[int, int], bytes], size: int) -> Contents:
    """`read(length, offset)` gives bytes of an archive of `size` bytes (fewer only at its end).

    Archives that were simply joined end to end are read to the last. Nothing raises: what stops the reading is the
    `flaw`.
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
        if not _is_header(header):
            if position == 0:
                contents.flaw = "not a tar archive" + _compression(header)
            else:
                contents.flaw = f"no tar header at byte {position}"
            return contents
        ended = False
        length, kind = _length(header, pax), header[156:157]
        if length is None or (kind in b"LxgK" and length > _LONGEST_NAME):
            contents.flaw = f"damaged tar header at byte {position}"
            return contents
        start = position + _BLOCK
        position = start + -(-length // _BLOCK) * _BLOCK
        if start + length > size:
            contents.flaw = f"truncated: a member ends at byte {start + length} of {size}"
            return contents
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
    """Blocks of the archive, read a little ahead: captions are small, so several headers share one read."""

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._start, self._buffer = 0, b""

    def at(self, position: int) -> bytes:
        begin = position - self._start
        if begin < 0 or begin + _BLOCK > len(self._buffer):
            self._start, self._buffer, begin = position, self._read(_AHEAD, position), 0
        return self._buffer[begin : begin + _BLOCK]


def _is_header(header: bytes) -> bool:
    try:
        stated = _number(header[148:156])
    except ValueError:
        return False
    return len(header) == _BLOCK and stated == sum(header) - sum(header[148:156]) + 8 * ord(" ")


def _length(header: bytes, pax: Mapping[str, str]) -> int | None:
    """A member's bytes; None where none are stated. With a negative number the reading would go round in circles."""
    try:
        length = int(pax["size"]) if "size" in pax else _number(header[124:136])
    except ValueError:
        return None
    return length if length >= 0 else None


def _number(digits: bytes) -> int:
    """Octal text, or GNU's base 256 for what does not fit."""
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
    """Records "LENGTH KEY=VALUE\\n"; what does not parse is left out."""
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
    known = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
    for magic, name in known.items():
        if header.startswith(magic):
            return f" ({name} data: samples of a compressed archive cannot be read at random, decompress it first)"
    return ""
