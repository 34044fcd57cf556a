"""Runs in a store, `runs=s3://...`: a local copy of the run directory, kept in the store while the run continues.

Every command works on the local copy, <CLIPZOO_STAGING>/<name of the store>/<run>. A copy is fetched before it is used,
unless it is newer than the store's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from clipzoo import io
from clipzoo.errors import ConfigError, masked
from clipzoo.io.stores import lease
from clipzoo.io.stores.fetch import THREADS, fetch_group, fetch_newest, refresh
from clipzoo.io.stores.filesystem import is_url
from clipzoo.io.stores.record import Record
from clipzoo.io.stores.store import Store, require
from clipzoo.io.stores.tree import tree_of
from clipzoo.runs.lock import RunLock
from clipzoo.runs.places.ranks import BeforeExit, OnFailure, Ranks
from clipzoo.runs.places.remote_run import RemoteRun, alone

log = logging.getLogger(__name__)

VARIABLE = "CLIPZOO_STAGING"
"""Environment variable with the folder for local copies."""
CONFIG = "config.yaml"


class RemoteRuns:
    """Runs in a store, with local copies of them; see `clipzoo.runs.places.place.Runs`.

    patience, every: of the upload; see `Mirror`.
    """

    def __init__(
        self, url: str, key: str = "runs", patience: float = lease.HEARTBEAT_TIMEOUT_SECONDS, every: float = 0.0
    ) -> None:
        self.store = Store(url, key)
        self.folder = _staging() / _folder_of(self.store.url)
        self._patience, self._every = patience, every

    def names(self) -> list[str]:
        """Return the names of the runs."""
        return require(self.store, self.store.names)

    def refresh(self, name: str) -> Path:
        """Fetch the small files of a run, unless the local copy is newer; return the copy, which need not exist."""
        folder, store = io.below(self.folder, name), self.store / name
        with alone(self.folder):
            require(store, lambda: refresh(store, folder))
        return folder

    def refresh_file(self, file: str) -> None:
        """Fetch one small file of every run that is not here."""

        def fetch(name: str) -> None:
            path = io.below(self.folder, f"{name}/{file}")
            content = None if path.exists() else (self.store / name).read(file)
            if content is not None:
                io.write_whole(path, content.decode())

        with alone(self.folder), ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(fetch, self.names()))

    @contextmanager
    def kept(self, lock: RunLock, ranks: Ranks, on_failure: OnFailure, before_exit: BeforeExit) -> Iterator[None]:
        """Fetch the run of a lock, and keep the store up to date while it is trained in the block. Collective."""
        run = self.run(lock.folder.name)
        run.on_failure = on_failure
        needed = ranks.run_on_first(lambda: run.begin(lock))
        if ranks.local_rank == 0 and not ranks.is_first:
            run.fetch(needed)
        ranks.barrier()
        if ranks.is_first:
            text = f"{run.store.url} is kept up to date with its local copy {run.folder}"
            print(masked(text), file=sys.stderr, flush=True)
            before_exit(run.finish_at_exit)
        try:
            yield
        except Exception:
            # Several ranks end through the watchdog, which calls `finish_at_exit`.
            if ranks.size == 1:
                run.finish_at_exit()
            raise
        ranks.run_on_first(run.finish)

    def complete(self, folder: Path) -> None:
        """Upload what the store lacks of a finished run."""
        run = self.run(folder.name)
        if run.is_behind():
            with RunLock(folder) as lock:
                run.begin(lock)
                run.finish()

    def hydra_overrides(self) -> list[str]:
        return [f"hydra.sweep.dir='{self.folder / 'multirun'}'"]

    def run(self, name: str) -> RemoteRun:
        return RemoteRun(self.store / name, io.below(self.folder, name), self._patience, self._every)


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
    with alone(runs.folder):
        if group is None:
            require(store, lambda: fetch_newest(store, folder))
            return folder
        sizes = require(store, store.sizes)
        found = tree_of(sizes).groups.get(group)
        if found is None or not require(store, lambda: fetch_group(store, folder, found, sizes)):
            raise ConfigError(f"{key}={place} does not exist, or is incomplete: the run's checkpoints are in {url}/")
    return io.below(folder, f"{group}.pt" if f"{group}.pt" in found.files else group)


def write_back(place: str, key: str) -> None:
    """Send what was written to the local copy of a run, or to `report` in that of a folder of runs, to the store.

    While another machine trains the run, nothing is sent; a warning names the local copy.
    """
    if not is_url(place):
        return
    url, _ = _split(place)
    parent, _, name = url.rpartition("/")
    run = RemoteRuns(parent, key).run(name)
    if not (run.folder / CONFIG).exists():
        run = RemoteRuns(url, key).run("report")
    before = require(run.store, lambda: lease.writer(run.store)) or {}
    if before and not before.get("released") and before.get("id") != Record(run.folder).id:
        log.warning("%s is being trained by %s: the results are only in %s", url, before.get("owner"), run.folder)
        return
    with RunLock(run.folder) as lock:
        try:
            lock.acquire(patience=0.0)
        except ConfigError:
            return  # a training of this machine, which sends all that is in its run directory
        run.begin(lock, fetch=False)
        run.finish()


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
