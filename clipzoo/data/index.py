"""Index of a source: number of samples of every shard, the position of their bytes, and how often captions repeat.

The index is two files: `<digest>.json`, a table of the shards, and the `.bin` named in it, which holds records and
then keys. The id of a sample is the first id of its source + the start of its shard + its position in the shard.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from clipzoo import io
from clipzoo.data.captions import CaptionCounts, caption_keys
from clipzoo.data.faults import Fault
from clipzoo.data.locations import ShardCache, State, is_remote, states
from clipzoo.data.maps.engines import Map, Result, map_in_children, run_map
from clipzoo.data.tables.formats import Rules
from clipzoo.data.tar import RECORD, ROLES, TARS, UNTERMINATED, Scan
from clipzoo.errors import ConfigError, masked, number_of

FOLDER = "clipzoo_index"
VERSION = 3
REMEDY = "the index is built again"
SHARDS_PER_PROCESS = 8
_SHOWN = 3
_VERIFIED_BYTES = 2**29
"""Bytes of an index that are verified when it is loaded: about a second."""
_UNKNOWN = 10**15
"""Larger than any number of samples, so that the fraction of lost samples is near 1."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shard:
    """A row of the table of shards.

    bytes: size of the archive when its samples were listed. state: size and modification time of the file when it was
    last checked; a size below `bytes` means that the shard was cut since then (-1: deleted). Its samples keep their
    ids. flaw: why the list of samples may be incomplete. Set by `write_index`: key_bytes: size of its keys; digest:
    hash of keys and records; duplicates: number of samples whose key occurred before.
    """

    name: str
    bytes: int
    state: tuple[int, int]
    flaw: str | None
    count: int = 0
    key_bytes: int = 0
    digest: str = ""
    duplicates: int = 0


@dataclass(eq=False)
class ShardIndex:
    """Index of the shards of one source, in their order. keys(shard): keys of a shard's samples.

    captions: how often the first captions of the samples repeat. dropped: numbers of samples left out, by setting.
    """

    shards: Sequence[Shard]
    locations: Sequence[str]
    data: Path
    captions: CaptionCounts
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = np.array([shard.count for shard in self.shards], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])
        self.samples = int(self.starts[-1])
        sizes = [self.samples * RECORD.itemsize, *(shard.key_bytes for shard in self.shards)]
        self.key_starts = np.cumsum(sizes).tolist()
        self.keys = lru_cache(8)(self._keys)

    @cached_property
    def records(self) -> np.ndarray:
        """Records [n] of type RECORD. Memory-mapped on first use, in the process that reads."""
        return np.memmap(self.data, RECORD, "r", shape=(self.samples,)) if self.samples else np.empty(0, RECORD)

    def records_of(self, shard: int) -> np.ndarray:
        """Return the records [count] of a shard."""
        return self.records[self.starts[shard] : self.starts[shard + 1]]

    def _keys(self, shard: int) -> list[str]:
        row = self.shards[shard]
        if not row.count:
            return []
        with io.readable(self.data, io.ANY_SIZE, REMEDY) as file:
            file.seek(self.key_starts[shard])
            return file.read(row.key_bytes).decode().split("\0")

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (shard, position in the shard) of sample 0 .. n - 1 of the source."""
        shard = int(self.starts.searchsorted(sample, side="right")) - 1
        return shard, sample - int(self.starts[shard])

    @property
    def fingerprint(self) -> str:
        """Digest of the names, order, sizes and samples of the shards."""
        facts = [(shard.name, shard.count, shard.bytes, shard.digest) for shard in self.shards]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def __reduce__(self) -> tuple[type[ShardIndex], tuple[Any, ...]]:
        return ShardIndex, (self.shards, self.locations, self.data, self.captions, self.dropped)


def load_or_build(
    locations: Sequence[str], cache: ShardCache, folders: Sequence[Path], on: str = "local", rules: Rules = TARS
) -> ShardIndex:
    """Return an up-to-date index of the shards; only new and changed shards are read, and after a kill the others.

    folders: a new index is written to the first of them that is writable. on: processes that read, see `run_map`.
    rules: how the shards are read; the captions under the first of its keys are counted. Raises ConfigError if no
    folder is writable, UnfinishedError as `run_map` does.
    """
    name = index_name(locations, rules)
    last_index = load(name, locations, folders)
    present_states = states(locations, rules.is_table)
    indexed_shards: list[Shard | None] = list(last_index.shards) if last_index else [None] * len(locations)
    # The state of a pipe is unknown until it is read: an intact shard is trusted.
    stale = [
        shard is None or (shard.flaw is not None if state is None else state != shard.state)
        for shard, state in zip(indexed_shards, present_states, strict=True)
    ]
    if last_index and not any(stale):
        return last_index

    # Read new and changed shards, and copy the rows of all others.
    names = relative_names(locations)
    stale_shards = list(compress(zip(names, locations, present_states, strict=True), stale))
    work = ShardScans(stale_shards, cache, rules)

    def rows(parts: Path) -> Iterator[tuple[Shard, np.ndarray, Sequence[str]]]:
        scans = map(work.read, range(len(work.shards)), work.files(parts))
        for number, (shard, state) in enumerate(zip(indexed_shards, present_states, strict=True)):
            scan = next(scans) if stale[number] else None
            is_known = scan is None
            if scan and scan.flaw and last_index and scan.keys == last_index.keys(number)[: len(scan.keys)]:
                # A damaged shard that holds the first known samples keeps all of them; its last one may lack members.
                new, old = scan.records, last_index.records_of(number)[: len(scan.records)]
                last = zip(new[-1], old[-1], strict=True) if len(new) else ()
                is_known = np.array_equal(new[:-1], old[:-1]) and all(value in (0, known) for value, known in last)
            if is_known:
                assert last_index and shard
                row = replace(shard, state=state or shard.state, flaw=scan.flaw) if scan else shard
                yield row, last_index.records_of(number), last_index.keys(number)
            else:
                assert scan
                row = Shard(names[number], scan.bytes, state or (scan.bytes, 0), scan.flaw)
                yield row, scan.records, scan.keys

    parts = (folder := open_folder(folders, locations[0])) / f"{name}.parts"
    try:
        run_map(work, parts, on)
        index = write_index(folder, locations, name, rows(parts), {})
    except io.WriteError:
        # Another process that built the same index has written it and removed the parts.
        new = load(name, locations, folders)
        if new is None or (last_index and new.shards == last_index.shards):
            raise
        return load_or_build(locations, cache, folders, on, rules)
    shutil.rmtree(parts, ignore_errors=True)
    with suppress(OSError):  # not empty
        folder.rmdir()
    return index


@dataclass(frozen=True)
class ShardScans(Map):
    """Map of shards to their samples. shards: name, location and state of each. Others: see `load_or_build`."""

    shards: Sequence[tuple[str, str, State | None]]
    cache: ShardCache
    rules: Rules
    suffix = ".part"
    least_items = SHARDS_PER_PROCESS

    def contents(self) -> Sequence[str]:
        settings = (VERSION, self.rules.caption_key, self.rules.identity)
        return [f"ShardScans {settings} {name} {state}" for name, _, state in self.shards]

    def scan(self, item: int) -> Scan:
        _, location, state = self.shards[item]
        return self.rules.scan(self.cache, state, location)

    def write(self, item: int, file: Path) -> None:
        scan = self.scan(item)
        facts = json.dumps([scan.flaw, scan.bytes, len(scan.keys)]) + "\n"
        with io.whole(file) as part:
            part.write(facts.encode() + scan.records.tobytes() + "\0".join(scan.keys).encode())

    def read(self, item: int, file: Path) -> Scan:
        # Another process that builds the same index may have removed the file.
        with suppress(OSError, ValueError), io.readable(file, io.ANY_SIZE, REMEDY) as part:
            flaw, size, count = json.loads(part.readline())
            records = np.frombuffer(part.read(count * RECORD.itemsize), RECORD)
            return Scan(flaw, records, part.read().decode().split("\0") if count else [], size)
        return self.scan(item)


def _digest(records: bytes, keys: bytes) -> str:
    return hashlib.sha256(keys + records).hexdigest()[:16]


def open_folder(folders: Sequence[Path], example: str) -> Path:
    """Return the first writable folder, which is made if needed. Raises ConfigError if there is none."""
    refusals = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            return folder
        except OSError as error:
            refusals.append(f"{folder} ({error.strerror})")
    raise ConfigError(
        f"the index of {example} and the other shards cannot be written: {', '.join(refusals) or 'no folder given'}; "
        "set data.index_folder to a folder that you can write to"
    )


def write_index(
    folder: Path,
    locations: Sequence[str],
    name: str,
    rows: Iterable[tuple[Shard, np.ndarray, Sequence[str]]],
    dropped: Mapping[str, int],
) -> ShardIndex:
    """Write an index, given every shard with its records and keys, in memory independent of the number of samples.

    The writes are atomic, data before table: after an interruption, a reader sees the old index or the new one. The
    data file is named by its content, so a run that reads an older one is not disturbed.
    """
    shards: list[Shard] = []
    content = hashlib.sha256()
    # Unnamed files: a killed process leaves none.
    with (
        io.explained(folder),
        tempfile.TemporaryFile(dir=folder) as all_records,
        tempfile.TemporaryFile(dir=folder) as all_keys,
    ):
        for shard, records, keys in rows:
            parts = records.tobytes(), "\0".join(keys).encode()
            shard = replace(shard, key_bytes=len(parts[1]), digest=_digest(*parts))
            shards.append(replace(shard, count=len(keys), duplicates=len(keys) - len(set(keys))))
            for file, part in zip((all_records, all_keys), parts, strict=True):
                file.write(part)
                content.update(part)
        samples = sum(shard.count for shard in shards)
        # No files are written for a source without samples, such as a mistyped one.
        if not samples:
            return ShardIndex(shards, locations, folder / "nothing", CaptionCounts(), dropped)
        data = folder / f"{name}-{content.hexdigest()[:12]}.bin"
        with io.whole(data) as target:
            for file in (all_records, all_keys):
                file.seek(0)
                shutil.copyfileobj(file, target)
    captions = CaptionCounts.of(np.memmap(data, RECORD, mode="r", shape=(samples,))["caption"])
    table = {
        "version": VERSION, "data": data.name, "captions": list(captions.occurrences.items()),
        "shards": [asdict(shard) for shard in shards], "dropped": dropped,
    }  # fmt: skip
    io.write_whole(folder / f"{name}.json", json.dumps({"digest": _digest_of(table), **table}))
    return ShardIndex(shards, locations, data, captions, dropped)


def _digest_of(table: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()


def load(name: str, locations: Sequence[str], folders: Sequence[Path]) -> ShardIndex | None:
    """Return the first intact index of this name in the folders, or None. Damage is logged; shards are not checked."""
    for folder in folders:
        path = folder / f"{name}.json"
        if path.is_file() and (index := io.DamageLog().read(partial(_read, path, locations), None)) is not None:
            return index
    return None


def _read(path: Path, locations: Sequence[str]) -> ShardIndex | None:
    """Read and verify an index; None for one of another version. Raises DamagedFileError.

    The data file must have the expected size, and records and keys that match the digests. In a file larger than
    _VERIFIED_BYTES, shards at equal distances are verified.
    """
    table = io.read_json(path, 64 * io.MB, REMEDY)
    if table.get("version") != VERSION:
        return None
    if table.pop("digest", None) != _digest_of(table):
        raise io.DamagedFileError(path, "differs from its digest", REMEDY)
    shards = [Shard(**{**row, "state": tuple(row["state"])}) for row in table["shards"]]
    if [shard.name for shard in shards] != relative_names(locations):
        raise io.DamagedFileError(path, "does not describe the shards", REMEDY)
    captions, data = CaptionCounts(dict(table["captions"])), io.below(path.parent, table["data"])
    index = ShardIndex(shards, locations, data, captions, table["dropped"])

    with io.readable(index.data, io.ANY_SIZE, REMEDY) as file:
        size = file.seek(0, os.SEEK_END)
        if size != index.key_starts[-1]:
            raise io.DamagedFileError(index.data, f"has {size} bytes, not {index.key_starts[-1]}", REMEDY)
        for number in range(0, len(shards), 1 + size // _VERIFIED_BYTES):
            shard = shards[number]
            file.seek(int(index.starts[number]) * RECORD.itemsize)
            records = file.read(shard.count * RECORD.itemsize)
            file.seek(index.key_starts[number])
            if shard.digest != _digest(records, file.read(shard.key_bytes)):
                raise io.DamagedFileError(index.data, f"has damaged records or keys of {shard.name}", REMEDY)
    return index


def of_shards(function: Callable[[int], Result], index: ShardIndex) -> list[Result]:
    """Return the results of a function of the number of a shard for all shards, computed by processes."""
    processes = min(os.cpu_count() or 1, len(index.shards) // SHARDS_PER_PROCESS)
    return list(map_in_children(function, range(len(index.shards)), processes, 1))


def index_name(locations: Sequence[str], rules: Rules) -> str:
    """Return the file name, without suffix, of the index of these shards, which counts the captions under a key."""
    key = caption_keys(rules.caption_key)[0]
    names = [*relative_names(locations), *([] if key is None else ["caption_key", key])]
    names += [] if rules.identity is None else [rules.identity]
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:16]


def relative_names(locations: Sequence[str]) -> list[str]:
    """Return names relative to the common folder: index and fingerprint stay valid when the folder is moved."""
    # A token in a URL is not part of the shard's name.
    names = masked(list(locations))
    if any(name.startswith("pipe:") for name in names):
        return names
    folders = [name.rpartition("/")[0] + "/" for name in names]
    common = os.path.commonprefix(folders).rpartition("/")[0] + "/"
    return [name.removeprefix(common) for name in names]


def index_folders(shards: Sequence[str], index_folder: str | None, run: Path | None) -> list[Path]:
    """Return the folders in which the index of a source may be, the preferred one first."""
    if index_folder is not None:
        return [Path(index_folder)]
    shard_folder = Path(shards[0]).parent
    # The index must not create the folder of missing shards.
    default_folders = [] if is_remote(shards[0]) or not shard_folder.is_dir() else [shard_folder / FOLDER]
    return default_folders + ([run / FOLDER] if run else [])


def check_shards(
    indexes: Sequence[ShardIndex], max_bad_fraction: float, setting: str, limit: str | None = "data.max_bad_fraction"
) -> list[Fault]:
    """Return a fault for every shard with a flaw or repeated keys.

    setting, limit: keys of the shards and of max_bad_fraction, for messages; limit is None if it cannot be changed.

    Raises ConfigError if the fraction of lost samples exceeds max_bad_fraction. A shard that was cut after it was
    indexed lost the samples beyond its present end. Any other flawed shard is expected to hold as many samples as the
    median of the intact shards.
    """
    faults: list[Fault] = []
    cut = never_indexed = 0
    for index in indexes:
        intact = [shard.count for shard in index.shards if shard.count and shard.flaw in (None, UNTERMINATED)]
        usual_count = int(np.median(intact)) if intact else _UNKNOWN
        for number, (location, shard) in enumerate(zip(index.locations, index.shards, strict=True)):
            if shard.flaw is not None or not shard.count:
                shard_cut = 0
                if shard.state[0] < shard.bytes:
                    records = index.records_of(number)
                    ends = np.max([records[f"{role}_offset"] + records[f"{role}_size"] for role in ROLES], axis=0)
                    shard_cut = int((ends.astype(np.int64) > shard.state[0]).sum())
                lost = shard_cut or max(0, usual_count - shard.count)
                cut, never_indexed = cut + shard_cut, never_indexed + lost - shard_cut
                loss = "an unknown number of" if lost >= _UNKNOWN else f"about {lost}"
                kind = "missing_shards" if shard.state[0] < 0 else "truncated_shards" if shard.count else "empty_shards"
                reason = f"{shard.flaw or 'no samples'}; {loss} samples are lost"
                faults.append(Fault(-1, location, "", kind, reason, None))
            if shard.duplicates:
                repeated = [key for key, times in Counter(index.keys(number)).items() if times > 1]
                reason = f"keys that occur more than once, each time as a sample: {', '.join(repeated[:_SHOWN])}, ..."
                faults.append(Fault(-1, location, "", "duplicate_keys", reason, None))

    indexed = sum(index.samples for index in indexes)
    if not indexed:
        shards = [pair for index in indexes for pair in zip(index.locations, index.shards, strict=True)]
        examples = "; ".join(f"{location}: {shard.flaw or 'no samples'}" for location, shard in shards[:_SHOWN])
        more = f"; and {len(shards) - _SHOWN} more" if len(shards) > _SHOWN else ""
        demo = any("data/demo/" in location for location, _ in shards)
        hint = ". `clipzoo world` makes the demo's in data/demo" if demo else ""
        raise ConfigError(f"{setting}: none of the shards holds a sample. {examples}{more}{hint}")
    fraction = (cut + never_indexed) / (indexed + never_indexed)
    if fraction > max_bad_fraction:
        examples = "; ".join(f"{fault.shard}: {fault.reason}" for fault in faults[:_SHOWN])
        most = f"{limit} {max_bad_fraction}" if limit else f"{max_bad_fraction:.0%}"
        remedy = f"remove them from {setting}, or raise {limit}" if limit else f"or remove them from {setting}"
        raise ConfigError(
            f"{setting} lacks about {fraction:.2%} of its samples, more than {most}: "
            f"{number_of(len(faults), 'damaged shard')}. {examples}. Download them again, {remedy}."
        )
    for fault in faults[: _SHOWN * 3]:
        _log.warning("shard %s: %s", fault.shard, fault.reason)
    return faults


def extent(index: ShardIndex, settings: list[Any], shards: int, samples: int) -> list[Any]:
    """Return these settings and numbers, and a digest of names, keys and records of the first shards and samples.

    The last of these shards may have more samples, as a table to which rows were appended.
    """
    facts = []
    for number, shard in enumerate(index.shards[:shards]):
        count, digest = min(shard.count, samples - int(index.starts[number])), shard.digest
        if count < shard.count:
            digest = _digest(index.records_of(number)[:count].tobytes(), "\0".join(index.keys(number)[:count]).encode())
        facts.append((shard.name.rpartition("/")[2], count, digest))
    return [settings, shards, samples, hashlib.sha256(repr(facts).encode()).hexdigest()]
