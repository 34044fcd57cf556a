"""A store's copy of a run directory, kept up to date by threads while the run continues.

An upload counts once it is read back. Files that change often are uploaded at intervals, their newest content alone; of
several new checkpoints the newest. A file is removed from the store when it has been removed from the run directory and
all that is newer has been read back. Uploads that fail are repeated with growing pauses.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from clipzoo.errors import TrainingError, cause
from clipzoo.io.files import MB, below, read_bytes
from clipzoo.io.stores.filesystem import TruncatedError
from clipzoo.io.stores.record import Record
from clipzoo.io.stores.store import Store
from clipzoo.io.stores.tree import FINISHED, Tree, Version, local_files, stated_digests, tree_of, version_of

log = logging.getLogger(__name__)

PERIOD = 0.5
"""Seconds between two looks at the run directory."""
AT_ONCE = 4
"""Uploads at the same time."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two tries."""
UPLOADING = ".uploading"


@dataclass
class _Upload:
    """State of a plain file or a series of checkpoints that differs from the store. since: when it was to be sent."""

    since: float
    running: bool = False
    next_try: float = 0.0
    pause: float = FIRST_PAUSE
    error: str = ""


@dataclass
class Mirror:
    """Copies a run directory to a store from `start` to `finish`.

    record: what the store has of this folder. patience: seconds for which the store may lag behind; then `failure` is
    set and `on_failure` called with it, once. every: seconds between two uploads of one growing file. require: called
    before the store is written to; raises if another machine has the run.
    """

    folder: Path
    store: Store
    record: Record
    patience: float
    every: float
    on_failure: Callable[[TrainingError], None] = lambda error: None
    require: Callable[[], None] = lambda: None
    failure: TrainingError | None = None
    _uploads: dict[str, _Upload] = field(default_factory=dict)
    _sent: dict[str, float] = field(default_factory=dict)
    _in_store: dict[str, int] = field(default_factory=dict)
    _kept: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _final: threading.Event = field(default_factory=threading.Event)
    _complete: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """List the remote files and start the upload thread."""
        self._in_store = self.store.sizes()
        self._kept = {series: len(groups) for series, groups in tree_of(self._in_store).series().items()}
        self.record.forget_unless(self._in_store)
        shutil.rmtree(self.folder / UPLOADING, ignore_errors=True)
        threading.Thread(target=self._run, name="mirror", daemon=True).start()

    def finish(self) -> None:
        """Wait until the store has all files, then stop.

        Raises:
            TrainingError: it does not within `patience` seconds.
        """
        self._final.set()
        end = time.monotonic() + self.patience
        while not self._complete.wait(0.05) and time.monotonic() < end and self.failure is None:
            pass
        self._stopped.set()
        if not self._complete.is_set():
            raise self.failure or self._error(self.patience)
        shutil.rmtree(self.folder / UPLOADING, ignore_errors=True)

    def stop(self, error: TrainingError | None = None) -> None:
        """Stop without waiting. error: the reason, for `on_failure`."""
        self._stopped.set()
        if error is not None:
            self._fail(error)

    def _run(self) -> None:
        while not self._stopped.is_set():
            # Not after the look: files that were written meanwhile, such as the results, would not be sent.
            is_final = self._final.is_set()
            try:
                if self._look() and is_final:
                    self._complete.set()
                    return
            except Exception as error:
                # Listing or removing files in the store; the lag of an upload ends the run, not this.
                log.warning("%s: %s; it is tried again", self.store.url, cause(error))
                self._stopped.wait(FIRST_PAUSE)
            self._stopped.wait(PERIOD if not self._final.is_set() else PERIOD / 10)

    def _look(self) -> bool:
        """Start the uploads that are due; return True if the store has everything."""
        files, now = local_files(self.folder), time.monotonic()
        tree = tree_of(files)
        for name in tree.plain:
            if name != FINISHED:
                self._consider(name, not self.record.has(name, files[name]), now, (name,), files)
        for series, groups in tree.series().items():
            new = not all(self.record.has(name, files[name]) for name in groups[-1].files)
            self._consider(series, new, now, groups[-1].files, files)
        with self._lock:
            waiting = set(self._uploads) - {FINISHED}
            changed = any(
                not self.record.has(name, files[name]) for name in tree.plain if name not in (FINISHED, *waiting)
            )
            lag = max((now - upload.since for upload in self._uploads.values()), default=0.0)
        if lag > self.patience:
            self._fail(self._error(lag))
        if waiting or changed:
            return False
        if FINISHED in files:
            # Last: a run that has its results in the store is complete there.
            self._consider(FINISHED, not self.record.has(FINISHED, files[FINISHED]), now, (FINISHED,), files)
        if self._uploads:
            return False
        self._remove(tree, files)
        return True

    def _consider(self, key: str, new: bool, now: float, names: tuple[str, ...], files: dict[str, Version]) -> None:
        """Start an upload, unless nothing is new, one is running, or it is too early."""
        with self._lock:
            if not new:
                if key in self._uploads and not self._uploads[key].running:
                    del self._uploads[key]
                return
            is_growing = len(names) == 1 and key != FINISHED
            if is_growing and not self._final.is_set() and now - self._sent.get(key, -self.every) < self.every:
                return
            upload = self._uploads.setdefault(key, _Upload(now))
            running = sum(other.running for other in self._uploads.values())
            if upload.running or now < upload.next_try or running >= AT_ONCE:
                return
            upload.running = True
        versions = {name: files[name] for name in names}
        threading.Thread(target=self._upload, args=(key, versions), name=f"upload {key}", daemon=True).start()

    def _upload(self, key: str, versions: dict[str, Version]) -> None:
        upload, error = self._uploads[key], ""
        copies = below(self.folder / UPLOADING, key.replace("/", "~"))
        try:
            self._send(versions, copies)
        except FileNotFoundError as gone:
            # Removed since the look, such as a checkpoint that is older than the newest `keep`; the store may lack a
            # bucket as well.
            error = "" if any(version_of(below(self.folder, name)) is None for name in versions) else cause(gone)
        # The backends of fsspec raise errors of many types.
        except Exception as failed:
            error = cause(failed)
        finally:
            shutil.rmtree(copies, ignore_errors=True)
        with self._lock:
            now = time.monotonic()
            upload.running, self._sent[key] = False, now
            if error:
                if not upload.error:
                    log.warning("%s/%s: %s; it is tried again", self.store.url, key, error)
                upload.error, upload.next_try = error, now + upload.pause
                upload.pause = min(2 * upload.pause, LONGEST_PAUSE)
            else:
                del self._uploads[key]

    def _send(self, versions: dict[str, Version], copies: Path) -> None:
        """Upload files in this order, from copies that do not change."""
        for name, version in versions.items():
            _freeze(below(self.folder, name), below(copies, name), version, link=len(versions) > 1)
        expected = (
            stated_digests(lambda name: read_bytes(below(copies, name), 64 * MB), tuple(versions))
            if len(versions) > 1
            else {}
        )
        self.require()
        for name, version in versions.items():
            if self._stopped.is_set():
                return
            if not self.record.has(name, version):
                digest = self.store.upload(below(copies, name), name)
                if digest != expected.get(name, digest):
                    raise TruncatedError(f"{name} is being written again: its digest is not that of its mark")
                self.record.add((name, version))
            with self._lock:
                self._in_store[name] = version[0]

    def _remove(self, tree: Tree, files: dict[str, Version]) -> None:
        """Remove from the store what the run directory has no longer. Called when all that it has is stored."""
        with self._lock:
            stored = tree_of(self._in_store)
        gone = [name for name in stored.plain if name not in files and self.record.knows(name)]
        local = tree.series()
        for series, groups in stored.series().items():
            if series not in local:
                continue
            most = max(self._kept.get(series, 1), len(local[series]))
            old = [group for group in groups if group.name not in tree.groups]
            for group in old[: max(0, len(groups) - most)]:
                # The mark first: an interruption leaves no group that looks complete.
                gone += reversed(group.files)
            # A checkpoint that was saved again in the other format, and those that were never completed.
            for group in groups:
                if group.name in tree.groups:
                    gone += sorted(set(group.files) - set(tree.groups[group.name].files))
            newest = local[series][-1].name
            gone += [name for name in stored.unfinished if name.startswith(f"{series}/") and name < newest]
        for name in gone:
            if self._stopped.is_set():
                return
            self.require()
            self.store.remove(name)
            self.record.forget(name)
            with self._lock:
                del self._in_store[name]

    def _error(self, lag: float) -> TrainingError:
        with self._lock:
            uploads = sorted(self._uploads.items(), key=lambda item: item[1].since)
        names = ", ".join(key or "checkpoints" for key, _ in uploads[:3]) + (" ..." if len(uploads) > 3 else "")
        reason = next((f" ({upload.error})" for _, upload in uploads if upload.error), "")
        return TrainingError(
            f"{self.store.url} has not taken {names or 'all files'} for {lag:.0f} seconds{reason}, longer than "
            f"upload_patience={self.patience:g}. All files are in {self.folder}; the same command on this machine "
            "uploads them and continues"
        )

    def _fail(self, error: TrainingError) -> None:
        if self.failure is None:
            self.failure = error
            self.on_failure(error)


def _freeze(file: Path, copy: Path, version: Version, link: bool) -> None:
    """Give a file that does not change a second name, or copy the first bytes of one that grows."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    if link:
        try:
            os.link(file, copy)
            return
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            pass
    with file.open("rb") as source, copy.open("wb") as target:
        remaining = version[0]
        while remaining and (block := source.read(min(remaining, 1 << 20))):
            target.write(block)
            remaining -= len(block)
