"""The lock of a run directory: two trainings in it would overwrite each other's checkpoints and mix their logs."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import platform
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
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
        self._owner, self._end = "", (0, "")

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
            self._owner = this_process()
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{self._owner}\n".encode(), 0)

    def note_end(self, code: int, reason: str) -> None:
        """Write why this process is about to end to the lock file, for `lock_state`; no-op without the lock."""
        self._end = code, reason
        if self._descriptor is not None:
            with suppress(OSError):  # a full disk does not hide the reason of the end
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{self._owner}\n{code} {' '.join(reason.split())}\n".encode(), 0)

    def release(self) -> None:
        if self._descriptor is not None:
            self.note_end(*self._end)
            os.close(self._descriptor)
            self._descriptor = None

    def __exit__(self, *error: Any) -> None:
        self.release()


def lock_state(path: Path) -> tuple[bool, str, int | None, str]:
    """Read a lock file without taking the lock. Raises DamagedFileError.

    Returns whether a process holds it, its last owner, and the exit code and the message with which that owner ended:
    None if it did not write them, as after SIGKILL.
    """
    with io.readable(path, io.MB) as file:
        # struct flock: type, origin, start, length and process; the system replaces the type.
        asked, is_held = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0), False
        with suppress(OSError):  # a file system without locks
            is_held = fcntl.fcntl(file, fcntl.F_GETLK, asked)[:2] != struct.pack("h", fcntl.F_UNLCK)
        owner, _, end = file.read().decode(errors="replace").partition("\n")
    code, _, reason = end.strip().partition(" ")
    return is_held, owner.strip(), int(code) if code.isdecimal() else None, reason


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
