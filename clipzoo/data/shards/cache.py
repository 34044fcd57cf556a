"""Local copies of remote shards."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clipzoo.data.shards import locations
from clipzoo.errors import ConfigError


class ShardCache:
    """Maps locations to local paths. Remote shards are copied whole into a bounded folder.

    All processes of a machine share the cache. folder: None for a folder of this user in the temporary folder.
    gigabytes: limit of the cache; the least recently used shards are deleted first. An open shard stays readable.
    """

    def __init__(self, folder: str | None, gigabytes: float) -> None:
        self._folder = Path(folder or Path(tempfile.gettempdir()) / f"clipzoo-shards-{os.getuid()}")
        self._chosen = folder is not None
        self._limit = gigabytes * 1e9

    def path(self, location: str, *, size: int | None = None) -> str:
        """Return a local path of the shard; download it if needed. Raises OSError.

        size: a cached copy of that many bytes is reused; None: always download.
        """
        if not locations.is_remote(location):
            return location
        self._folder.mkdir(mode=0o777 if self._chosen else 0o700, parents=True, exist_ok=True)
        # Everyone can write to the temporary folder: files of another user are neither read nor written through.
        if not self._chosen and (self._folder.is_symlink() or self._folder.stat().st_uid != os.getuid()):
            raise ConfigError(f"{self._folder} belongs to another user: set data.cache_folder to a folder of yours")
        name = location.rpartition("/")[2].partition("?")[0][-60:].replace(" ", "_")
        copy = self._folder / f"{hashlib.sha256(location.encode()).hexdigest()[:16]}-{name}"
        with _locked(self._folder / f".{copy.name}.lock"):
            if not copy.exists() or copy.stat().st_size != size:
                self._download(location, copy)
            else:
                os.utime(copy)
        return str(copy)

    def _download(self, location: str, copy: Path) -> None:
        part = copy.with_name(f".{copy.name}.part")
        try:
            with open(part, "wb") as target:
                locations.copy(location, target)
            os.replace(part, copy)
        finally:
            part.unlink(missing_ok=True)
        with _locked(self._folder / ".evict.lock"):
            self._evict(copy)

    def _evict(self, newest: Path) -> None:
        copies = [(path.stat(), path) for path in self._folder.iterdir() if not path.name.startswith(".")]
        total = sum(status.st_size for status, _ in copies)
        for status, path in sorted(copies, key=lambda copy: copy[0].st_mtime_ns):
            if total > self._limit and path != newest:
                path.unlink(missing_ok=True)
                total -= status.st_size


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing does not suffice: a loader process forked in the meantime shares the open file and its lock.
            fcntl.flock(file, fcntl.LOCK_UN)
