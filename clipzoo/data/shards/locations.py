"""Shard locations: local paths, fsspec URLs and `pipe:COMMAND`."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any, TypeVar

from clipzoo.data.shards.commands import copy_output
from clipzoo.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

State = tuple[int, int]
"""Size of a shard in bytes, and its modification time or a number made from its tag."""
MISSING: State = (-1, 0)
CONNECT_SECONDS, READ_SECONDS = 10.0, 15.0
"""Longest silence of an HTTP server."""
PATIENCE = 60.0
"""Seconds for which a server may fail before a run gives up."""
_THREADS = 16
Result = TypeVar("Result")


def is_remote(location: str) -> bool:
    return location.startswith("pipe:") or "://" in location


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
    filesystem, path = open_filesystem(location)

    def download() -> None:
        target.seek(0)
        target.truncate()
        with filesystem.open(path, "rb") as source:
            shutil.copyfileobj(source, target, 1 << 20)

    repeated(location, download)


def open_filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the fsspec filesystem of a URL and the path in it."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url, **_options(url))
    except (ImportError, ValueError) as error:
        raise ConfigError(f"data.shards: {url} cannot be read: {error}") from error


def _state(location: str) -> State | None:
    if location.startswith("pipe:"):
        return None
    try:
        if is_remote(location):
            return _remote_state(location)
        status = os.stat(location)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(
                f"data.shards: {location} is {_kind(status.st_mode)}, not a file (pipe:COMMAND reads from a command)"
            )
        return status.st_size, status.st_mtime_ns
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        raise ConfigError(f"data.shards: {location} cannot be read: {error.strerror or error}") from error


def _remote_state(url: str) -> State | None:
    filesystem, path = open_filesystem(url)
    facts = repeated(url, lambda: filesystem.info(path))
    if facts.get("size") is None:
        return None
    names = ("ETag", "etag", "mtime", "LastModified", "last_modified", "created")
    tags = "".join(str(facts[name]) for name in names if name in facts)
    return int(facts["size"]), int(hashlib.sha256(tags.encode()).hexdigest()[:12], 16)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _options(url: str) -> dict[str, Any]:
    """Return the options of fsspec's filesystem: deadlines for HTTP, whose own limit is five minutes a request."""
    protocol = url.partition("://")[0]
    if protocol not in ("http", "https"):
        return {}
    import aiohttp
    import fsspec

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
    configured = fsspec.config.conf.get(protocol, {}).get("client_kwargs", {})
    return {"client_kwargs": {"timeout": timeout, **configured}}


def repeated(url: str, action: Callable[[], Result]) -> Result:
    """Return `action()`, repeated with growing pauses while its server times out, drops connections or fails (5xx).

    Raises:
        OSError: any other error, also those of fsspec's backends.
        TrainingError: the server has not recovered within PATIENCE seconds.
    """
    begin, pause, tries = time.monotonic(), 0.25, 0
    while True:
        tries += 1
        try:
            return action()
        except Exception as error:
            # fsspec takes every failure of HTTP for a missing file.
            cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            if not _is_transient(cause):
                if isinstance(error, OSError):
                    raise
                raise OSError(f"{url}: {type(error).__name__}: {error}") from error
            seconds = time.monotonic() - begin
            if seconds + pause > PATIENCE:
                raise TrainingError(
                    f"data.shards: {url} cannot be read, {tries} tries in {seconds:.0f} seconds: "
                    f"{type(cause).__name__} {cause}".rstrip()
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, 10.0)


def _is_transient(error: BaseException) -> bool:
    if status := getattr(error, "status", None):
        return status >= 500 or status in (408, 429)
    is_client_error = type(error).__module__.startswith("aiohttp") and not isinstance(error, ValueError)
    return is_client_error or isinstance(error, ConnectionError | TimeoutError)
