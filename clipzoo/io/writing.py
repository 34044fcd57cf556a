"""Writing files completely or not at all, and one message for a full disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from clipzoo.errors import TrainingError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""Errors of file systems that cannot flush a folder."""


class WriteError(TrainingError):
    """A file cannot be written. The message names the file, the cause, the free space and the remedy."""

    exit_code = os.EX_IOERR


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically and durably; see `whole`."""
    with whole(path) as file:
        file.write(text.encode("utf-8", errors="backslashreplace"))


def write_json(path: Path, content: object) -> None:
    """Write `content` as JSON atomically and durably; see `whole`."""
    write_whole(path, json.dumps(content, indent=1))


@contextmanager
def whole(path: Path, only_full_disks: bool = False) -> Iterator[IO[bytes]]:
    """Yield a temporary file to write to, which takes the name `path` once its content is on the disk.

    A reader sees the old file or the new one, never a part, whatever is killed or full. Missing folders are made.

    only_full_disks: see `explained`.

    Raises:
        WriteError: the file cannot be written; an earlier file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained(path, only_full_disks):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _flush_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which takes the name `folder` at the end, or is removed after an error.

    `folder` must not exist then, or be empty. What a killed process has left is removed first.

    Raises:
        WriteError: the disk is full, or the folder cannot be made.
    """
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(temporary)
    try:
        with explained(folder, only_full_disks=True):
            yield temporary
        publish_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Give a folder of finished files its name, atomically and durably; `folder` must not exist. Raises WriteError."""
    with explained(folder):
        _flush_folder(temporary)
        os.rename(temporary, folder)
        _flush_folder(folder.parent)


class JsonLines:
    """Appends mappings to a file, one line of JSON for each. A line that a kill has left unfinished is ended first.

    Raises:
        WriteError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path.parent)
        with explained(path):
            # Without a buffer: after an error nothing is left that closing would try to write again.
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - open until `close`
            if self._file.tell() and os.pread(self._file.fileno(), 1, self._file.tell() - 1) != b"\n":
                self._write(b"\n")

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line."""
        with explained(self.path):
            self._write(json.dumps(row).encode() + b"\n")

    def close(self) -> None:
        self._file.close()

    def _write(self, content: bytes) -> None:
        while content:
            content = content[self._file.write(content) :]


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, unless it exists. Raises WriteError."""
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def explained(path: Path, only_full_disks: bool = False) -> Iterator[None]:
    """Turn an error of the operating system while `path` is written into a WriteError.

    only_full_disks: leave other errors as they are, because the block reads files too.
    """
    try:
        yield
    except OSError as error:
        if only_full_disks and error.errno not in NO_SPACE:
            raise
        raise write_error(path, error) from error


def write_error(path: Path, error: Exception) -> WriteError:
    """Describe an error while `path` was written: the cause, the free space, and the remedy."""
    number = error.errno if isinstance(error, OSError) else None
    cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
    bytes_free, files_free = _free(path.parent)
    if number in NO_SPACE and files_free == 0:
        cause, remedy = "the disk has no free inodes", "Remove files, then run the same command again"
    elif number in NO_SPACE:
        remedy = "Free some space, then run the same command again"
    else:
        remedy = "Make the folder writable, or choose another one"
    free = "" if bytes_free is None else f" ({_megabytes(bytes_free)} free on its disk)"
    return WriteError(f"could not write {path}: {cause}{free}. {remedy}")


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def _free(folder: Path) -> tuple[int | None, int | None]:
    """Return the free bytes and inodes of the disk of a folder that need not exist; None where unknown."""
    for parent in (folder, *folder.parents):
        try:
            facts = os.statvfs(parent)
        except OSError:
            continue
        return facts.f_bavail * facts.f_frsize, facts.f_favail if facts.f_files else None
    return None, None


def _megabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
