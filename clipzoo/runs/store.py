"""Copies of run directories in a store: fetch them to local folders, and upload them.

A checkpoint is `step_00001234.pt` or the folder `step_00001234`, and its mark `step_00001234.json`. The mark is sent
last and removed first: a checkpoint without a mark is incomplete and never read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.errors import ConfigError, TrainingError, cause, masked
from clipzoo.io import stores
from clipzoo.io.stores import ChangedError, Result, TruncatedError, is_missing, open_filesystem, repeated
from clipzoo.io.weights import MANIFEST

log = logging.getLogger(__name__)

FINISHED = "results.json"
"""The file that marks a run as finished; it is uploaded after all others."""
RECORD, UPLOADING = ".remote.json", ".uploading"
LEFT_OUT = ("wandb", "features")
"""Folders of a run directory that stay on the machine."""
PERIOD = 0.5
"""Seconds between two scans of the run directory."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two attempts of an upload."""
THREADS = 8
"""Files of one checkpoint, or small files, that are copied at the same time."""
_STEP = re.compile(r"(?P<group>(?P<series>(?:.*/)?(?:checkpoints|best))/step_\d+)(?:\.\w+$|/)")
Version = tuple[int, int, int]
"""Size, modification time in nanoseconds and inode."""


class Store:
    """A folder at an fsspec URL. key: of the configuration. patience: seconds of repeated requests, None: default."""

    def __init__(self, url: str, key: str, patience: float | None = None) -> None:
        from fsspec import available_protocols, registry

        if masked(url) != url:
            raise ConfigError(f"{key}={url} holds a password or token: give it by the store's environment variables")
        self.protocol = url.partition("://")[0]
        if not re.match("[^/]+:///*[^/?#]", url) or self.protocol not in {*available_protocols(), *registry}:
            raise ConfigError(
                f"{key}={url} is not the URL of a store: give PROTOCOL://BUCKET/FOLDER, such as s3://bucket/runs"
            )
        self.url, self.key, self.patience = url.rstrip("/"), key, patience

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        return open_filesystem(self.url, self.key)

    def __truediv__(self, name: str) -> Store:
        """Return a folder in this one."""
        return Store(f"{self.url}/{name}", self.key, self.patience)

    def names(self) -> list[str]:
        """Return the names of the files and folders directly in this folder; none if it does not exist."""
        paths = self._repeated(lambda filesystem, root: filesystem.ls(root, detail=False), [])
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in paths)

    def sizes(self) -> dict[str, int]:
        """Return the size of every file below this folder by its name; none if it does not exist."""
        files: dict[str, Any] = self._repeated(lambda filesystem, root: filesystem.find(root, detail=True), {})
        prefix = f"{self._opened[1].rstrip('/')}/"
        # Some stores list a folder itself as a file.
        return {
            path[len(prefix) :]: int(facts["size"] or 0)
            for path, facts in files.items()
            if path.startswith(prefix) and len(path) > len(prefix) and ".." not in path.split("/")
        }

    def read(self, name: str) -> bytes | None:
        """Return a small file that may be replaced meanwhile: one of its versions, never a part; None if missing."""

        def read(filesystem: Any, root: str) -> bytes:
            content: bytes = filesystem.cat_file(f"{root}/{name}")
            if len(content) != filesystem.info(f"{root}/{name}")["size"]:
                raise TruncatedError(f"{self.url}/{name} ends early, or was replaced")
            return content

        return self._repeated(read, None)

    @staticmethod
    def mapping(content: bytes | None) -> dict[str, Any]:
        """Return the mapping in a JSON file; an empty one for other content, which the reader of the run reports."""
        try:
            value = json.loads(content or b"")
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def write(self, name: str, content: bytes, is_new: bool = False) -> None:
        """Write a small file. is_new: raise FileExistsError if it exists, which most stores check atomically."""
        mode = {"mode": "create"} if is_new else {}
        self._write(name, lambda filesystem, path: filesystem.pipe_file(path, content, **mode))

    def upload(self, file: Path, name: str) -> str:
        """Write a file, read it back, and return its SHA-256. Raises TruncatedError if other bytes were read back."""
        sent, stored = io.digest_of(file), hashlib.sha256()
        self._write(name, lambda filesystem, path: filesystem.put_file(str(file), path))
        for content in self._content(name, file.stat().st_size):
            stored.update(content)
        if stored.hexdigest() != sent:
            raise TruncatedError(f"{self.url}/{name} differs from the bytes that were sent")
        return sent

    def download(self, name: str, size: int, target: Path) -> str:
        """Copy a file completely or not at all; return its SHA-256. Raises ChangedError if its size is not `size`."""

        def copy(filesystem: Any, root: str) -> str:
            digest = hashlib.sha256()
            with io.whole(target, only_full_disks=True) as file:
                for content in self._content(name, size):
                    file.write(content)
                    digest.update(content)
            return digest.hexdigest()

        return self._repeated(copy)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        self._repeated(lambda filesystem, root: filesystem.rm_file(f"{root}/{name}"), None)

    def require(self, action: Callable[[], Result]) -> Result:
        """Return `action()`; any failure of the store is a ConfigError that names it."""
        try:
            return action()
        except ConfigError:
            raise
        # The backends of fsspec raise errors of many types.
        except (TrainingError, Exception) as error:
            text = str(error) if isinstance(error, TrainingError) else f"{self.key}={self.url}: {cause(error)}"
            hint = "Credentials are those of the environment (docs/how_to/remote_runs.md)"
            raise ConfigError(f"{text}. {hint}") from error

    def _content(self, name: str, size: int) -> Iterator[bytes]:
        actual = self._repeated(lambda filesystem, root: filesystem.info(f"{root}/{name}")["size"])
        if actual != size:
            raise ChangedError(f"{self.url}/{name} has {actual} bytes, not {size}")
        filesystem, root = self._opened
        yield from stores.read_ranges(f"{self.url}/{name}", filesystem, f"{root}/{name}", size, self.key)

    def _write(self, name: str, write: Callable[[Any, str], Any]) -> None:
        def action(filesystem: Any, root: str) -> None:
            try:
                write(filesystem, f"{root}/{name}")
            except FileNotFoundError:
                # Only after an error: stores without folders would try to make a bucket.
                filesystem.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
                write(filesystem, f"{root}/{name}")

        self._repeated(action)

    def _repeated(self, action: Callable[[Any, str], Result], missing: Any = ...) -> Result:
        """Return `action(file system, root)`, or `missing` if the file does not exist."""
        filesystem, root = self._opened
        filesystem.invalidate_cache()  # some file systems always have one
        try:
            return repeated(self.url, lambda: action(filesystem, root), self.key, self.patience)
        except OSError as error:
            if missing is ... or not is_missing(error):
                raise
            return missing


# Files of a run directory


class Tree:
    """The files of a run, sorted by their names.

    groups: complete checkpoints by their name without suffix, with their files: the .pt or the manifest first, the mark
    last. A pair NAME.pt and NAME.json is a group too. series: names of groups, the newest last, by their folder; of a
    pair by its own name. unfinished: files of checkpoints without a mark. plain: all other files.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.plain: list[str] = []
        self.unfinished: list[str] = []
        self.groups: dict[str, list[str]] = {}
        self.series: dict[str, list[str]] = {}
        members: dict[str, list[str]] = {}
        for name in sorted(names):
            step, stem = _STEP.match(name), name.rpartition(".")[0]
            if step or (f"{stem}.pt" in names and f"{stem}.json" in names):
                members.setdefault(step["group"] if step else stem, []).append(name)
            else:
                self.plain.append(name)
        for group, files in sorted(members.items()):
            files.sort(key=lambda name: (name == f"{group}.json", not name.endswith((".pt", "/" + MANIFEST)), name))
            if len(files) > 1 and files[-1] == f"{group}.json":
                step = _STEP.match(f"{group}/")
                self.series.setdefault(step["series"] if step else group, []).append(group)
                self.groups[group] = files
            else:
                self.unfinished += files


def local_files(folder: Path) -> dict[str, Version]:
    """Return the files of a run directory that a store keeps, with their versions.

    Hidden files outside of checkpoints, temporary files, links, pipes, devices and LEFT_OUT stay on the machine.
    """
    files: dict[str, Version] = {}
    for place, folders, names in os.walk(folder):
        prefix = f"{os.path.relpath(place, folder)}/".removeprefix("./")
        hidden = () if _STEP.match(prefix) else "."
        left_out = {
            name
            for name in (*folders, *names)
            if name.endswith((".tmp", ".part", ".partial")) or name.startswith(hidden) or prefix + name in LEFT_OUT
        }
        folders[:] = {*folders} - left_out
        for name in {*names} - left_out:
            if (version := version_of(Path(place, name))) is not None:
                files[prefix + name] = version
    return files


def version_of(path: Path) -> Version | None:
    """Return the version of a regular file, None if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns, status.st_ino) if stat.S_ISREG(status.st_mode) else None


class Record:
    """The files of a local run directory that were read back from the store, in `.remote.json` in the directory.

    id: identifies this copy of the run directory; None if it has never written to the store. stored: versions by name.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORD
        content: dict[str, Any] = {}
        if self._path.exists():
            content = io.DamageLog().read(lambda: io.read_json(self._path, 16 * io.MB, "the files are sent again"), {})
        versions = content.get("stored")
        self.id: str | None = content.get("id")
        self.stored: dict[str, Any] = versions if isinstance(versions, dict) else {}

    def has(self, name: str, version: Version) -> bool:
        """Return True if the store has this version of a file."""
        return self.stored.get(name) == list(version)

    def add(self, versions: Mapping[str, Version | None]) -> None:
        """Note files that the store has. A version of None: the store no longer has the file."""
        known = {name: list(version) for name, version in versions.items() if version is not None}
        self.stored = {name: kept for name, kept in self.stored.items() if name not in versions} | known
        self.save()

    def save(self) -> None:
        io.write_json(self._path, {"id": self.id, "stored": self.stored})


# Fetching


def refresh(store: Store, folder: Path, last: str | None) -> None:
    """Bring the plain files of a run and the marks of its checkpoints up to date, unless the local copy is newer.

    The local copy is newer if no other copy has written to the store since, or if it has a later checkpoint of an
    unfinished run. last: id of the copy that was the last to write.
    """
    sizes, record = store.sizes(), Record(folder)
    local, remote = Tree(local_files(folder)), Tree(sizes)
    newest, newest_remote = (tree.series.get("checkpoints", [""])[-1] for tree in (local, remote))
    is_newer = FINISHED not in remote.plain and newest > newest_remote
    if not sizes or is_newer or (record.id is not None and record.id == last):
        return

    def fetch(name: str) -> None:
        # Growing files are small; a large file is written once.
        if sizes[name] > stores.RANGE_BYTES:
            store.download(name, sizes[name], io.below(folder, name))
        elif (content := store.read(name)) is not None:  # else removed since it was listed
            with io.whole(io.below(folder, name)) as file:
                file.write(content)

    plain = [name for name in remote.plain if not name.rpartition("/")[2].startswith(".")]
    marks = [files[-1] for group, files in remote.groups.items() if group not in local.groups]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fetch, [*plain, *marks]))
    record.add(_versions(folder, plain))
    for name in set(local.plain) - set(remote.plain):
        # Removed by another machine.
        io.below(folder, name).unlink(missing_ok=True)


def fetch_newest(store: Store, folder: Path) -> list[str]:
    """Fetch the files to resume a run: its newest complete checkpoint, and pairs of files outside of `checkpoints`.

    A checkpoint that does not have the digest in its mark is named in the log, and the one before is fetched. Returns
    the names of the local checkpoints.
    """
    sizes = store.sizes()
    local, remote = Tree(local_files(folder)).series, Tree(sizes).series
    fetched = []
    for series in sorted({*local, *remote} - {"best"}):
        newest = local.get(series, [""])[-1]
        later = [group for group in reversed(remote.get(series, [])) if group > newest]
        name = next((group for group in later if fetch_group(store, folder, group, sizes)), newest)
        fetched += [name] if name else []
    return fetched


def fetch_group(store: Store, folder: Path, group: str, sizes: Mapping[str, int]) -> bool:
    """Fetch one checkpoint, its mark last. Return False if it does not exist, or, with a warning, if it is damaged."""
    if group in Tree(local_files(folder)).groups:
        return True
    if (files := Tree(sizes).groups.get(group)) is None:
        return False
    *others, mark = files
    io.below(folder, mark).unlink(missing_ok=True)
    expected = Store.mapping(store.read(mark)).get("sha256")
    try:
        for name in others:
            digest = store.download(name, sizes[name], io.below(folder, name))
            if name == others[0] and digest != (expected or digest):
                raise TruncatedError(f"the SHA-256 of {name} differs from the one in {mark}")
    except (ChangedError, TruncatedError, FileNotFoundError) as error:
        log.warning("checkpoint %s/%s is not used: %s", store.url, group, error)
        for name in others:
            io.below(folder, name).unlink(missing_ok=True)
        return False
    store.download(mark, sizes[mark], io.below(folder, mark))
    Record(folder).add(_versions(folder, files))
    return True


def _versions(folder: Path, names: Iterable[str]) -> dict[str, Version | None]:
    return {name: version_of(io.below(folder, name)) for name in names}


# Uploading


class Mirror:
    """Copies a run directory to a store from `start` to `finish`, by one thread, without delaying the training.

    An upload is complete once it has been read back. Only the newest of several new checkpoints is sent. A growing file
    is sent at intervals, and `results.json` after all others. A file that the run directory no longer has is removed
    from the store once all newer files have been read back.

    record: files of this folder in the store. patience: longest lag of the store in seconds; then `failure` is set and
    `on_failure` called with it, once. every: seconds between two uploads of one growing file. require: called
    before the store is written to; raises if another machine has the run.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        record: Record,
        patience: float,
        every: float,
        on_failure: Callable[[TrainingError], None] = lambda error: None,
        require: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._store, self._record = folder, store, record
        self._patience, self._every, self._on_failure, self._require = patience, every, on_failure, require
        self.failure: TrainingError | None = None
        self._fault = ""
        self._sent: dict[str, float] = {}
        self._in_store: dict[str, int] = {}
        self._count_at_start: dict[str, int] = {}
        self._stopped, self._final, self._complete = threading.Event(), threading.Event(), threading.Event()

    def start(self) -> None:
        """List the remote files and start the upload thread."""
        self._in_store = sizes = self._store.sizes()
        self._count_at_start = {series: len(groups) for series, groups in Tree(sizes).series.items()}
        # Files that the store does not have in the recorded size are sent again.
        stored = self._record.stored
        self._record.stored = {name: version for name, version in stored.items() if sizes.get(name) == version[0]}
        threading.Thread(target=self._run, name="mirror", daemon=True).start()

    def finish(self) -> None:
        """Wait until the store has all files, then stop. Raises TrainingError after `patience` seconds."""
        self._final.set()
        end = time.monotonic() + self._patience
        while not self._complete.wait(0.05) and time.monotonic() < end and self.failure is None:
            pass
        self._stopped.set()
        if not self._complete.is_set():
            raise self.failure or self._error(self._patience)

    def stop(self, error: TrainingError) -> None:
        """Stop without waiting. error: the reason, for `on_failure`."""
        self._stopped.set()
        self._fail(error)

    def _run(self) -> None:
        pause, behind_since = FIRST_PAUSE, time.monotonic()
        while not self._stopped.is_set():
            # Before listing the files: files that are written meanwhile, such as the results, need another pass.
            is_final = self._final.is_set()
            try:
                is_complete = self._send_changes(is_final)
            # The backends of fsspec raise errors of many types.
            except Exception as error:
                if self._stopped.is_set():
                    return
                lag = time.monotonic() - behind_since
                if not self._fault:
                    log.warning("%s: %s; it is tried again", self._store.url, cause(error))
                self._fault = cause(error)
                if lag > self._patience:
                    self._fail(self._error(lag))
                self._stopped.wait(min(pause, max(self._patience - lag, PERIOD)))
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if is_complete and is_final:
                self._complete.set()
                return
            pause, behind_since, self._fault = FIRST_PAUSE, time.monotonic(), ""
            if self._final.wait(PERIOD):
                self._stopped.wait(PERIOD / 10)

    def _send_changes(self, is_final: bool) -> bool:
        """Upload new and changed files, then remove old ones from the store; return True if it has all files."""
        files = local_files(self._folder)
        if self._record.stored and not files:
            raise FileNotFoundError(f"{self._folder} was emptied while its run was sent")
        tree = Tree(files)
        newest = [tree.groups[groups[-1]] for groups in tree.series.values()]
        has_new = any(not self._record.has(name, files[name]) for names in newest for name in names)
        is_complete = has_checkpoints = True
        for name in tree.plain:
            # Before a checkpoint: a run that resumes from it needs the lines of metrics.jsonl up to its step.
            is_due = time.monotonic() - self._sent.get(name, -self._every) >= self._every or has_new
            if name != FINISHED and not self._record.has(name, files[name]):
                is_complete &= (is_final or is_due or FINISHED in files) and self._send([name], files)
        for names in newest:
            has_checkpoints &= self._send(names, files)
        is_complete &= has_checkpoints
        if is_complete and FINISHED in files:
            # Last: a run with results in the store is complete there.
            is_complete = self._send([FINISHED], files)
        if not has_checkpoints:
            return is_complete

        stored = Tree(self._in_store)
        removed = [name for name in stored.plain if name not in files and name in self._record.stored]
        for series, groups in stored.series.items():
            if series not in tree.series:
                continue
            # This machine may have fetched only the newest one: the store keeps as many as before.
            most = max(self._count_at_start.get(series, 1), len(tree.series[series]))
            old = [group for group in groups if group not in tree.groups]
            for group in old[: max(0, len(groups) - most)]:
                # The mark first: an interruption leaves no checkpoint that looks complete.
                removed += reversed(stored.groups[group])
            # Checkpoints that were saved again in the other format, and checkpoints that were never completed.
            for group in set(groups) & set(tree.groups):
                removed += sorted(set(stored.groups[group]) - set(tree.groups[group]))
            last = tree.series[series][-1]
            removed += [name for name in stored.unfinished if name.startswith(f"{series}/") and name < last]
        for name in removed:
            if self._stopped.is_set():
                break
            self._require()
            self._store.remove(name)
            self._record.add({name: None})
            del self._in_store[name]
        return is_complete

    def _send(self, names: Sequence[str], files: Mapping[str, Version]) -> bool:
        """Upload a plain file, or a checkpoint with its mark last; return False if it was removed meanwhile."""
        if all(self._record.has(name, files[name]) for name in names):
            return True
        copies = self._folder / UPLOADING

        def upload(name: str) -> str:
            if self._stopped.is_set():
                raise InterruptedError("the upload was stopped")
            return self._store.upload(io.below(copies, name), name)

        shutil.rmtree(copies, ignore_errors=True)
        try:
            # A checkpoint may be removed by the training, and a plain file may grow, while it is sent.
            for name in names:
                file, copy = io.below(self._folder, name), io.below(copies, name)
                io.make_folder(copy.parent)
                if len(names) > 1:
                    with suppress(OSError):  # a file system without links
                        os.link(file, copy)
                if not copy.exists():
                    shutil.copyfile(file, copy)
            *others, last = names
            mark = io.read_bytes(io.below(copies, last), 64 * io.MB) if others else None
            expected = Store.mapping(mark).get("sha256")
            self._require()
            pending = [name for name in others if not self._record.has(name, files[name])]
            with ThreadPoolExecutor(THREADS) as pool:
                for name, digest in zip(pending, pool.map(upload, pending), strict=True):
                    if name == names[0] and digest != (expected or digest):
                        raise TruncatedError(f"{name} is being written again: its digest is not that of its mark")
                    self._note(name, files[name])
            upload(last)
            self._note(last, files[last])
            self._sent[last] = time.monotonic()
            return True
        except FileNotFoundError:
            # Or the store lacks the bucket.
            if all(io.below(self._folder, name).exists() for name in names):
                raise
            return False
        finally:
            shutil.rmtree(copies, ignore_errors=True)

    def _note(self, name: str, version: Version) -> None:
        self._record.add({name: version})
        self._in_store[name] = version[0]

    def _error(self, lag: float) -> TrainingError:
        return TrainingError(
            f"{self._store.url} has not received all files for {lag:.0f} seconds{self._fault and f' ({self._fault})'}, "
            f"longer than upload_patience={self._patience:g}. All files are in {self._folder}; the same command on "
            "this machine uploads them and continues"
        )

    def _fail(self, error: TrainingError) -> None:
        if self.failure is None:
            self.failure = error
            self._on_failure(error)
