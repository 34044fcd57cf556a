"""Parsing of `data.shards` into lists of shard locations."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from clipzoo.config.annotations import kind_of_object
from clipzoo.config.vocabulary import Range
from clipzoo.data.shards.locations import KEY, is_remote
from clipzoo.errors import ConfigError
from clipzoo.io.stores import open_filesystem, repeated

MOST_SHARDS = 1_000_000
"""Largest number of shards of one pattern."""
WEIGHT = kind_of_object(Annotated[float, Range(at_least=1e-3, at_most=1e3)])
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_MARKS = 0xF0000
"""First of the characters that no path contains."""
Paths = str | Path | Sequence[str | Path]
Shards = Paths | Sequence[Mapping[str, str | float | Sequence[str]]]


@dataclass(frozen=True)
class Source:
    """Shards that are shuffled together. weight: how often a sample comes, relative to other sources."""

    shards: tuple[str, ...]
    weight: float


TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
"""Endings of files that list images and captions."""


def parse_sources(shards: Shards) -> list[Source]:
    """Return the sources of `data.shards`: one for a path or a list of paths, one per entry of {path, weight}.

    A path is a tar, a brace pattern, a glob, a folder (its *.tar), an fsspec URL of one of these, or `pipe:COMMAND`.
    """
    if isinstance(shards, str | Path):
        return [Source(_expand_all([shards]), 1.0)]
    if not isinstance(shards, Sequence) or not shards:
        raise ConfigError(f"data.shards is {shards!r}: give a path, a pattern, or a list of them")
    if all(isinstance(entry, str | Path) for entry in shards):
        return [Source(_expand_all(shards), 1.0)]
    return [_weighted(entry) for entry in shards]


def _weighted(entry: object) -> Source:
    if not isinstance(entry, Mapping) or not entry.get("path") or set(entry) - {"path", "weight"}:
        raise ConfigError(
            f"data.shards holds {entry!r}: in a list with weights, every entry is {{path: ..., weight: ...}}"
        )
    weight, paths = entry.get("weight", 1.0), entry["path"]
    if not WEIGHT.admits(weight):
        raise ConfigError(f"data.shards: the weight of {paths} must be {WEIGHT.words}, not {weight!r}")
    return Source(_expand_all([paths] if isinstance(paths, str) else paths), float(weight))


def _expand_all(patterns: Sequence[object]) -> tuple[str, ...]:
    shards = [shard for pattern in patterns for shard in _expand(str(pattern))]
    if len(set(shards)) < len(shards):
        repeated = min(shard for shard in shards if shards.count(shard) > 1)
        raise ConfigError(f"data.shards names {repeated} twice: every sample comes once an epoch")
    return tuple(shards)


def _expand(pattern: str) -> list[str]:
    from braceexpand import braceexpand

    if not pattern:
        raise ConfigError("data.shards holds an empty path")
    if pattern.lower().endswith(TABLES):
        raise ConfigError(
            f"data.shards={pattern} is a table, not shards: make them with clipzoo shards make {pattern} shards/ "
            "then give data.shards=shards"
        )
    # Without this test, braceexpand would refuse a lone closing brace, as in a shell command.
    _check_count(pattern)
    try:
        expanded = list(braceexpand(pattern)) if "{" in pattern else [pattern]
    except ValueError as error:
        raise ConfigError(f"data.shards: {pattern}: {error}") from None
    if pattern.startswith("pipe:"):
        return expanded
    return [shard for path in expanded for shard in (_remote(path) if is_remote(path) else _local(path))]


def _check_count(pattern: str) -> None:
    """Raise ConfigError if the braces of a pattern stand for too many shards. Nothing is expanded."""
    counts: list[int] = []

    def product(text: str) -> int:
        return math.prod(counts[ord(mark) - _MARKS] for mark in text if ord(mark) >= _MARKS)

    def marked(match: re.Match[str]) -> str:
        if numbers := _NUMBERS.fullmatch(match[1]):
            # More digits stand for more shards than are allowed.
            first, last, step = (int((number or "1")[:19]) for number in numbers.groups())
            counts.append(abs(last - first) // (abs(step) or 1) + 1)
        else:
            counts.append(sum(map(product, match[1].split(","))))
        return chr(_MARKS + len(counts) - 1)

    text, found = "".join(character for character in pattern if ord(character) < _MARKS), 1
    while found:
        # Innermost braces first: each becomes a character that represents its count.
        text, found = _BRACES.subn(marked, text)
    if product(text) > MOST_SHARDS:
        raise ConfigError(f"data.shards: {pattern} matches more than {MOST_SHARDS:,} shards: give a folder")


def _local(path: str) -> list[str]:
    try:
        absolute = Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"data.shards: {path}: {error}") from None
    if absolute.is_dir():
        return _not_empty(sorted(str(shard) for shard in absolute.glob("*.tar")), path, "holds no *.tar")
    if glob.has_magic(path) and not absolute.exists():
        return _not_empty(sorted(glob.glob(str(absolute))), path, "matches no file")
    return [str(absolute)]


def _remote(url: str) -> list[str]:
    if not glob.has_magic(url) and not url.endswith("/"):
        return [url]
    filesystem, path = open_filesystem(url, KEY)
    pattern = path.rstrip("/") + "/*.tar" if url.endswith("/") else path
    try:
        shards = sorted(repeated(url, lambda: filesystem.glob(pattern), KEY))
    except OSError as error:
        raise ConfigError(f"data.shards: {url} cannot be listed: {error}") from error
    return _not_empty([filesystem.unstrip_protocol(shard) for shard in shards], url, "matches no file")


def _not_empty(shards: list[str], path: str, reason: str) -> list[str]:
    if not shards:
        raise ConfigError(f"data.shards: {path} {reason}")
    return shards
