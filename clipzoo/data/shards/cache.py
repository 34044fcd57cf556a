"""Local copies of remote shards.

A shard is opened while its lock is held, and an open file stays readable after its deletion. What is read from a shard
therefore never depends on the size of the cache, however many processes share it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from clipzoo.data.shards import locations
from clipzoo.errors import ConfigError
from clipzoo.io import NO_SPACE


class ShardCache:
    """Opens shards. Remote shards are copied whole into a bounded folder.

    All processes of a machine share the cache. folder: None for a folder of this user in the temporary folder.
    gigabytes: limit of the cache; the least recently used shards are deleted first.
    """

    def __init__(self, folder: str | None, gigabytes: float) -> None:
        self._folder = Path(folder or Path(tempfile.gettempdir()) / f"clipzoo-shards-{os.getuid()}")
        self._chosen = folder is not None
        self._limit = gigabytes * 1e9

    def open(self, location: str, *, size: int | None = None) -> int:
        """Return a file descriptor of the shard, which the caller closes; download the shard if needed.

        size: a cached copy of that many bytes is reused; None: always download.

        Raises:
            OSError: the shard cannot be read.
            ConfigError: the cache cannot be written.
        """
        if not locations.is_remote(location):
            # A named pipe that has taken the place of a shard would wait for a writer.
            return os.open(location, os.O_RDONLY | os.O_NONBLOCK)
        with self._explained():
            self._folder.mkdir(mode=0o777 if self._chosen else 0o700, parents=True, exist_ok=True)
            # Everyone can write to the temporary folder: files of another user are neither read nor written through.
            if not self._chosen and (self._folder.is_symlink() or self._folder.stat().st_uid != os.getuid()):
                raise ConfigError(f"{self._folder} belongs to another user: set data.cache_folder to a folder of yours")
            name = location.rpartition("/")[2].partition("?")[0][-60:].replace(" ", "_")
            copy = self._folder / f"{hashlib.sha256(location.encode()).hexdigest()[:16]}-{name}"
            lock = open(self._folder / f".{copy.name}.lock", "w")  # noqa: SIM115 - closed by `_held`
        with _held(lock):
            descriptor = None if size is None else _open_copy(copy, size)
            return self._download(location, copy) if descriptor is None else descriptor

    def _download(self, location: str, copy: Path) -> int:
        part = copy.with_name(f".{copy.name}.part")
        try:
            with self._explained():
                target = open(part, "wb")  # noqa: SIM115 - closed below
            with self._explained(full_disk_only=True), target:
                locations.copy(location, target)
            with self._explained():
                descriptor = os.open(part, os.O_RDONLY)
                os.replace(part, copy)
        finally:
            part.unlink(missing_ok=True)
        with _held(open(self._folder / ".evict.lock", "w")):
            self._evict(copy)
        return descriptor

    def _evict(self, newest: Path) -> None:
        copies = []
        for path in self._folder.glob("[!.]*"):
            # The folder may be emptied by hand at any time, and may have files of other users.
            with suppress(OSError):
                copies.append((path.stat(), path))
        total = sum(status.st_size for status, _ in copies)
        for status, path in sorted(copies, key=lambda copy: copy[0].st_mtime_ns):
            if total > self._limit and path != newest:
                with suppress(OSError):
                    path.unlink()
                total -= status.st_size

    @contextmanager
    def _explained(self, full_disk_only: bool = False) -> Iterator[None]:
        """Turn errors of the cache's own files into ConfigError: they must not count as unusable samples.

        full_disk_only: other errors are those of the shard's source.
        """
        try:
            yield
        except OSError as error:
            full = error.errno in NO_SPACE or self._disk_is_full()
            if full_disk_only and not full:
                raise
            cause = "the disk is full" if full else error.strerror or error
            raise ConfigError(
                f"the cache of remote shards {self._folder} cannot be written: {cause}; free some space, or set "
                "data.cache_folder to another folder or data.cache_gigabytes to less"
            ) from error

    def _disk_is_full(self) -> bool:
        # A command whose output does not fit reports this in words of its own.
        return self._folder.exists() and os.statvfs(self._folder).f_bavail == 0


def _open_copy(copy: Path, size: int) -> int | None:
    """Open a copy of that many bytes and mark it as used; None if there is none."""
    try:
        descriptor = os.open(copy, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    if os.fstat(descriptor).st_size == size:
        with suppress(PermissionError):  # a copy of another user
            os.utime(descriptor)
        return descriptor
    os.close(descriptor)
    return None


@contextmanager
def _held(file: TextIO) -> Iterator[None]:
    """Hold the lock of an open file, and close the file."""
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing does not suffice: a loader process forked in the meantime shares the open file and its lock.
            fcntl.flock(file, fcntl.LOCK_UN)
