"""Damage to files, as kills, full disks and mistaken hands leave it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def randomise(path: Path) -> None:
    """Replace the content by random bytes of the same length."""
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def change_type(path: Path) -> None:
    """Replace the content by a valid file of the same format that holds another type of value."""
    contents = {".json": b"[1, 2]\n", ".yaml": b"- 1\n- 2\n", ".jsonl": b"[1, 2]\n3\n"}
    path.write_bytes(contents.get(path.suffix, b"\x89PNG\r\n\x1a\n of another type\n"))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


KINDS: tuple[Callable[[Path], None], ...] = (cut, empty, randomise, change_type)
