"""Small disks in memory, for tests of full disks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, **options: str) -> Iterator[Path]:
    """Mount a tmpfs with options such as size="1m" at `folder`; skip the test where that is impossible."""
    if os.getuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder.mkdir(parents=True)
    settings = ",".join(f"{name}={value}" for name, value in options.items())
    command = ["mount", "-t", "tmpfs", "-o", settings, "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Fill a disk except for `leave` bytes, and return the file that fills it."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(disk).free - leave))
    return filler


def use_all_inodes(disk: Path) -> None:
    """Make empty files until the disk refuses."""
    number = 0
    while True:
        try:
            (disk / f"inode{number}").touch()
        except OSError:
            return
        number += 1
