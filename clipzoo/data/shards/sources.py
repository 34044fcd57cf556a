"""What `data.shards` may say, as lists of shard locations."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipzoo.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """Shards that are shuffled together, and how often a sample of theirs comes relative to other sources'."""

    shards: tuple[str, ...]
    weight: float


def parse_sources(shards: Any) -> list[Source]:
    """`data.shards` -> sources. A path, pattern or plain list is one source; a list of {path, weight} one for each.

    A path is a tar, a brace pattern, a glob, a folder (its *.tar), an fsspec URL of those, or `pipe:COMMAND`.
    """
    if isinstance(shards, str | Path):
        return [Source(_expand_all([str(shards)]), 1.0)]
    if not isinstance(shards, Sequence) or not shards:
        raise ConfigError(f"data.shards is {shards!r}: give a path, a pattern, or a list of them")
    if all(isinstance(entry, str | Path) for entry in shards):
        return [Source(_expand_all([str(entry) for entry in shards]), 1.0)]
    return [_weighted(entry) for entry in shards]


def is_remote(location: str) -> bool:
    return location.startswith("pipe:") or "://" in location


def _weighted(entry: Any) -> Source:
    keys = set(entry) if hasattr(entry, "keys") else None
    if keys is None or "path" not in keys or keys - {"path", "weight"}:
        raise ConfigError(
            f"data.shards holds {entry!r}: in a list with weights every entry is {{path: ..., weight: ...}}"
        )
    weight = entry.get("weight", 1.0)
    if not isinstance(weight, int | float) or not weight > 0:
        raise ConfigError(f"data.shards: the weight of {entry['path']} is {weight!r}; it must be a number above 0")
    paths = entry["path"]
    return Source(_expand_all([paths] if isinstance(paths, str) else list(paths)), float(weight))


def _expand_all(patterns: list[str]) -> tuple[str, ...]:
    shards = [shard for pattern in patterns for shard in _expand(pattern)]
    repeated = {shard for shard in shards if shards.count(shard) > 1} if len(set(shards)) < len(shards) else ()
    if repeated:
        raise ConfigError(f"data.shards names {sorted(repeated)[0]} twice: a shard's samples come once an epoch")
    return tuple(shards)


def _expand(pattern: str) -> list[str]:
    from braceexpand import braceexpand

    if not pattern:
        raise ConfigError("data.shards holds an empty path")
    # A stray brace, as in a shell command, is no pattern.
    expanded = list(braceexpand(pattern)) if "{" in pattern else [pattern]
    if pattern.startswith("pipe:"):
        return expanded
    return [shard for path in expanded for shard in (_remote(path) if is_remote(path) else _local(path))]


def _local(path: str) -> list[str]:
    absolute = Path(path).expanduser().absolute()
    if absolute.is_dir():
        return _required(sorted(str(found) for found in absolute.glob("*.tar")), path, "holds no *.tar")
    if any(mark in path for mark in "*?[") and not absolute.exists():
        return _required(sorted(glob.glob(str(absolute))), path, "matches no file")
    return [str(absolute)]


def _remote(url: str) -> list[str]:
    if not any(mark in url for mark in "*?[") and not url.endswith("/"):
        return [url]
    import fsspec

    files, path = fsspec.core.url_to_fs(url)
    pattern = path.rstrip("/") + "/*.tar" if url.endswith("/") else path
    return _required([files.unstrip_protocol(found) for found in sorted(files.glob(pattern))], url, "matches no file")


def _required(found: list[str], path: str, reason: str) -> list[str]:
    if not found:
        raise ConfigError(f"data.shards: {path} {reason}")
    return found
