"""Runs in a store, `runs=s3://...`: a local copy of the run directory, kept in the store while the run goes on.

Every command works on the local copy, <CLIPZOO_STAGING>/<name of the store>/<run>. A copy is fetched before it is used,
unless it is newer than the store's.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from clipzoo import io
from clipzoo.errors import ConfigError, TrainingError
from clipzoo.io.stores import lease
from clipzoo.io.stores.fetch import THREADS, fetch_group, fetch_newest, refresh
from clipzoo.io.stores.filesystem import is_url
from clipzoo.io.stores.lease import Lease
from clipzoo.io.stores.mirror import Mirror
from clipzoo.io.stores.record import Record
from clipzoo.io.stores.store import Store, require
from clipzoo.io.stores.tree import local_files, tree_of
from clipzoo.runs.lock import RunLock

log = logging.getLogger(__name__)

VARIABLE = "CLIPZOO_STAGING"
"""Environment variable with the folder for local copies."""
CONFIG = "config.yaml"
WAIT_FOR_FIRST = 600.0
"""Seconds that other machines wait for the first one to upload the checkpoint that the run resumes from."""


class RemoteRuns:
    """A folder of runs in a store, and the folder of their local copies."""

    def __init__(self, url: str, key: str = "runs") -> None:
        self.store = Store(url, key)
        self.folder = _staging() / _folder_of(self.store.url)

    def names(self) -> list[str]:
        """Return the names of the runs."""
        return require(self.store, self.store.names)

    def refresh(self, name: str) -> Path:
        """Fetch the small files of a run, unless the local copy is newer; return the copy, which need not exist."""
        folder, store = self.folder / name, self.store / name
        with _alone(self.folder):
            require(store, lambda: refresh(store, folder))
        return folder

    def fetch_all(self, file: str) -> None:
        """Fetch one small file of every run."""

        def fetch(name: str) -> None:
            content = None if (self.folder / name / file).exists() else (self.store / name).read(file)
            if content is not None:
                io.write_whole(self.folder / name / file, content.decode())

        with _alone(self.folder), ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(fetch, self.names()))


def remote_runs(runs: str) -> RemoteRuns | None:
    """Return the folder of runs of a URL, None for a local folder. Checks the URL, and asks no store."""
    return RemoteRuns(runs) if is_url(runs) else None


def local_copy(place: str, key: str, weights: bool = True) -> Path:
    """Return the local copy of a run, of a checkpoint in it or of a folder of runs; a local path as it is.

    weights: fetch the checkpoint, of a run the newest.

    Raises:
        ConfigError: there is no such run or checkpoint, or the store fails.
    """
    if not is_url(place):
        return Path(place)
    url, group = _split(place)
    parent, _, name = url.rpartition("/")
    runs = RemoteRuns(parent, key)
    folder, store = runs.refresh(name), runs.store / name
    if group is None and not (folder / CONFIG).exists():
        return _copy_of_runs(RemoteRuns(url, key))
    if not weights:
        return folder
    with _alone(runs.folder):
        if group is None:
            require(store, lambda: fetch_newest(store, folder))
            return folder
        sizes = require(store, store.sizes)
        found = tree_of(sizes).groups.get(group)
        if found is None or not require(store, lambda: fetch_group(store, folder, found, sizes)):
            raise ConfigError(f"{key}={place} does not exist, or is incomplete: the run's checkpoints are in {url}/")
    return folder / (f"{group}.pt" if f"{group}.pt" in found.files else group)


def write_back(place: str, key: str) -> None:
    """Send what was written to the local copy of a run, or to `report` in that of a folder of runs, to the store.

    While another machine trains the run, nothing is sent; a warning names the local copy.
    """
    if not is_url(place):
        return
    url, _ = _split(place)
    parent, _, name = url.rpartition("/")
    runs = RemoteRuns(parent, key)
    run = RemoteRun(runs.store / name, runs.folder / name, lease.SILENCE, 0.0)
    if not (run.folder / CONFIG).exists():
        run = RemoteRun(Store(f"{url}/report", key), RemoteRuns(url, key).folder / "report", lease.SILENCE, 0.0)
    before = require(run.store, lambda: lease.writer(run.store)) or {}
    if before and not before.get("released") and before.get("id") != Record(run.folder).id:
        log.warning("%s is being trained by %s: the results are in %s alone", url, before.get("owner"), run.folder)
        return
    with RunLock(run.folder) as lock:
        try:
            lock.acquire(patience=0.0)
        except ConfigError:
            return  # a training of this machine, which sends all that is in its run directory
        run.begin(lock, fetch=False)
        run.finish()


@dataclass
class RemoteRun:
    """One run in a store while this process writes it. patience, every, on_failure: see `Mirror`."""

    store: Store
    folder: Path
    patience: float
    every: float
    on_failure: Callable[[TrainingError], None] = lambda error: None
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
            with _alone(self.folder.parent):
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
        with _alone(self.folder.parent):
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


def _split(place: str) -> tuple[str, str | None]:
    """Return the URL of a run, and the name in it of the checkpoint that `place` leads to, if any."""
    found = re.fullmatch(r"(.+)/((?:checkpoints|best)/step_\d+)(\.pt|\.json)?/?", place)
    return (found[1], found[2]) if found else (place.rstrip("/"), None)


def _copy_of_runs(runs: RemoteRuns) -> Path:
    """Fetch the small files of all runs in a folder."""
    names = runs.names()
    if not names:
        raise ConfigError(f"{runs.store.key}={runs.store.url} holds no run")
    for name in names:
        if name != "report":
            runs.refresh(name)
    return runs.folder


def _staging() -> Path:
    """Return the folder of local copies: that of the environment variable, or one of this user's in the temporary."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    folder = Path(tempfile.gettempdir()) / f"clipzoo-runs-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # Everyone can write to the temporary folder: files of another user are neither read nor written through.
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user: set {VARIABLE} to a folder of yours")
    return folder


def _folder_of(url: str) -> str:
    words = re.sub(r"[^A-Za-z0-9.-]+", "-", url)[-60:].strip("-.")
    return f"{words}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process of this machine after the other write the local copies."""
    io.make_folder(folder)
    with (folder / ".fetch.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
