"""One run in a store while a process writes it: its lock, its upload, and the checkpoints that it resumes from."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from clipzoo import io
from clipzoo.errors import TrainingError
from clipzoo.io.stores import lease
from clipzoo.io.stores.fetch import fetch_group, fetch_newest, refresh
from clipzoo.io.stores.lease import Lease
from clipzoo.io.stores.mirror import Mirror
from clipzoo.io.stores.record import Record
from clipzoo.io.stores.store import Store, require
from clipzoo.io.stores.tree import local_files, tree_of
from clipzoo.runs.lock import RunLock, locked
from clipzoo.runs.places.ranks import OnFailure

log = logging.getLogger(__name__)

WAIT_FOR_FIRST = 600.0
"""Seconds that other machines wait for the first one to upload the checkpoint that the run resumes from."""


@dataclass
class RemoteRun:
    """One run in a store while this process writes it. patience, every, on_failure: see `Mirror`."""

    store: Store
    folder: Path
    patience: float
    every: float
    on_failure: OnFailure = lambda error: None
    _lease: Lease | None = None
    _mirror: Mirror | None = None
    _stopped: threading.Event = field(default_factory=threading.Event)

    def begin(self, lock: RunLock | None = None, fetch: bool = True) -> list[str]:
        """Lock the run, fetch what it needs to resume, and start to keep the store up to date.

        lock: of the local copy. fetch: leave the local copy as it is if False. Returns the names of the checkpoints
        that the run resumes from.

        Raises:
            ConfigError: another process trains the run, or the store cannot be written.
        """
        io.make_folder(self.folder)
        if lock is not None:
            lock.acquire()
        record, holder = Record(self.folder), uuid.uuid4().hex
        self._lease = Lease(self.store, holder)
        last = require(self.store, lambda: self._take(record.id))
        needed: list[str] = []
        if fetch:
            with alone(self.folder.parent):
                require(self.store, lambda: refresh(self.store, self.folder, last))
                needed = require(self.store, lambda: fetch_newest(self.store, self.folder))
        # Not before: until the copy is complete, the store's is the newer one.
        record = Record(self.folder)
        record.take(holder)
        background = Store(self.store.url, self.store.key, patience=0.0)
        self._mirror = Mirror(
            self.folder, background, record, self.patience, self.every, self.on_failure, self._lease.require
        )
        require(self.store, self._mirror.start)
        threading.Thread(target=self._beat, name="lease", daemon=True).start()
        return needed

    def fetch(self, needed: Sequence[str]) -> None:
        """Fetch these checkpoints on another machine than the first; wait until it has uploaded them."""
        end = time.monotonic() + WAIT_FOR_FIRST
        for name in needed:
            while not self._has(name):
                if time.monotonic() > end:
                    raise TrainingError(f"{self.store.url}/{name} is not in the store after {WAIT_FOR_FIRST:g} seconds")
                time.sleep(1.0)

    def finish(self) -> None:
        """Wait until the store has everything, and unlock the run. Raises TrainingError after `patience` seconds."""
        if self._stopped.is_set() or self._mirror is None or self._lease is None:
            return
        self._stopped.set()
        self._mirror.finish()
        try:
            self._lease.release()
        except Exception as error:
            log.warning("the lock of %s was not released: %s", self.store.url, error)

    def finish_at_exit(self) -> None:
        """`finish` when the process ends early: a failure of the store is logged, unless it is the cause."""
        failed = self._mirror is not None and self._mirror.failure is not None
        try:
            self.finish()
        except TrainingError as error:
            if not failed:
                log.warning("%s", error)

    def is_behind(self) -> bool:
        """Return True if the local copy has files that the store lacks."""
        record, files = Record(self.folder), local_files(self.folder)
        return any(not record.has(name, files[name]) for name in tree_of(files).plain)

    def _take(self, own: str | None) -> str | None:
        assert self._lease is not None
        return self._lease.acquire(own)

    def _has(self, name: str) -> bool:
        sizes = self.store.sizes()
        group = tree_of(sizes).groups.get(name)
        with alone(self.folder.parent):
            return group is not None and fetch_group(self.store, self.folder, group, sizes)

    def _beat(self) -> None:
        assert self._lease is not None and self._mirror is not None
        while not self._stopped.wait(lease.BEAT):
            try:
                owner = self._lease.beat()
            # Stores raise errors of many types. Uploads that wait for this one end the run.
            except Exception as error:
                log.warning("%s: the lock was not renewed: %s", self.store.url, error)
                continue
            if owner is not None and not self._stopped.is_set():
                self._mirror.stop(TrainingError(f"{self.store.url} has been taken by {owner}: this run ends"))
                return


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one process of this machine after the other write the local copies."""
    io.make_folder(folder)
    with locked(folder / ".fetch.lock"):
        yield
