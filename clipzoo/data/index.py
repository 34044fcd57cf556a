"""Index of a source: number of samples of every shard, and the position of their bytes, and how often captions repeat.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from clipzoo import io
from clipzoo.data.captions import CaptionCounts
from clipzoo.data.children import map_in_children
from clipzoo.data.faults import Fault
from clipzoo.data.locations import ShardCache, Source, State, is_remote, parse_sources, states
from clipzoo.data.tar import (
    RECORD,
    ROLES,
    UNTERMINATED,
    Scan,
    scan_descriptor,
    scan_shard,
    split_keys,
    unreadable_shard,
)
from clipzoo.errors import ConfigError, masked, number_of

FOLDER = "clipzoo_index"
VERSION = 2
REMEDY = "the index is built again"
_CACHED_SHARDS = 8
MOST = 2**44
"""Samples of a shard, and bytes of its keys: sums over a hundred thousand shards are 64-bit integers."""
_VERIFIED_BYTES = 2**29
"""Bytes of an index that are verified when it is loaded: about a second."""


@dataclass(frozen=True)
class Shard:
    """A row of the table of shards.

    bytes: size of the archive when its samples were listed. state: size and modification time of the file when it was
    last checked; a size below `bytes` means that the shard was cut since then (-1: deleted). Its samples keep their
    ids. key_start, key_bytes: position of its keys among all keys. digest: of keys, offsets and sizes. flaw: why the
    list of samples may be incomplete.
    """

    name: str
    count: int
    bytes: int
    state: tuple[int, int]
    key_start: int
    key_bytes: int
    digest: str
    duplicates: int
    flaw: str | None


class ShardIndex:
    """Index of the shards of one source, in their order. keys(shard): keys of a shard's samples.

    captions: how often the captions repeat; of samples with several captions, the first one.
    """

    def __init__(self, shards: Sequence[Shard], locations: Sequence[str], data: Path, captions: CaptionCounts) -> None:
        self.shards, self.locations, self.data, self.captions = list(shards), list(locations), data, captions
        self.counts = np.array([shard.count for shard in shards], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])
        self.samples = int(self.starts[-1])
        self._records: np.ndarray | None = None
        self.keys: Callable[[int], list[str]] = lru_cache(_CACHED_SHARDS)(partial(_read_keys, self))

    @property
    def records(self) -> np.ndarray:
        """[n] of RECORD. Memory-mapped on first use, in the process that reads."""
        if self._records is None:
            self._records = (
                np.memmap(self.data, RECORD, mode="r", shape=(self.samples,)) if self.samples else np.empty(0, RECORD)
            )
        return self._records

    def records_of(self, shard: int) -> np.ndarray:
        """Return the records [count] of a shard."""
        return self.records[self.starts[shard] : self.starts[shard + 1]]

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (shard, position in the shard) of sample 0 .. n - 1 of the source."""
        shard = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return shard, sample - int(self.starts[shard])

    @property
    def fingerprint(self) -> str:
        """Digest of the names, order, sizes and samples of the shards."""
        facts = [(shard.name, shard.count, shard.bytes, shard.digest) for shard in self.shards]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def __reduce__(self) -> tuple[type[ShardIndex], tuple[list[Shard], list[str], Path, CaptionCounts]]:
        return ShardIndex, (self.shards, self.locations, self.data, self.captions)


def load(locations: Sequence[str], folders: Sequence[Path], caption_key: str | None = None) -> ShardIndex | None:
    """Read the last written index from the first of the folders that has one; the shards are not checked.

    A damaged index is named in the log and counts as none.
    """
    damage = io.DamageLog()
    for folder in folders:
        path = folder / f"{index_name(locations, caption_key)}.json"
        if path.is_file() and (index := damage.read(partial(_read, path, locations), None)) is not None:
            return index
    return None


def digest_of(key_bytes: bytes, records: bytes) -> str:
    """Return the digest of a shard's keys and records."""
    return hashlib.sha256(key_bytes + records).hexdigest()[:16]


def index_name(locations: Sequence[str], caption_key: str | None = None) -> str:
    """Return the file name, without suffix, of the index of these shards with the captions under `caption_key`."""
    names = [*relative_names(locations), *([] if caption_key is None else ["caption_key", caption_key])]
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:16]


def relative_names(locations: Sequence[str]) -> list[str]:
    """Return names relative to the common folder: index and fingerprint stay valid when the folder is moved."""
    # A token in a URL is no part of the shard's name.
    names = masked(list(locations))
    if any(name.startswith("pipe:") for name in names):
        return names
    folders = [name.rpartition("/")[0] + "/" for name in names]
    common = os.path.commonprefix(folders).rpartition("/")[0] + "/"
    return [name.removeprefix(common) for name in names]


def read_key_bytes(index: ShardIndex, shard: int) -> bytes:
    """Read the keys of a shard as they are stored in the data file."""
    with io.readable(index.data, io.ANY_SIZE, REMEDY) as file:
        file.seek(index.samples * RECORD.itemsize + index.shards[shard].key_start)
        return file.read(index.shards[shard].key_bytes)


def _read(path: Path, locations: Sequence[str]) -> ShardIndex | None:
    """Read and verify an index; None for one of another version. Raises DamagedFileError."""
    table = io.read_json(path, 64 * io.MB, REMEDY)
    io.require_fields(path, table, {"version": int, "data": str, "shards": list}, REMEDY)
    if table["version"] != VERSION:
        return None
    io.require_fields(path, table, {"captions": list}, REMEDY)
    names = [row["name"] for row in table["shards"] if _is_row(row)]
    if names != relative_names(locations) or len(names) != len(table["shards"]):
        raise io.DamagedFileError(path, "does not describe the shards", REMEDY)
    if Path(table["data"]).name != table["data"] or not table["data"]:
        raise io.DamagedFileError(path, f"names {io.shortened(table['data'])}, not a file beside it", REMEDY)
    shards = [Shard(**{**row, "state": tuple(row["state"])}) for row in table["shards"]]
    if sum(shard.count for shard in shards) * RECORD.itemsize > 2**63:
        raise io.DamagedFileError(path, "counts more samples than a file can hold", REMEDY)
    if not all(isinstance(row, list) and len(row) == 2 and all(map(_is_count, row)) for row in table["captions"]):
        raise io.DamagedFileError(path, "does not count the captions", REMEDY)
    captions = CaptionCounts({size: number for size, number in table["captions"]})
    index = ShardIndex(shards, locations, io.below(path.parent, table["data"]), captions)
    _verify(index)
    return index


def _is_count(number: object) -> bool:
    return isinstance(number, int) and 0 < number < 2**63


def _is_row(row: object) -> bool:
    """Return True for a mapping with the fields of `Shard`, in the form that JSON gives them."""
    if not isinstance(row, dict) or row.keys() != Shard.__dataclass_fields__.keys():
        return False
    state = row["state"] if isinstance(row["state"], list) and len(row["state"]) == 2 else [None]
    numbers = [row["bytes"], *state, *(row[name] for name in ("count", "key_start", "key_bytes", "duplicates"))]
    bounds = [(-1, 2**63)] * 2 + [(0, 2**63)] + [(0, MOST)] * 4
    return all(isinstance(row[name], str) for name in ("name", "digest")) and all(
        type(number) is int and low <= number < high for number, (low, high) in zip(numbers, bounds, strict=False)
    )


def _verify(index: ShardIndex) -> None:
    """Raise DamagedFileError unless the data file has its size, and the records and keys that the digests describe.

    In a file larger than _VERIFIED_BYTES, shards at equal distances are verified.
    """
    with io.readable(index.data, io.ANY_SIZE, REMEDY) as file:
        size = file.seek(0, os.SEEK_END)
        expected = index.samples * RECORD.itemsize + sum(shard.key_bytes for shard in index.shards)
        if size != expected:
            raise io.DamagedFileError(index.data, f"has {size} bytes, not {expected}", REMEDY)
        for number in range(0, len(index.shards), 1 + size // _VERIFIED_BYTES):
            shard = index.shards[number]
            file.seek(int(index.starts[number]) * RECORD.itemsize)
            records = file.read(shard.count * RECORD.itemsize)
            file.seek(index.samples * RECORD.itemsize + shard.key_start)
            if shard.digest != digest_of(file.read(shard.key_bytes), records):
                raise io.DamagedFileError(index.data, f"has damaged records or keys of {shard.name}", REMEDY)


def _read_keys(index: ShardIndex, shard: int) -> list[str]:
    return split_keys(read_key_bytes(index, shard), index.shards[shard].count)


# Shards that are missing, truncated, damaged or empty before training starts, and the samples lost with them.


_log = logging.getLogger(__name__)
_SHOWN = 3
# Larger than any number of samples, so that the fraction of lost samples is near 1.
_UNKNOWN = 10**15


def check_shards(indexes: Sequence[ShardIndex], max_bad_fraction: float) -> list[Fault]:
    """Return a fault for every shard with a flaw or repeated keys.

    Raises ConfigError if the fraction of lost samples exceeds max_bad_fraction. A shard that was cut after it was
    indexed lost the samples beyond its present end. Any other flawed shard is expected to hold as many samples as
    img2dataset's `<shard>_stats.json` states, or else the median of the intact shards.
    """
    faults: list[Fault] = []
    present = sum(index.samples for index in indexes)
    cut = never_indexed = 0
    for index in indexes:
        usual = _median_count(index)
        for number, shard in enumerate(index.shards):
            if shard.flaw is None and shard.count and not shard.duplicates:
                continue
            shard_cut = _cut_samples(index, number)
            shard_rest = 0 if shard_cut else max(0, _expected(shard, index.locations[number], usual) - shard.count)
            cut, never_indexed = cut + shard_cut, never_indexed + shard_rest
            faults += _faults(index, number, shard_cut + shard_rest)
    if not present:
        raise ConfigError(_no_samples(indexes))
    fraction = (cut + never_indexed) / (present + never_indexed)
    if fraction > max_bad_fraction:
        shown = "; ".join(f"{fault.shard}: {fault.reason}" for fault in faults[:_SHOWN])
        raise ConfigError(
            f"data.shards lacks about {fraction:.2%} of its samples, more than data.max_bad_fraction "
            f"{max_bad_fraction}: {number_of(len(faults), 'damaged shard')}. {shown}. Download them again, remove "
            "them from "
            "data.shards, or raise data.max_bad_fraction."
        )
    for fault in faults[: _SHOWN * 3]:
        _log.warning("shard %s: %s", fault.shard, fault.reason)
    return faults


def _no_samples(indexes: Sequence[ShardIndex]) -> str:
    shards = [pair for index in indexes for pair in zip(index.locations, index.shards, strict=True)]
    shown = "; ".join(f"{location}: {shard.flaw or 'no samples'}" for location, shard in shards[:_SHOWN])
    more = f"; and {len(shards) - _SHOWN} more" if len(shards) > _SHOWN else ""
    demo = any("data/demo/" in location for location, _ in shards)
    hint = ". `clipzoo world` makes the demo's in data/demo" if demo else ""
    return f"data.shards: none of the shards holds a sample. {shown}{more}{hint}"


def _faults(index: ShardIndex, number: int, lost: int) -> list[Fault]:
    shard, location, faults = index.shards[number], index.locations[number], []
    if shard.flaw is not None or not shard.count:
        loss = "an unknown number of" if lost >= _UNKNOWN else f"about {lost}"
        reason = f"{shard.flaw or 'no samples'}; {loss} samples are lost"
        faults.append(Fault(-1, location, "", _kind(shard), reason, None))
    if shard.duplicates:
        repeated = [key for key, times in Counter(index.keys(number)).items() if times > 1]
        reason = f"keys that occur more than once, each time as a sample: {', '.join(repeated[:_SHOWN])}, ..."
        faults.append(Fault(-1, location, "", "duplicate_keys", reason, None))
    return faults


def _kind(shard: Shard) -> str:
    if shard.state[0] < 0:
        return "missing_shards"
    return "empty_shards" if not shard.count else "truncated_shards"


def _median_count(index: ShardIndex) -> int:
    """Return the median number of samples of the intact shards; _UNKNOWN if there is none."""
    intact = [shard.count for shard in index.shards if shard.count and shard.flaw in (None, UNTERMINATED)]
    return int(np.median(intact)) if intact else _UNKNOWN


def _expected(shard: Shard, location: str, usual: int) -> int:
    if shard.flaw is None and shard.count:
        return shard.count
    if not is_remote(location):
        stats = Path(location).with_name(f"{Path(location).stem}_stats.json")
        if stats.is_file():
            return io.DamageLog().read(partial(_successes, stats), usual)
    return usual


def _successes(stats: Path) -> int:
    """Number of samples that img2dataset states for a shard. Raises DamagedFileError."""
    content = io.read_json(stats, io.MB, "the size of other shards is used")
    io.require_fields(stats, content, {"successes": int}, "the size of other shards is used")
    return content["successes"]


def _cut_samples(index: ShardIndex, number: int) -> int:
    """Return how many indexed samples extend beyond the present end of the file."""
    shard = index.shards[number]
    if shard.state[0] >= shard.bytes:
        return 0
    records = index.records_of(number)
    ends = np.max([records[f"{role}_offset"] + records[f"{role}_size"] for role in ROLES], axis=0)
    return int((ends.astype(np.int64) > shard.state[0]).sum())


# Fingerprints of datasets: digests of their content, independent of where they lie. Needs no torch.


DATASET = "clipzoo.data.dataset.ShardDataset"


def fingerprint(indexes: Sequence[ShardIndex], sources: Sequence[Source], window: int) -> str:
    """Return a digest of the shards' names and samples and of all that sets their order."""
    facts = [(index.fingerprint, source.weight) for index, source in zip(indexes, sources, strict=True)]
    return hashlib.sha256(repr((facts, window)).encode()).hexdigest()


def stored_fingerprint(data: Mapping[str, Any], run: Path) -> str | None:
    """Return the fingerprint of the dataset of a `data` node, from its stored index; None without an up-to-date one.

    run: run directory, which may hold the index.
    """
    if data["_target_"] != DATASET:
        return None
    sources = parse_sources(data["shards"])
    indexes = [
        _stored_index(source.shards, index_folders(source.shards, data["index_folder"], run), data["caption_key"])
        for source in sources
    ]
    known = [index for index in indexes if index is not None]
    return fingerprint(known, sources, data["shuffle_window"]) if len(known) == len(sources) else None


def _stored_index(shards: Sequence[str], folders: Sequence[Path], caption_key: str | None) -> ShardIndex | None:
    """Return the stored index if it describes these files: another dataset may have shards of the same names."""
    index = load(shards, folders, caption_key)
    if index is None:
        return None
    try:
        now = states(shards)
    except OSError:
        return None
    return index if now == [shard.state for shard in index.shards] else None


def index_folders(shards: Sequence[str], index_folder: str | None, run: Path | None) -> list[Path]:
    """Return the folders in which the index of a source may be, the preferred one first."""
    if index_folder is not None:
        return [Path(index_folder)]
    home = Path(shards[0]).parent
    # The index must not create the folder of missing shards.
    beside = [] if is_remote(shards[0]) or not home.is_dir() else [home / FOLDER]
    return beside + ([run / FOLDER] if run else [])


# Building an index and keeping it up to date.


_SHARDS_PER_PROCESS = 8


def load_or_build(
    locations: Sequence[str],
    cache: ShardCache,
    folders: Sequence[Path],
    processes: int | None = None,
    caption_key: str | None = None,
) -> ShardIndex:
    """Return an up-to-date index of the shards; only new and changed shards are read.

    folders: a new index is written to the first of them that is writable. processes: limit of the reading processes;
    None for one per core. caption_key: of the captions that are counted, see `read_captions`. Raises ConfigError if no
    folder is writable.
    """
    known = load(locations, folders, caption_key)
    now = states(locations)
    before: list[Shard | None] = list(known.shards) if known else [None] * len(locations)
    stale = [_is_stale(shard, state) for shard, state in zip(before, now, strict=True)]
    if known and not any(stale):
        return known
    stale_locations = [location for location, read in zip(locations, stale, strict=True) if read]
    scans = _scan_all(stale_locations, cache, processes, caption_key)
    names = relative_names(locations)
    name = index_name(locations, caption_key)
    with _open_folder(folders, locations[0]) as folder, _Writer(folder, name) as writer:
        for number, (shard, state) in enumerate(zip(before, now, strict=True)):
            scan = next(scans) if stale[number] else None
            if scan is None or (known and scan.flaw and _is_start_of(scan, known, number)):
                assert known and shard
                row = replace(shard, state=state or shard.state, flaw=scan.flaw) if scan else shard
                writer.add(row, known.records_of(number).tobytes(), read_key_bytes(known, number))
            else:
                row = _row(names[number], scan, state or (scan.bytes, 0))
                writer.add(row, scan.records.tobytes(), scan.key_bytes)
        # A source without samples, such as a mistyped one, leaves no files behind.
        if not any(shard.count for shard in writer.shards):
            return ShardIndex(writer.shards, locations, folder / "nothing", CaptionCounts())
        return ShardIndex(writer.shards, locations, *writer.finish())


def _is_stale(known: Shard | None, state: State | None) -> bool:
    if known is None:
        return True
    # The state of a pipe is unknown until it is read: an intact shard is trusted.
    return known.flaw is not None if state is None else state != known.state


def _scan_all(
    locations: Sequence[str], cache: ShardCache, processes: int | None, caption_key: str | None
) -> Iterator[Scan]:
    scan: Callable[[str], Scan] = partial(_scan, cache, caption_key)
    count = min(processes or os.cpu_count() or 1, len(locations) // _SHARDS_PER_PROCESS)
    if count < 2:
        yield from map(scan, locations)
        return
    yield from map_in_children(scan, locations, count, chunk=4)


def _scan(cache: ShardCache, caption_key: str | None, location: str) -> Scan:
    if not is_remote(location):
        return scan_shard(location, caption_key)
    try:
        descriptor = cache.open(location)
    except OSError as error:
        return unreadable_shard(f"unreadable: {error}")
    try:
        return scan_descriptor(descriptor, caption_key)
    finally:
        os.close(descriptor)


def _is_start_of(scan: Scan, known: ShardIndex, number: int) -> bool:
    """Return True if the scan holds only the first known samples of this shard; its last one may lack members."""
    count = len(scan.records)
    if count > known.shards[number].count or scan.keys != known.keys(number)[:count]:
        return False
    before = known.records_of(number)[:count]
    if not np.array_equal(scan.records[:-1], before[:-1]):
        return False
    return not count or all(new in (0, old) for new, old in zip(scan.records[-1], before[-1], strict=True))


def _row(name: str, scan: Scan, state: State) -> Shard:
    digest = digest_of(scan.key_bytes, scan.records.tobytes())
    return Shard(name, len(scan.records), scan.bytes, state, 0, len(scan.key_bytes), digest, scan.duplicates, scan.flaw)


@contextmanager
def _open_folder(folders: Sequence[Path], example: str) -> Iterator[Path]:
    """Yield the first writable folder. A folder that is created here and stays empty is removed."""
    refusals = []
    for folder in folders:
        new = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".{os.uname().nodename}.{os.getpid()}.probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            refusals.append(f"{folder} ({error.strerror})")
            continue
        try:
            yield folder
        finally:
            if new:
                with suppress(OSError):  # not empty
                    folder.rmdir()
        return
    raise ConfigError(
        f"the index of {example} and the other shards cannot be written: {', '.join(refusals) or 'no folder given'}; "
        "set data.index_folder to a folder that you can write to"
    )


class _Writer:
    """Writes an index shard by shard, with memory independent of the number of samples.

    The writes are atomic, data before table: a reader sees the old index or the new one, whatever is interrupted. The
    data file is named by its content, so a run that reads an older one is not disturbed.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self.shards: list[Shard] = []
        self._folder, self._digest = folder, digest
        self._key_start = 0
        self._content = hashlib.sha256()

    def __enter__(self) -> _Writer:
        with io.explained(self._folder):
            # Without a name: a kill leaves nothing.
            self._files = [tempfile.TemporaryFile(dir=self._folder) for _ in range(2)]  # noqa: SIM115 - closed on exit
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            with suppress(OSError):  # a full disk, of which `add` or `finish` has told
                file.close()

    def add(self, shard: Shard, records: bytes, keys: bytes) -> None:
        self.shards.append(replace(shard, key_start=self._key_start))
        self._key_start += len(keys)
        for file, content in zip(self._files, (records, keys), strict=True):
            with io.explained(self._folder):
                file.write(content)
            self._content.update(content)

    def finish(self) -> tuple[Path, CaptionCounts]:
        """Write the table; return the path of the data file, and how often captions repeat."""
        data = self._folder / f"{self._digest}-{self._content.hexdigest()[:12]}.bin"
        with io.whole(data) as target:
            for file in self._files:
                file.seek(0)
                shutil.copyfileobj(file, target)
        samples = sum(shard.count for shard in self.shards)
        captions = CaptionCounts.of(np.memmap(data, RECORD, mode="r", shape=(samples,))["caption"])
        table = {
            "version": VERSION, "data": data.name, "captions": list(captions.occurrences.items()),
            "shards": [asdict(shard) for shard in self.shards],
        }  # fmt: skip
        io.write_whole(self._folder / f"{self._digest}.json", json.dumps(table))
        return data, captions
