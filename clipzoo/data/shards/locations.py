"""Shard locations: local paths, fsspec URLs and `pipe:COMMAND`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from clipzoo.errors import ConfigError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

State = tuple[int, int]
"""Size of a shard in bytes, and its modification time or a number made from its tag."""
MISSING: State = (-1, 0)
_THREADS = 16


def is_remote(location: str) -> bool:
    return location.startswith("pipe:") or "://" in location


def states(locations: Sequence[str]) -> list[State | None]:
    """Return the state of every shard: MISSING if there is none, None if only reading the shard would tell."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(_state, locations))


def copy(location: str, target: IO[bytes]) -> None:
    """Copy a remote shard into an open file. Raises OSError."""
    if location.startswith("pipe:"):
        command = location.removeprefix("pipe:")
        shell = shutil.which("bash")
        # With pipefail, a pipeline fails when any of its commands fails.
        words = [shell, "-o", "pipefail", "-c", command] if shell else ["/bin/sh", "-c", command]
        process = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=target, stderr=subprocess.PIPE)
        if process.returncode:
            errors = process.stderr.decode(errors="replace").strip()[-200:]
            raise OSError(f"{command!r} exited with {process.returncode}: {errors}")
        return
    filesystem, path = open_filesystem(location)
    with _as_os_error(location), filesystem.open(path, "rb") as source:
        shutil.copyfileobj(source, target, 1 << 20)


def open_filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the fsspec filesystem of a URL and the path in it."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"data.shards: {url} cannot be read: {error}") from error


def _state(location: str) -> State | None:
    if location.startswith("pipe:"):
        return None
    try:
        if is_remote(location):
            return _remote_state(location)
        status = os.stat(location)
        return status.st_size, status.st_mtime_ns
    except FileNotFoundError:
        return MISSING


def _remote_state(url: str) -> State | None:
    filesystem, path = open_filesystem(url)
    with _as_os_error(url):
        facts = filesystem.info(path)
    if facts.get("size") is None:
        return None
    names = ("ETag", "etag", "mtime", "LastModified", "last_modified", "created")
    tags = "".join(str(facts[name]) for name in names if name in facts)
    return int(facts["size"]), int(hashlib.sha256(tags.encode()).hexdigest()[:12], 16)


@contextmanager
def _as_os_error(url: str) -> Iterator[None]:
    """Turn the exceptions of fsspec's backends into OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error
