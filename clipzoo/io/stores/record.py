"""Record of the files of a local folder that a store has: `.remote.json` in the folder."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from clipzoo.io.files import MB, DamageLog, read_json, write_json
from clipzoo.io.stores.tree import Version

FILE = ".remote.json"


class Record:
    """id: of this copy of the run directory. It remembers the versions of files that were read back from the store."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / FILE, threading.Lock()
        remedy = "the files are sent again"
        content: dict[str, Any] = (
            DamageLog().read(partial(read_json, self._path, 16 * MB, remedy), {}) if self._path.exists() else {}
        )
        stored = content.get("stored")
        self.id: str | None = content.get("id")
        self._stored: dict[str, Any] = stored if isinstance(stored, dict) else {}

    def take(self, holder: str) -> None:
        """Note that this copy is the last that has written to the store, under this id."""
        self.id = holder
        self._save()

    def has(self, name: str, version: Version) -> bool:
        """Return True if the store has this version of a file."""
        with self._lock:
            return self._stored.get(name) == list(version)

    def knows(self, name: str) -> bool:
        """Return True if the store had some version of a file of this copy."""
        with self._lock:
            return name in self._stored

    def add(self, *files: tuple[str, Version]) -> None:
        """Note files that the store has."""
        with self._lock:
            self._stored.update({name: list(version) for name, version in files})
        self._save()

    def forget(self, name: str) -> None:
        with self._lock:
            self._stored.pop(name, None)
        self._save()

    def forget_unless(self, sizes: Mapping[str, int]) -> None:
        """Forget files that the store does not have in this size."""
        with self._lock:
            self._stored = {name: kept for name, kept in self._stored.items() if sizes.get(name) == kept[0]}

    def _save(self) -> None:
        with self._lock:
            write_json(self._path, {"id": self.id, "stored": self._stored})
