"""A folder in a store: its files by their names relative to it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clipzoo.errors import ConfigError, TrainingError, cause, masked
from clipzoo.io.files import whole
from clipzoo.io.stores.filesystem import (
    ChangedError,
    Result,
    TruncatedError,
    is_missing,
    open_filesystem,
    protocol_of,
    read_ranges,
    repeated,
)


class Store:
    """A folder behind an fsspec URL. Opened on the first use.

    key: of the configuration, for messages. patience: seconds for which a request is repeated; None for the default.
    """

    def __init__(self, url: str, key: str, patience: float | None = None) -> None:
        from fsspec import available_protocols, registry

        if masked(url) != url:
            raise ConfigError(f"{key}={url} holds a password or token: give it by the store's environment variables")
        if not re.match("[^/]+:///*[^/?#]", url) or protocol_of(url) not in {*available_protocols(), *registry}:
            raise ConfigError(f"{key}={url} is no URL of a store: give PROTOCOL://BUCKET/FOLDER, s3://bucket/runs")
        self.url, self.key, self.patience = url.rstrip("/"), key, patience
        self._opened: tuple[Any, str] | None = None

    def __truediv__(self, name: str) -> Store:
        """Return a folder in this one."""
        return Store(f"{self.url}/{name}", self.key, self.patience)

    @property
    def protocol(self) -> str:
        return protocol_of(self.url)

    def names(self) -> list[str]:
        """Return the names of the files and folders directly in this folder; none if it does not exist."""
        listed = self._repeated(lambda filesystem, root: filesystem.ls(root, detail=False), [])
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in listed)

    def sizes(self) -> dict[str, int]:
        """Return the size of every file below this folder by its name; none if it does not exist."""

        def find(filesystem: Any, root: str) -> dict[str, int]:
            found = filesystem.find(root, detail=True)
            prefix = root.rstrip("/") + "/"
            # Stores list a folder's placeholder as a file of its own name.
            return {
                path[len(prefix) :]: int(facts["size"] or 0)
                for path, facts in found.items()
                if path.startswith(prefix) and len(path) > len(prefix) and ".." not in path.split("/")
            }

        return self._repeated(find, {})

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, None if it does not exist."""
        return self._repeated(lambda filesystem, root: filesystem.cat_file(f"{root}/{name}"), None)

    def write(self, name: str, content: bytes, is_new: bool = False) -> bool:
        """Write a small file. is_new: only if it does not exist, which most stores decide atomically.

        Returns False if it exists.
        """
        mode = {"mode": "create"} if is_new else {}
        try:
            self._made(name, lambda filesystem, path: filesystem.pipe_file(path, content, **mode))
        except FileExistsError:
            return False
        return True

    def upload(self, file: Path, name: str) -> str:
        """Write a file, read it back, and return its SHA-256.

        Raises:
            TruncatedError: the store holds other bytes than were sent.
        """
        size, digest = file.stat().st_size, _digest(_blocks(file))
        self._made(name, lambda filesystem, path: _put(filesystem, file, path))
        if _digest(self.content(name, size)) != digest:
            raise TruncatedError(f"{self.url}/{name} differs from the {size} bytes that were sent")
        return digest

    def content(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the content of a file of `size` bytes.

        Raises:
            ChangedError: it has another size.
        """
        filesystem, root = self._open()
        path = f"{root}/{name}"
        actual = self._repeated(lambda filesystem, root: filesystem.info(path)["size"])
        if actual != size:
            raise ChangedError(f"{self.url}/{name} has {actual} bytes, not {size}")
        yield from read_ranges(f"{self.url}/{name}", filesystem, path, size, self.key)

    def read_whole(self, name: str) -> bytes:
        """Return the content of a file that may be replaced in the meantime: one of its versions, never a part."""

        def read(filesystem: Any, root: str) -> bytes:
            content: bytes = filesystem.cat_file(f"{root}/{name}")
            if len(content) != filesystem.info(f"{root}/{name}")["size"]:
                raise TruncatedError(f"{self.url}/{name} ends early, or was replaced")
            return content

        return self._repeated(read)

    def download(self, name: str, size: int, target: Path) -> str:
        """Copy a file of `size` bytes to `target`, completely or not at all; return its SHA-256."""

        def copy(filesystem: Any, root: str) -> str:
            digest = hashlib.sha256()
            with whole(target, only_full_disks=True) as file:
                for content in self.content(name, size):
                    file.write(content)
                    digest.update(content)
            return digest.hexdigest()

        return self._repeated(copy)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        self._repeated(lambda filesystem, root: filesystem.rm_file(f"{root}/{name}"), None)

    def _made(self, name: str, write: Callable[[Any, str], Any]) -> None:
        """Call `write(file system, path)`; make the folder of the file where a store has folders that must exist."""

        def action(filesystem: Any, root: str) -> None:
            try:
                write(filesystem, f"{root}/{name}")
            except FileNotFoundError:
                # Not before: stores without folders would try to make a bucket.
                filesystem.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
                write(filesystem, f"{root}/{name}")

        self._repeated(action)

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            self._opened = open_filesystem(self.url, self.key)
        return self._opened

    def _repeated(self, action: Callable[[Any, str], Result], missing: Any = ...) -> Result:
        """Return `action(file system, root)`, or `missing` if the file does not exist."""
        filesystem, root = self._open()
        filesystem.invalidate_cache()  # not all file systems can do without one
        try:
            return repeated(self.url, lambda: action(filesystem, root), self.key, self.patience)
        except OSError as error:
            if missing is ... or not is_missing(error):
                raise
            return missing


def require(store: Store, action: Callable[[], Result]) -> Result:
    """Return `action()`; any failure of the store is a ConfigError that names it. For the start of a command."""
    try:
        return action()
    except ConfigError:
        raise
    # The backends of fsspec raise errors of many types.
    except (TrainingError, Exception) as error:
        text = str(error) if isinstance(error, TrainingError) else f"{store.key}={store.url}: {cause(error)}"
        raise ConfigError(f"{text}. Credentials are those of the environment (docs/how_to/remote_runs.md)") from error


def _put(filesystem: Any, file: Path, path: str) -> None:
    if "file" not in ([filesystem.protocol] if isinstance(filesystem.protocol, str) else filesystem.protocol):
        filesystem.put_file(str(file), path)
        return
    # Object stores show a file once it is complete; a disk would show its parts.
    folder, _, name = path.rpartition("/")
    part = f"{folder}/.{name}.part"
    filesystem.put_file(str(file), part)
    filesystem.mv(part, path)


def _blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as source:
        while block := source.read(1 << 20):
            yield block


def _digest(blocks: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()
