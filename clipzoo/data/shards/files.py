"""Shards as local files, wherever they are."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clipzoo.data.shards.sources import is_remote
from clipzoo.errors import ConfigError

MISSING = (-1, 0)
_THREADS = 16


class ShardFiles:
    """Locations -> local paths. Remote shards (fsspec URLs, `pipe:COMMAND`) are copied whole into a bounded cache.

    The cache is shared by all processes of a machine. folder: null for one of this user's in the temporary folder.
    gigabytes: the shards used longest ago go first; one that is open stays readable.
    """

    def __init__(self, folder: str | None, gigabytes: float) -> None:
        self._folder = Path(folder or Path(tempfile.gettempdir()) / f"clipzoo-shards-{os.getuid()}")
        self._chosen = folder is not None
        self._limit = gigabytes * 1e9

    def states(self, locations: Sequence[str]) -> list[tuple[int, int] | None]:
        """(bytes, time or tag of the last change) of each; MISSING where there is none; None if only reading tells."""
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(_state, locations))

    def path(self, location: str, *, size: int | None = None) -> str:
        """Where the shard can be opened now; OSError if it cannot be had.

        size: a copy in the cache is trusted if it has so many bytes; None: not at all.
        """
        if not is_remote(location):
            return location
        self._folder.mkdir(mode=0o777 if self._chosen else 0o700, parents=True, exist_ok=True)
        # The temporary folder is everyone's: what another user put there is neither read nor written through.
        if not self._chosen and (self._folder.is_symlink() or self._folder.stat().st_uid != os.getuid()):
            raise ConfigError(f"{self._folder} belongs to another user: set data.cache_folder to a folder of yours")
        name = location.rpartition("/")[2].partition("?")[0][-60:].replace(" ", "_")
        kept = self._folder / f"{hashlib.sha256(location.encode()).hexdigest()[:16]}-{name}"
        with _locked(self._folder / f".{kept.name}.lock"):
            if not kept.exists() or kept.stat().st_size != size:
                self._fetch(location, kept)
            else:
                os.utime(kept)
        return str(kept)

    def _fetch(self, location: str, kept: Path) -> None:
        part = kept.with_name(f".{kept.name}.part")
        try:
            with open(part, "wb") as target:
                _copy(location, target)
            os.replace(part, kept)
        finally:
            part.unlink(missing_ok=True)
        with _locked(self._folder / ".evict.lock"):
            self._evict(kept)

    def _evict(self, newest: Path) -> None:
        found = [(path, path.stat()) for path in self._folder.iterdir() if not path.name.startswith(".")]
        total = sum(state.st_size for _, state in found)
        for path, state in sorted(found, key=lambda each: each[1].st_mtime_ns):
            if total > self._limit and path != newest:
                path.unlink(missing_ok=True)
                total -= state.st_size


def _state(location: str) -> tuple[int, int] | None:
    if location.startswith("pipe:"):
        return None
    try:
        if is_remote(location):
            return _remote_state(location)
        found = os.stat(location)
        return found.st_size, found.st_mtime_ns
    except FileNotFoundError:
        return MISSING


def _remote_state(url: str) -> tuple[int, int] | None:
    files, path = _filesystem(url)
    with _as_os_error(url):
        facts = files.info(path)
    if facts.get("size") is None:
        return None
    tags = [
        str(facts[key]) for key in ("ETag", "etag", "mtime", "LastModified", "last_modified", "created") if key in facts
    ]
    return int(facts["size"]), int(hashlib.sha256("".join(tags).encode()).hexdigest()[:12], 16)


def _copy(location: str, target: Any) -> None:
    if location.startswith("pipe:"):
        command = location.removeprefix("pipe:")
        shell = shutil.which("bash")
        # A pipeline fails with its first command where the shell can tell.
        words = [shell, "-o", "pipefail", "-c", command] if shell else ["/bin/sh", "-c", command]
        ended = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=target, stderr=subprocess.PIPE)
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip()[-200:]
            raise OSError(f"{command!r} exited with {ended.returncode}: {said}")
        return
    files, path = _filesystem(location)
    with _as_os_error(location), files.open(path, "rb") as source:
        shutil.copyfileobj(source, target, 1 << 20)


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"data.shards: {url} cannot be read: {error}") from error


@contextmanager
def _as_os_error(url: str) -> Iterator[None]:
    """Every backend has exceptions of its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing is not enough: a loader process forked meanwhile has the open file, and with it the lock, too.
            fcntl.flock(file, fcntl.LOCK_UN)
