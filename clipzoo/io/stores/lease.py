"""The lock of a run in a store: a small file that its owner writes again and again.

A store cannot tell whether the owner lives. Another one waits until the file no longer changes, takes it, and reads it
back. The owner reads it before each writing, and stops if it is another's. Where the store creates files exclusively,
of two that begin at the same time one gets it; elsewhere, the one whose content is read back.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
from datetime import datetime
from typing import Any

from clipzoo.errors import ConfigError
from clipzoo.io.stores.store import Store

log = logging.getLogger(__name__)

FILE = ".writer.json"
BEAT = 15.0
"""Seconds between two writings."""
HEARTBEAT_TIMEOUT_SECONDS = 4 * BEAT
"""Seconds without a change after which the owner counts as dead."""
PATIENCE = 20.0
"""Seconds to wait for an owner that may have been told to stop."""
SETTLING_SECONDS = 1.0
"""Seconds between taking and reading back a file that had another owner."""
WITHOUT_BEATS = ("hf",)
"""Protocols whose stores keep every version of a file: the lock is written at the start and the end alone."""


class Lease:
    """The right to write a run in a store. holder: id of the local copy of the run directory."""

    def __init__(self, store: Store, holder: str) -> None:
        self._store, self._holder, self._count = store, holder, 0
        self._owner = f"process {os.getpid()} on {platform.node()} since {datetime.now():%Y-%m-%d %H:%M:%S}"
        self._last = 0.0
        self.held = False

    def acquire(self, own: str | None) -> str | None:
        """Take the lock; return the id of the copy that had it before, None if none had.

        own: the id that this copy had before: a process of this machine that held it is dead, as the lock of the local
        folder says.

        Raises:
            ConfigError: another machine holds the lock, or takes it at the same moment.
        """
        before = writer(self._store)
        if before is None and self._write(is_new=True):
            self._take()
            return None
        before = before or writer(self._store) or {}
        contested = own is None or before.get("id") != own
        if contested and not before.get("released"):
            self._wait_for(before)
        self._write()
        if contested:
            time.sleep(SETTLING_SECONDS)
        now = writer(self._store) or {}
        if now.get("id") != self._holder:
            raise ConfigError(f"{self._taken(now)}: wait for it, end it, or give another name=...")
        self._take()
        return before.get("id")

    def beat(self) -> str | None:
        """Show that this process lives. Return who has taken the lock, None if it is still held."""
        if self._store.protocol in WITHOUT_BEATS:
            return None
        now = writer(self._store) or {}
        if now.get("id") != self._holder:
            self.held = False
            return str(now.get("owner", "another process"))
        self._write()
        self._last = time.monotonic()
        return None

    def require(self) -> None:
        """Before a writing: after a pause in which another could have taken the lock, read it again.

        Raises:
            OSError: it is another's.
        """
        if time.monotonic() - self._last > HEARTBEAT_TIMEOUT_SECONDS / 2 and (owner := self.beat()) is not None:
            raise OSError(f"the run has been taken by {owner}")

    def release(self) -> None:
        """Give the lock back, if it is held. The file remains: it says which copy was the last to write."""
        if self.held:
            self.held = False
            self._write(released=True)

    def _take(self) -> None:
        self.held, self._last = True, time.monotonic()

    def _wait_for(self, before: dict[str, Any]) -> None:
        """Return once the owner has released the lock or is dead. Raises ConfigError if it continues."""
        if self._store.protocol in WITHOUT_BEATS:
            log.warning("%s, and this store cannot tell whether it still is", self._taken(before))
            return
        print(f"{self._taken(before)}: waiting up to {HEARTBEAT_TIMEOUT_SECONDS:g} s", file=sys.stderr, flush=True)
        begin, alive = time.monotonic(), False
        while time.monotonic() - begin < (PATIENCE if alive else HEARTBEAT_TIMEOUT_SECONDS):
            time.sleep(min(1.0, BEAT / 4))
            now = writer(self._store)
            if now is None or now.get("released"):
                return
            alive = alive or now != before
        if alive:
            raise ConfigError(f"{self._taken(before)}: wait for it, end it, or give another name=...")

    def _write(self, is_new: bool = False, released: bool = False) -> bool:
        self._count += 1
        content = {"id": self._holder, "owner": self._owner, "beat": self._count, "released": released}
        return self._store.write(FILE, json.dumps(content).encode(), is_new)

    def _taken(self, content: dict[str, Any]) -> str:
        return f"{self._store.url} is being trained by {content.get('owner', 'another process')}"


def writer(store: Store) -> dict[str, Any] | None:
    """Return the content of the lock of a run: who was the last to write it. None if there is none."""
    content = store.read(FILE)
    try:
        value = json.loads(content) if content else None
    except ValueError:
        value = None
    return value if isinstance(value, dict) else None
