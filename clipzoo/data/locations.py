"""Shard locations (local paths, fsspec URLs and `pipe:COMMAND`), and local copies of remote shards."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import math
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, TextIO

from clipzoo.config.schema import kind_of
from clipzoo.config.vocabulary import Range
from clipzoo.errors import ConfigError, TrainingError
from clipzoo.io import MB, below, explained, file_type, read_json
from clipzoo.io.stores import RANGE_BYTES, TruncatedError, is_url, open_filesystem, read_ranges, repeated

KEY = "data.shards"
MOST_SHARDS = 1_000_000
"""Largest number of shards of one pattern."""
WEIGHT = kind_of(Annotated[float, Range(at_least=1e-3, at_most=1e3)])
TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
"""Endings of files that list images and captions."""
SILENCE_TIMEOUT_SECONDS = 300.0
"""Seconds without output after which a command counts as hanging."""
Shards = str | Path | Sequence[str | Path] | Sequence[Mapping[str, str | float | Sequence[str]]]
State = tuple[int, int]
"""Size of a shard in bytes, and its modification time or a hash of its version tag."""
MISSING: State = (-1, 0)
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_ROW_GROUPS = re.compile(r"#groups(\d+)-(\d+)(?=(\.\w+)?$)")
_SCRIPT = """
exec 3<&0 </dev/null
((read -r line <&3; kill -KILL 0) >/dev/null 2>&1 &)
exec 3<&-
eval "$1"
"""
"""Runs its argument. When standard input ends, because the parent has ended, all processes of the script are killed."""


class Source(NamedTuple):
    """Shards that are shuffled together. weight: how often a sample occurs, relative to other sources."""

    shards: tuple[str, ...]
    weight: float


def parse_sources(shards: Shards, tables: Callable[[str], list[str] | None] | None = None) -> list[Source]:
    """Return the sources of `data.shards`: one for a path or a list of paths, one per entry of {path, weight}.

    A path is a tar, a brace pattern, a glob, a folder (its *.tar), an fsspec URL of one of these, or `pipe:COMMAND`.
    tables: given for `data.path`; returns the files of a folder, None for other paths.
    """
    if isinstance(shards, str | Path):
        shards = [shards]
    if not isinstance(shards, Sequence) or not shards:
        raise ConfigError(f"data.shards is {shards!r}: give a path, a pattern, or a list of them")
    entries = list[Any](shards)
    if all(isinstance(entry, str | Path) for entry in entries):
        entries = [{"path": entries}]
    sources = []
    for entry in entries:
        if not isinstance(entry, Mapping) or not entry.get("path") or set(entry) - {"path", "weight"}:
            raise ConfigError(
                f"data.shards holds {entry!r}: in a list with weights, every entry is {{path: ..., weight: ...}}"
            )
        weight, patterns = entry.get("weight", 1.0), entry["path"]
        if not WEIGHT.admits(weight):
            raise ConfigError(f"data.shards: the weight of {patterns} must be {WEIGHT.words}, not {weight!r}")
        patterns = [patterns] if isinstance(patterns, str) else patterns
        locations = [shard for pattern in patterns for shard in _expand(str(pattern), tables)]
        if len(set(locations)) < len(locations):
            duplicate = min(shard for shard in locations if locations.count(shard) > 1)
            raise ConfigError(f"data.shards names {duplicate} twice: every sample comes once an epoch")
        sources.append(Source(tuple(locations), float(weight)))
    return sources


def _expand(pattern: str, tables: Callable[[str], list[str] | None] | None) -> list[str]:
    from braceexpand import braceexpand

    if not pattern:
        raise ConfigError("data.shards holds an empty path")
    if tables is not None and (files := tables(pattern)) is not None:
        return files
    if tables is None and pattern.lower().endswith(TABLES):
        # An index of wids lists tars, relative to its folder.
        file = Path(pattern).expanduser().absolute()
        entries = read_json(file, 64 * MB).get("shardlist") if file.suffix == ".json" and file.is_file() else None
        if isinstance(entries, list):
            urls = [str(entry.get("url")) for entry in entries if isinstance(entry, dict)]
            return [url if is_url(url) else str(below(file.parent, url, links=True)) for url in urls]
        raise ConfigError(
            f"data.shards={pattern} is a table, not shards: train with data=table data.path={pattern}, or make shards "
            f"with clipzoo shards make {pattern} shards/"
        )
    if _most(pattern) > MOST_SHARDS:
        raise ConfigError(f"data.shards: {pattern} matches more than {MOST_SHARDS:,} shards: give a folder")
    # Without this test, braceexpand would refuse a lone closing brace, as in a shell command.
    try:
        paths = list(braceexpand(pattern)) if "{" in pattern else [pattern]
    except ValueError as error:
        raise ConfigError(f"data.shards: {pattern}: {error}") from None
    if pattern.startswith("pipe:"):
        return paths
    # The shards of folders and globs, on the disk or in a store; else absolute paths and URLs.
    all_shards = list[str]()
    for path in paths:
        fault = "matches no file"
        if is_url(path):
            shards = [path]
            if glob.has_magic(path) or path.endswith("/"):
                filesystem, store_path = open_filesystem(path, KEY)
                listed = store_path.rstrip("/") + "/*.tar" if path.endswith("/") else store_path
                try:
                    names = sorted(repeated(path, partial(filesystem.glob, listed), KEY))
                except OSError as error:
                    raise ConfigError(f"data.shards: {path} cannot be listed: {error}") from error
                shards = [filesystem.unstrip_protocol(name) for name in names]
        else:
            try:
                absolute = Path(path).expanduser().absolute()
            except RuntimeError as error:
                raise ConfigError(f"data.shards: {path}: {error}") from None
            shards = [str(absolute)]
            if absolute.is_dir():
                shards, fault = sorted(str(shard) for shard in absolute.glob("*.tar")), "holds no *.tar"
            elif glob.has_magic(path) and not absolute.exists():
                shards = sorted(glob.glob(str(absolute)))
        if not shards:
            raise ConfigError(f"data.shards: {path} {fault}")
        all_shards += shards
    return all_shards


def _most(pattern: str) -> int:
    """Return the largest number of shards that the braces of a pattern can represent. Nothing is expanded."""
    counts = list[int]()

    def counted(match: re.Match[str]) -> str:
        if numbers := _NUMBERS.fullmatch(match[1]):
            # Longer numbers are cut to 19 digits, which still exceeds MOST_SHARDS.
            first, last, step = (int((number or "1")[:19]) for number in numbers.groups())
            counts.append(abs(last - first) // (abs(step) or 1) + 1)
        else:
            counts.append(match[1].count(",") + 1)
        return ""

    replaced = 1
    while replaced:
        # Innermost braces first.
        pattern, replaced = _BRACES.subn(counted, pattern)
    return math.prod(counts)


def piece(location: str) -> tuple[str, range | None]:
    """Return the file of a shard and its row groups: those from 20 on and before 40 are FILE#groups20-40.parquet."""
    match = _ROW_GROUPS.search(location)
    return _ROW_GROUPS.sub("", location), range(int(match[1]), int(match[2])) if match else None


def is_remote(location: str) -> bool:
    return location.startswith("pipe:") or is_url(location)


def states(locations: Sequence[str], folders: bool = False) -> list[State | None]:
    """Return the state of every shard: MISSING if there is none, None if it is unknown until the shard is read.

    folders: a folder may be a shard; its state is the number of its files and a hash of their names.
    """
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(partial(_state, folders=folders), locations))


def _state(location: str, folders: bool) -> State | None:
    if location.startswith("pipe:"):
        return None
    try:
        if is_remote(location):
            filesystem, path = open_filesystem(location, KEY)
            info = repeated(location, lambda: filesystem.info(path), KEY)
            if info.get("size") is None:
                return None
            return int(info["size"]), int(hashlib.sha256(_version(info).encode()).hexdigest()[:12], 16)
        status = os.stat(piece(location)[0])
        if folders and stat.S_ISDIR(status.st_mode):
            names = sorted(files_below(Path(location)))
            return len(names), int(hashlib.sha256("\0".join(names).encode("utf-8", "replace")).hexdigest()[:12], 16)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(
                f"data.shards: {location} is {file_type(status.st_mode)}, not a file (pipe:COMMAND reads from a "
                "command)"
            )
        return status.st_size, status.st_mtime_ns
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        raise ConfigError(f"data.shards: {location} cannot be read: {error.strerror or error}") from error


def files_below(folder: Path) -> Iterator[str]:
    """Yield the paths of all files below a folder, relative to it, except hidden ones."""
    for entry in os.scandir(folder):
        if entry.is_dir() and not entry.name.startswith("."):
            yield from (f"{entry.name}/{name}" for name in files_below(Path(entry.path)))
        elif not entry.name.startswith("."):
            yield entry.name


def _version(facts: Mapping[str, Any]) -> str:
    """Return the version tag or modification time that a store gives for a file."""
    names = ("ETag", "etag", "mtime", "LastModified", "last_modified", "created")
    return "".join(str(facts[name]) for name in names if name in facts)


def copy_name(location: str, content: str) -> str:
    """Return the name of a copy in the cache that differs if `content` does."""
    name = location.rpartition("/")[2].partition("?")[0][-60:].replace(" ", "_")
    return f"{hashlib.sha256(content.encode()).hexdigest()[:16]}-{name}"


class ShardCache:
    """Opens shards. Remote shards are copied whole into a folder of limited size.

    All processes of a machine share the cache. A shard is opened while its lock is held, and an open file stays
    readable after its deletion, so the bytes that are read never depend on the size of the cache.

    folder: None for a folder of this user in the temporary folder. gigabytes: limit of the cache; the least recently
    used shards are deleted first.
    """

    def __init__(self, folder: str | None, gigabytes: float) -> None:
        self._folder = Path(folder or Path(tempfile.gettempdir()) / f"clipzoo-shards-{os.getuid()}")
        self._chosen = folder is not None
        self._limit = gigabytes * 1e9

    def open(self, location: str, *, size: int | None = None) -> int:
        """Return a file descriptor of the shard, which the caller closes; download the shard if needed.

        size: of a cached copy to reuse; None: always download. Raises OSError for the shard, WriteError for the cache.
        """
        if not is_remote(location):
            # O_NONBLOCK: opening a named pipe would wait for a writer.
            return os.open(location, os.O_RDONLY | os.O_NONBLOCK)
        return self.copy(copy_name(location, location), partial(copy_location, location), lambda found: found == size)

    def copy(self, name: str, write: Callable[[IO[bytes]], None], is_current: Callable[[int], bool]) -> int:
        """Return a file descriptor of the copy with this name, which the caller closes; write the copy if needed.

        is_current: tells from its size whether an existing copy is reused. Raises as `open` and `write` do.
        """
        # Errors of the cache's own files must not count as unusable samples.
        failing = partial(explained, self._folder, hint=", or set data.cache_folder or a lower data.cache_gigabytes")
        with failing():
            self._folder.mkdir(mode=0o777 if self._chosen else 0o700, parents=True, exist_ok=True)
            # Everyone can write to the temporary folder: files of another user are neither read nor written through.
            if not self._chosen and (self._folder.is_symlink() or self._folder.stat().st_uid != os.getuid()):
                raise ConfigError(f"{self._folder} belongs to another user: set data.cache_folder to a folder of yours")
            copy = below(self._folder, name)
            lock = open(self._folder / f".{copy.name}.lock", "w")  # noqa: SIM115 - closed by `_held`
        with _held(lock):
            with suppress(FileNotFoundError):
                descriptor = os.open(copy, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
                if is_current(os.fstat(descriptor).st_size):
                    with suppress(PermissionError):  # a copy of another user
                        os.utime(descriptor)
                    return descriptor
                os.close(descriptor)
            partial_copy = copy.with_name(f".{copy.name}.part")
            try:
                with failing():
                    target = open(partial_copy, "wb")  # noqa: SIM115 - closed below
                with failing(only_full_disks=True), target:
                    write(target)
                with failing():
                    descriptor = os.open(partial_copy, os.O_RDONLY)
                    os.replace(partial_copy, copy)
            finally:
                partial_copy.unlink(missing_ok=True)
            # Delete the least recently used copies.
            with _held(open(self._folder / ".evict.lock", "w")):
                copies = []
                for path in self._folder.glob("[!.]*"):
                    # The folder may be emptied by hand at any time, and may have files of other users.
                    with suppress(OSError):
                        copies.append((path.stat(), path))
                total = sum(status.st_size for status, _ in copies)
                for status, path in sorted(copies, key=lambda entry: entry[0].st_mtime_ns):
                    if total > self._limit and path != copy:
                        with suppress(OSError):
                            path.unlink()
                        total -= status.st_size
            return descriptor


@contextmanager
def _held(file: TextIO) -> Iterator[None]:
    """Hold the lock of an open file, and close the file."""
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing does not suffice: a loader process forked in the meantime shares the open file and its lock.
            fcntl.flock(file, fcntl.LOCK_UN)


def copy_location(location: str, target: IO[bytes], key: str = KEY) -> None:
    """Copy a remote file into an open file. Raises OSError; TrainingError, which names `key`, if no server answers."""
    if location.startswith("pipe:"):
        return copy_output(location.removeprefix("pipe:"), target)
    filesystem, path = open_filesystem(location, key)

    def download() -> None:
        target.seek(0)
        target.truncate()
        info = filesystem.info(path)
        if info.get("size") is None:
            with filesystem.open(path, "rb") as source:
                shutil.copyfileobj(source, target, 1 << 20)
            return
        for content in read_ranges(location, filesystem, path, int(info["size"]), key):
            target.write(content)
        if int(info["size"]) > RANGE_BYTES and _version(filesystem.info(path)) != _version(info):
            raise TruncatedError("the shard has changed while it was read")

    repeated(location, download, key)


def copy_ranges(location: str, ranges: Sequence[tuple[int, int]], size: Callable[[], int], target: IO[bytes]) -> None:
    """Copy bytes of a URL into an open file, which starts with the first of them; gaps between ranges stay empty.

    ranges: first byte and end of each, in ascending order. size: returns the size of the remote file. Raises as
    `copy_location` does, and ConfigError if the server ignores ranges.
    """
    filesystem, path = open_filesystem(location, KEY)
    # File systems without ranged requests read ahead by default.
    options = {} if filesystem.async_impl else {"cache_type": "none"}
    total = size()

    def read(start: int, stop: int) -> bytes:
        content: bytes = filesystem.cat_file(path, start=start, end=stop, **options)
        if len(content) > stop - start:
            raise ConfigError(
                f"data.locality=node reads parts of shards, but the server of {location} sent {len(content):,} bytes "
                f"in place of {stop - start:,}: it does not support ranges; set data.locality=none"
            )
        if len(content) < stop - start:
            raise TruncatedError(f"{len(content)} bytes in place of {stop - start}")
        return content

    for first, end in ranges:
        for start in range(first, min(end, total), RANGE_BYTES):
            target.seek(start - ranges[0][0])
            target.write(repeated(location, partial(read, start, min(start + RANGE_BYTES, end, total)), KEY))


def copy_output(command: str, target: IO[bytes]) -> None:
    """Write a command's output to an open file. Raises OSError if it fails, TrainingError if it is silent too long."""
    shell = shutil.which("bash")
    # With pipefail, a pipeline fails when any of its commands fails.
    words = [shell, "-o", "pipefail", "-c"] if shell else ["/bin/sh", "-c"]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*words, _SCRIPT, "clipzoo", command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            output, poll = process.stdout.fileno(), select.poll()
            poll.register(output)
            content: bytes | None = None
            while content != b"":
                if not poll.poll(SILENCE_TIMEOUT_SECONDS * 1000):
                    silence = f"has written nothing for {SILENCE_TIMEOUT_SECONDS:g} seconds"
                    raise TrainingError(f"data.shards: {command!r} {silence}")
                content = os.read(output, 1 << 20)
                target.write(content)
            code = process.wait(SILENCE_TIMEOUT_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if code:
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip()[-200:]
            raise OSError(f"{command!r} exited with {code}: {text}")
