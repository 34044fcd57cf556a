"""The folder of the runs, `runs`: a local one, or the URL of a store, `runs=s3://...`. Does not import torch.

Every command works on a local copy of a run, <CLIPZOO_STAGING>/<name of the store>/<run>. A copy is fetched before it
is used, unless it is newer than the store's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.errors import ConfigError, TrainingError
from clipzoo.io.stores import is_url
from clipzoo.runs.lock import RunLock, locked, this_process
from clipzoo.runs.store import Mirror, Record, Store, Tree, fetch_group, fetch_newest, local_files, refresh

log = logging.getLogger(__name__)

VARIABLE = "CLIPZOO_STAGING"
"""Environment variable with the folder for local copies."""
HEARTBEAT_SECONDS = 15.0
"""Seconds after which the owner of a run in a store renews its lock."""
HEARTBEAT_TIMEOUT_SECONDS = 4 * HEARTBEAT_SECONDS
"""Seconds without a change after which the owner of a lock counts as dead."""
LOCK_PATIENCE_SECONDS = 20.0
"""Seconds to wait for an owner that may have been told to stop."""
FIRST_UPLOAD_TIMEOUT_SECONDS = 600.0
"""Seconds that other machines wait for the first one to upload the checkpoint that the run resumes from."""
PROTOCOLS_WITHOUT_HEARTBEAT = ("hf",)
"""Protocols whose stores keep every version of a file: the lock is written only at the start and the end."""
_LOCK = re.compile(r"\.writer-(\d{6,})\.json")


def runs_of(plain: Mapping[str, Any]) -> Runs:
    """Return the runs of a configuration, without access to a store. Raises ConfigError for an invalid URL."""
    # Imports omegaconf, which the help of a command does not need.
    from clipzoo.runs.identity import with_variables

    runs = with_variables(plain["runs"])
    if not is_url(runs):
        return Runs(Path(runs))
    return RemoteRuns(runs, patience=plain["upload_patience"], every=plain["upload_every"])


class Runs:
    """A local folder of runs. Every command works on local run directories, `folder` / name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        return [path.name for path in self.folder.glob("*")]

    def refresh(self, name: str) -> Path:
        """Return the run directory of a name, which need not exist, with the newest small files of the run."""
        return io.below(self.folder, name, links=True)

    def run(self, name: str) -> RemoteRun | None:
        """Return the run of a name in the store; None for a local folder."""
        return None

    def hydra_overrides(self) -> list[str]:
        """Return the overrides that keep Hydra's own files of a sweep out of a URL."""
        return []


class RemoteRuns(Runs):
    """Runs in a store, with local copies. patience, every: see `Mirror`."""

    def __init__(
        self, url: str, key: str = "runs", patience: float = HEARTBEAT_TIMEOUT_SECONDS, every: float = 0.0
    ) -> None:
        self.store = Store(url, key)
        if chosen := os.environ.get(VARIABLE):
            staging = Path(chosen).expanduser().absolute()
        else:
            staging = Path(tempfile.gettempdir()) / f"clipzoo-runs-{os.getuid()}"
            staging.mkdir(mode=0o700, exist_ok=True)
            # Everyone can write to the temporary folder: a link, or a folder of another user, is refused.
            if staging.is_symlink() or staging.stat().st_uid != os.getuid():
                raise ConfigError(f"{staging} belongs to another user: set {VARIABLE} to a folder of yours")
        words = re.sub(r"[^A-Za-z0-9.-]+", "-", self.store.url)[-60:].strip("-.")
        super().__init__(io.below(staging, f"{words}-{hashlib.sha256(self.store.url.encode()).hexdigest()[:8]}"))
        self._patience, self._every = patience, every

    def run(self, name: str) -> RemoteRun:
        return RemoteRun(self.store / name, io.below(self.folder, name), self._patience, self._every)

    def names(self) -> list[str]:
        return self.store.require(self.store.names)

    def refresh(self, name: str) -> Path:
        """Fetch the small files of a run, unless the local copy is newer; return the copy, which need not exist."""
        folder, store = io.below(self.folder, name), self.store / name
        with alone(self.folder):
            store.require(lambda: refresh(store, folder, writer(store).get("id")))
        return folder

    def hydra_overrides(self) -> list[str]:
        return [f"hydra.sweep.dir='{self.folder / 'multirun'}'"]


# URLs of commands that read runs


def local_copy(place: str, key: str, weights: bool = True) -> Path:
    """Return the local copy of a run, of a checkpoint in it or of a folder of runs; a local path as it is.

    weights: fetch the checkpoint, or the newest one of a run. Raises ConfigError if there is none, or the store fails.
    """
    if not is_url(place):
        return Path(place)
    url, group = _split(place)
    parent, _, name = url.rpartition("/")
    runs = RemoteRuns(parent, key)
    folder, store = runs.refresh(name), runs.store / name
    if group is None and not (folder / "config.yaml").exists():
        # A folder of runs.
        runs = RemoteRuns(url, key)
        # The folder of a run that has just begun holds only a lock.
        if not (names := [name for name in runs.names() if not name.startswith(".")]):
            raise ConfigError(f"{key}={runs.store.url} holds no run")
        for name in names:
            if name != "report":
                runs.refresh(name)
        return runs.folder
    if not weights:
        return folder
    with alone(runs.folder):
        if group is None:
            store.require(lambda: fetch_newest(store, folder))
            return folder
        sizes = store.require(store.sizes)
        if not store.require(lambda: fetch_group(store, folder, group, sizes)):
            raise ConfigError(f"{key}={place} does not exist, or is incomplete: the run's checkpoints are in {url}/")
    file = io.below(folder, f"{group}.pt")
    return file if file.exists() else io.below(folder, group)


def write_back(place: str, key: str) -> None:
    """Upload the files that were written to the local copy of a run, or to `report` in that of a folder of runs.

    While another machine trains the run, nothing is uploaded; a warning names the local copy.
    """
    if not is_url(place):
        return
    url, _ = _split(place)
    parent, _, name = url.rpartition("/")
    run = RemoteRuns(parent, key).run(name)
    if not (run.folder / "config.yaml").exists():
        run = RemoteRuns(url, key).run("report")
    before = run.store.require(lambda: writer(run.store))
    if before and not before.get("released") and before.get("id") != Record(run.folder).id:
        log.warning("%s is being trained by %s: the results are only in %s", url, before.get("owner"), run.folder)
        return
    with RunLock(run.folder) as lock:
        try:
            lock.acquire(patience=0.0)
        except ConfigError:
            return  # a training of this machine, which sends all files of its run directory
        run.begin(lock, fetch=False)
        run.finish()


def _split(place: str) -> tuple[str, str | None]:
    """Return the URL of a run, and the name in it of the checkpoint that `place` leads to, if any."""
    parts = re.fullmatch(r"(.+)/((?:checkpoints|best)/step_\d+)(\.pt|\.json)?/?", place)
    return (parts[1], parts[2]) if parts else (place.rstrip("/"), None)


# A run while it is written


def writer(store: Store) -> dict[str, Any]:
    """Return the content of the last lock of a run, which names its last writer, and its `number`; empty if none."""
    numbers = [int(lock[1]) for name in store.names() if (lock := _LOCK.fullmatch(name))]
    if not numbers:
        return {}
    return {**store.mapping(store.read(f".writer-{max(numbers):06d}.json")), "number": max(numbers)}


class RemoteRun:
    """A run in a store that this process writes, under a lock. patience, every, on_failure: see `Mirror`.

    The lock is the file `.writer-000001.json`, created exclusively and renewed every HEARTBEAT_SECONDS. A store cannot
    tell whether the owner of a lock is alive. Another process waits until the file no longer changes, and then creates
    the file with the next number: if two do so at the same time, one succeeds. The owner stops when a later number
    exists.
    The last file remains: it names the copy of the run directory that was the last to write.
    """

    def __init__(self, store: Store, folder: Path, patience: float, every: float) -> None:
        self.store, self.folder, self._patience, self._every = store, folder, patience, every
        self.on_failure: Callable[[TrainingError], None] = lambda error: None
        self._stopped = threading.Event()
        self._mirror: Mirror | None = None
        # id: identifies the local copy of the run directory.
        self._lock: dict[str, Any] = {"id": uuid.uuid4().hex, "owner": this_process(), "beat": 0, "released": False}
        self._number, self._renewed = 0, 0.0

    def begin(self, lock: RunLock | None = None, fetch: bool = True) -> list[str]:
        """Lock the run, fetch the files that it needs to resume, and start the upload thread.

        lock: lock of the local copy. fetch: False leaves the local copy unchanged. Returns the names of the checkpoints
        that the run resumes from. Raises ConfigError if another process trains the run, or the store cannot be written.
        """
        io.make_folder(self.folder)
        if lock is not None:
            lock.acquire()
        last = self.store.require(lambda: self._acquire(Record(self.folder).id))
        needed: list[str] = []
        if fetch:
            with alone(self.folder.parent):
                self.store.require(lambda: refresh(self.store, self.folder, last))
                needed = self.store.require(lambda: fetch_newest(self.store, self.folder))
        # After the fetch: until the copy is complete, the one in the store is newer.
        record = Record(self.folder)
        record.id = self._lock["id"]
        record.save()
        background = Store(self.store.url, self.store.key, patience=0.0)
        mirror = self._mirror = Mirror(
            self.folder, background, record, self._patience, self._every, self.on_failure, self._require_lock
        )
        self.store.require(mirror.start)
        threading.Thread(target=self._keep_lock, args=(mirror,), name="lease", daemon=True).start()
        return needed

    def complete(self) -> None:
        """Upload the files of a finished run that the store lacks."""
        record, files = Record(self.folder), local_files(self.folder)
        if not all(record.has(name, files[name]) for name in Tree(files).plain):
            with RunLock(self.folder) as lock:
                self.begin(lock)
                self.finish()

    def fetch(self, needed: Sequence[str]) -> None:
        """Wait until the first machine has uploaded these checkpoints, and fetch them. For the other machines."""
        end = time.monotonic() + FIRST_UPLOAD_TIMEOUT_SECONDS
        for name in needed:
            while True:
                sizes = self.store.sizes()
                with alone(self.folder.parent):
                    if fetch_group(self.store, self.folder, name, sizes):
                        break
                if time.monotonic() > end:
                    raise TrainingError(
                        f"{self.store.url}/{name} is not in the store after {FIRST_UPLOAD_TIMEOUT_SECONDS:g} seconds"
                    )
                time.sleep(1.0)

    def finish(self) -> None:
        """Wait until the store has everything, and unlock the run. Raises TrainingError after `patience` seconds."""
        if self._stopped.is_set() or self._mirror is None:
            return
        self._stopped.set()
        self._mirror.finish()
        try:
            if writer(self.store).get("id") == self._lock["id"]:
                self._lock["released"] = True
                self._write_lock()
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

    def _acquire(self, previous: str | None) -> str | None:
        """Take the lock; return the id of the copy that had it before, None without one.

        previous: the earlier id of this copy, whose process is dead, because the lock of the local folder was free.
        Raises ConfigError if another machine holds the lock, or takes it at the same moment.
        """

        def taken(content: Mapping[str, Any]) -> str:
            return f"{self.store.url} is being trained by {content.get('owner', 'another process')}"

        before = writer(self.store)
        if before and not before.get("released") and before.get("id") != previous:
            if self.store.protocol in PROTOCOLS_WITHOUT_HEARTBEAT:
                log.warning("%s, and this store cannot tell whether it still is", taken(before))
            else:
                # Wait until the owner has released the lock or is dead.
                print(f"{taken(before)}: waiting up to {HEARTBEAT_TIMEOUT_SECONDS:g} s", file=sys.stderr, flush=True)
                begin, is_alive, now = time.monotonic(), False, before
                while time.monotonic() - begin < (LOCK_PATIENCE_SECONDS if is_alive else HEARTBEAT_TIMEOUT_SECONDS):
                    time.sleep(min(1.0, HEARTBEAT_SECONDS / 4))
                    now = writer(self.store)
                    if not now or now.get("released"):
                        break
                    is_alive = is_alive or now != before
                else:
                    if is_alive:
                        raise ConfigError(f"{taken(before)}: wait for it, end it, or give another name=...")
        self._number = before.get("number", 0) + 1
        with suppress(FileExistsError):  # by another process, or by this one in a request whose answer was lost
            self._write_lock(is_new=True)
        now = writer(self.store)
        if now.get("id") != self._lock["id"]:
            raise ConfigError(f"{taken(now)}: wait for it, end it, or give another name=...")
        for name in self.store.names():
            if (lock := _LOCK.fullmatch(name)) and int(lock[1]) < self._number:
                self.store.remove(name)
        return before.get("id")

    def _keep_lock(self, mirror: Mirror) -> None:
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            try:
                owner = self._renew()
            # Stores raise errors of many types. If the lock stays old, the uploads fail and end the run.
            except Exception as error:
                log.warning("%s: the lock was not renewed: %s", self.store.url, error)
                continue
            if owner is not None and not self._stopped.is_set():
                mirror.stop(TrainingError(f"{self.store.url} has been taken by {owner}: this run ends"))
                return

    def _renew(self) -> str | None:
        """Renew the lock, as a heartbeat. Return the new owner if another process has taken it, else None."""
        if self.store.protocol in PROTOCOLS_WITHOUT_HEARTBEAT:
            return None
        now = writer(self.store)
        if now.get("id") != self._lock["id"]:
            return str(now.get("owner", "another process"))
        self._write_lock()
        return None

    def _require_lock(self) -> None:
        """Raise OSError before a write if another process has taken the lock during a long pause."""
        if time.monotonic() - self._renewed > HEARTBEAT_TIMEOUT_SECONDS / 2 and (owner := self._renew()) is not None:
            raise OSError(f"the run has been taken by {owner}")

    def _write_lock(self, is_new: bool = False) -> None:
        self._lock |= {"beat": self._lock["beat"] + 1, "time": time.time()}
        self.store.write(f".writer-{self._number:06d}.json", json.dumps(self._lock).encode(), is_new)
        self._renewed = time.monotonic()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one process of this machine at a time write the local copies."""
    io.make_folder(folder)
    with locked(folder / ".fetch.lock"):
        yield
