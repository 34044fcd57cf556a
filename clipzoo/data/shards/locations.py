"""Shard locations: local paths, fsspec URLs and `pipe:COMMAND`."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from clipzoo.data.shards.commands import copy_output
from clipzoo.errors import ConfigError
from clipzoo.io import kind_of
from clipzoo.io.stores import RANGE, TruncatedError, is_url, open_filesystem, read_ranges, repeated

State = tuple[int, int]
"""Size of a shard in bytes, and its modification time or a number made from its tag."""
MISSING: State = (-1, 0)
KEY = "data.shards"
_THREADS = 16


def is_remote(location: str) -> bool:
    return location.startswith("pipe:") or is_url(location)


def states(locations: Sequence[str]) -> list[State | None]:
    """Return the state of every shard: MISSING if there is none, None if only reading the shard would tell."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(_state, locations))


def copy(location: str, target: IO[bytes]) -> None:
    """Copy a remote shard into an open file.

    Raises:
        OSError: the shard cannot be read.
        TrainingError: its server does not answer.
    """
    if location.startswith("pipe:"):
        copy_output(location.removeprefix("pipe:"), target)
        return
    filesystem, path = open_filesystem(location, KEY)

    def download() -> None:
        target.seek(0)
        target.truncate()
        facts = filesystem.info(path)
        if facts.get("size") is None:
            with filesystem.open(path, "rb") as source:
                shutil.copyfileobj(source, target, 1 << 20)
            return
        for content in read_ranges(location, filesystem, path, int(facts["size"]), KEY):
            target.write(content)
        if int(facts["size"]) > RANGE and _version(filesystem.info(path)) != _version(facts):
            raise TruncatedError("the shard has changed while it was read")

    repeated(location, download, KEY)


def _state(location: str) -> State | None:
    if location.startswith("pipe:"):
        return None
    try:
        if is_remote(location):
            return _remote_state(location)
        status = os.stat(location)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(
                f"data.shards: {location} is {kind_of(status.st_mode)}, not a file (pipe:COMMAND reads from a command)"
            )
        return status.st_size, status.st_mtime_ns
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        raise ConfigError(f"data.shards: {location} cannot be read: {error.strerror or error}") from error


def _remote_state(url: str) -> State | None:
    filesystem, path = open_filesystem(url, KEY)
    facts = repeated(url, lambda: filesystem.info(path), KEY)
    if facts.get("size") is None:
        return None
    return int(facts["size"]), int(hashlib.sha256(_version(facts).encode()).hexdigest()[:12], 16)


def _version(facts: Mapping[str, Any]) -> str:
    """Return what a store says of a file's version."""
    names = ("ETag", "etag", "mtime", "LastModified", "last_modified", "created")
    return "".join(str(facts[name]) for name in names if name in facts)
