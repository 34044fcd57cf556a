"""The lock of a run directory: two trainings in it would overwrite each other's checkpoints and mix their logs."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.errors import ConfigError

PATIENCE_SECONDS = 20.0
"""Seconds to wait for another process, which may have been told to stop."""


class RunLock(AbstractContextManager["RunLock"]):
    """Exclusive lock on a run directory, against other processes of this machine and of others.

    As a context manager it is released on exit; the system releases it when the process ends, in any way. A process
    may lock a directory again. On a file system without locks, nothing is locked.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # A descriptor, not a file object: closing any handle of the file, as garbage collection would, releases the
        # lock of the whole process.
        self._descriptor: int | None = None

    def acquire(self, patience: float = PATIENCE_SECONDS) -> None:
        """Take the lock. Raises ConfigError if another process holds it for longer than `patience` seconds."""
        if self._descriptor is not None:
            return
        path = self.folder / ".lock"
        with io.explained(path):
            descriptor = _opened(path)
        end = time.monotonic() + patience
        waiting = False
        while not _lock(descriptor):
            owner = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "another process"
            if time.monotonic() > end:
                os.close(descriptor)
                raise ConfigError(
                    f"{self.folder} is being trained by {owner}: wait for it, end it, or give another name=..."
                )
            if not waiting:
                limit = "" if math.isinf(patience) else f" {patience:g} s"
                print(f"{self.folder} is being trained by {owner}: waiting{limit}", file=sys.stderr, flush=True)
                waiting = True
            time.sleep(0.2)
        self._descriptor = descriptor
        with io.explained(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{this_process()}\n".encode(), 0)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __exit__(self, *error: Any) -> None:
        self.release()


def this_process() -> str:
    """Return the owner of a lock for messages: this process, its machine and the time."""
    return f"process {os.getpid()} on {platform.node()} since {datetime.now():%Y-%m-%d %H:%M:%S}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, after waiting for it. Raises OSError if the file cannot be opened or made."""
    descriptor = _opened(path)
    try:
        _lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Lock a file, made if missing, until the returned descriptor is closed; None if another process holds the lock."""
    descriptor = _opened(path)
    if _lock(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _opened(path: Path) -> int:
    """Open a lock file, made if missing. Links are not followed, because the content is replaced."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def _lock(descriptor: int, wait: bool = False) -> bool:
    """Lock the file; return False if another process holds the lock. wait: wait for other processes instead."""
    try:
        # Not flock: loader processes would inherit that lock, and may outlive a killed training by a moment.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True
