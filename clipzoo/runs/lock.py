"""One training at a time in a run's folder: two would overwrite each other's checkpoints and mix their logs."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import IO

from clipzoo.errors import ConfigError

PATIENCE = 20.0
"""Seconds that a process which has been told to end may take."""

_held: IO[str] | None = None


def hold(folder: Path, patience: float = PATIENCE) -> None:
    """Keep other processes, of this machine or another, from training in `folder` until this process ends or holds
    another; ConfigError if one does already and does not end within `patience` seconds.

    The system lets go of the lock however the process ends. Where a file system has no locks nothing is held.
    """
    global _held
    if _held is not None:
        # Before the next is opened: closing any handle of a file lets go of this process's lock on it.
        _held.close()
        _held = None
    # Not flock: that would live on in data workers, which outlive a killed trainer by some seconds.
    file = open(folder / ".lock", "a+")  # noqa: SIM115
    end = time.monotonic() + patience
    said = False
    while not _taken(file):
        file.seek(0)
        owner = file.read().strip() or "another process"
        if time.monotonic() > end:
            raise ConfigError(f"{folder} is being trained by {owner}: wait for it, end it, or give another name=...")
        if not said:
            print(f"{folder} is being trained by {owner}: waiting {patience:g} s for it", file=sys.stderr, flush=True)
            said = True
        time.sleep(0.2)
    _held = file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
    file.flush()


def _taken(file: IO[str]) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True
