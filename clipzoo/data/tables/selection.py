"""Selection of samples before training: by a condition, by uids, without duplicates, and a fraction.

A selection is an index with fewer records, stored under the fingerprint of the whole index and its own settings.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from clipzoo import io
from clipzoo.data.captions import digest
from clipzoo.data.faults import BadSampleError
from clipzoo.data.index import Shard, ShardIndex, index_folders, index_name, load, of_shards, open_folder, write_index
from clipzoo.data.locations import Source, states
from clipzoo.data.maps.duplicates import earlier_copies, pictures
from clipzoo.data.maps.engines import run_map
from clipzoo.data.maps.samples import SampleFacts
from clipzoo.data.plan import UNIT, Weights
from clipzoo.data.reader import ShardReader
from clipzoo.data.tables.formats import Rules, TableRules, arrow
from clipzoo.data.tar import TarRules
from clipzoo.distributed.launch import say
from clipzoo.errors import ConfigError, first_line, imported, number_of

DATASET = "clipzoo.data.dataset.ShardDataset"
WEIGHT_FILES = (".npy", ".parquet")
"""Endings of files of sample weights."""
_ROW = "clipzoo_row"
_PAIRS = np.dtype("u8,u8")
"""Uids of DataComp: both halves of 32 hexadecimal digits."""


@dataclass(frozen=True)
class Selection:
    """Which samples a run sees, in the order in which samples are left out.

    where: condition of SQL on keys of the .json or columns. uids: a .npy of texts or of DataComp's pairs of numbers,
    or a text file with a uid a line.
    duplicates: keep only the first of the samples with the same bytes of the image, or of image and (first) caption,
    or of near-duplicates.
    fraction: of the samples that are left, keep those with the smallest digests of seed, shard and key.
    """

    where: str | None = None
    uids: str | None = None
    duplicates: Literal["image", "pair", "near"] | None = None
    fraction: float | None = None
    seed: int | None = None
    uid_key: str | None = None

    @property
    def is_empty(self) -> bool:
        """True if all samples are selected."""
        return self == Selection(seed=self.seed, uid_key=self.uid_key)

    def name(self, index: ShardIndex) -> str:
        """Return the name of the index of the selected samples."""
        uids = None if self.uids is None else io.digest_of(Path(self.uids))
        return hashlib.sha256(repr((index.fingerprint, replace(self, uids=uids))).encode()).hexdigest()[:16]


def select(selection: Selection, reader: ShardReader, index: ShardIndex, folders: Sequence[Path]) -> ShardIndex:
    """Return the index of the selected samples, in which `dropped` counts the others by setting.

    folders: as in `load_or_build`. Raises ConfigError if no sample is left, or the condition cannot be applied.
    """
    if selection.is_empty:
        return index
    name = selection.name(index)
    selected = load(name, index.locations, folders)
    if selected is None:
        uids: np.ndarray | None = None
        if selection.uids is not None:
            try:
                with io.readable(path := Path(selection.uids), io.ANY_SIZE) as file:
                    if path.suffix == ".npy":
                        uids = np.load(file, allow_pickle=False)
                    else:
                        uids = np.array(file.read().decode().split(), str)
                if not uids.size:
                    raise ValueError("it holds no uid")
                if uids.ndim != 1 or not (uids.dtype == _PAIRS or uids.dtype.kind in "US"):
                    content = f"{uids.dtype} {list(uids.shape)}"
                    raise ValueError(f"it holds {content}, not a list of texts or of pairs of uint64")
            except (ValueError, EOFError) as error:
                raise ConfigError(f"data.uids={path}: {first_line(error)}") from None
            uids = np.sort(uids.astype(str) if uids.dtype.kind == "S" else uids)
        parts = of_shards(partial(_examine, index, selection, reader, uids), index)
        passing, listed, images, order = (np.concatenate(part) for part in zip(*parts, strict=True))
        places, dropped = np.flatnonzero(passing), {"where": int((~passing).sum())}

        def keep(setting: str, kept: np.ndarray) -> None:
            nonlocal places
            dropped[setting] = len(places) - len(kept)
            places = kept

        keep("uids", places[listed[places]])
        if selection.duplicates == "near":
            # The files of `clipzoo shards look` with its default settings, if it has read the shards.
            facts = SampleFacts(index, reader, 89_000_000)
            maps = Path(index.locations[0]).parent / "clipzoo_look" / "maps"
            if not facts.is_complete(maps):
                run_map(facts, maps := open_folder(folders, index.locations[0]) / "maps")
            table = facts.merged(maps).take(places)
            readable = np.flatnonzero(table["pixels"].is_valid())
            table = table.take(readable)
            first = earlier_copies(table["digest"].to_numpy(), pictures(table))[1]
            keep("duplicates", np.delete(places, readable[first != np.arange(len(first))]))
        elif selection.duplicates is not None:
            # Images that cannot be read have the digest 0, and are no duplicates.
            first = np.unique(images[places], return_index=True)[1]
            keep("duplicates", places[np.union1d(first, np.flatnonzero(images[places] == 0))])
        if selection.fraction is not None:
            ranks = np.argsort(order[places], kind="stable")[: round(selection.fraction * len(places))]
            keep("fraction", places[np.sort(ranks)])

        def rows() -> Iterator[tuple[Shard, np.ndarray, Sequence[str]]]:
            for number, kept in enumerate(np.split(places, np.searchsorted(places, index.starts[1:-1]))):
                keys, kept = index.keys(number), kept - index.starts[number]
                yield index.shards[number], index.records_of(number)[kept], [keys[place] for place in kept]

        dropped = {setting: count for setting, count in dropped.items() if count}
        selected = write_index(open_folder(folders, index.locations[0]), index.locations, name, rows(), dropped)
    reasons = ", ".join(f"{count:,} by data.{setting}" for setting, count in selected.dropped.items()) or "none"
    if not selected.samples:
        raise ConfigError(f"no sample of {number_of(index.samples, 'sample')} is selected: {reasons} are left out")
    say(f"data: {selected.samples:,} of {number_of(index.samples, 'sample')} are selected; left out: {reasons}")
    return selected


def weigh(weights: str, reader: ShardReader, index: ShardIndex, folders: Sequence[Path]) -> Weights:
    """Return the weights of the samples of a source, from a file next to its index.

    weights: a key or column, or a .npy or .parquet with uid and weight; samples without one have the weight 0. Weights
    above 1 are divided by the number of passes. Raises ConfigError if a weight is not a number of at least 0.
    """
    facts = (index.fingerprint, weights_digest(weights), reader.rules.uid_key)
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    files = [folder / f"{name}-weights.npy" for folder in folders]
    if (file := next(filter(Path.is_file, files), None)) is None:
        by_uid: tuple[np.ndarray, np.ndarray] | None = None
        if (path := Path(weights)).suffix in WEIGHT_FILES:
            try:
                with io.readable(path, io.ANY_SIZE) as stream:
                    if path.suffix == ".npy":
                        table = np.load(stream, allow_pickle=False)
                        columns = {column: table[column] for column in ("uid", "weight")}
                    else:
                        from pyarrow import parquet

                        columns = parquet.read_table(stream, columns=["uid", "weight"]).to_pydict()
                uids = np.array([digest(str(uid)) for uid in columns["uid"]], np.uint64)
                order = np.argsort(uids, kind="stable")
                by_uid = uids[order], np.asarray(columns["weight"], float)[order]
                if len(repeated := np.flatnonzero(np.diff(by_uid[0]) == 0)):
                    raise ValueError(f"uid {columns['uid'][order[repeated[0]]]} is in several rows")
                if not len(uids):
                    raise ValueError("it has no rows")
            except (ValueError, LookupError, TypeError, EOFError, arrow().ArrowException) as error:
                reason = first_line(error)
                raise ConfigError(f"data.weights={path} needs uid and weight in every row: {reason}") from None
        values = np.concatenate(of_shards(partial(_weights_of, index, weights, reader, by_uid), index))
        if not (values >= 0).all() or not 0 < values.sum() < np.inf:
            raise ConfigError(
                f"data.weights={weights}: weights must be numbers of at least 0, one of them above 0; those of "
                f"{number_of(len(values), 'sample')} are from {values.min()} to {values.max()}"
            )
        # Rounded down, so that no sample is taken twice in a pass. The units are those of a whole number of rows.
        passes = int(np.ceil(values.max()))
        rows = max(1, int(values.sum() / passes + 1e-6))
        units = np.minimum(values * (rows * UNIT / values.sum()), UNIT).astype(np.int64)
        units[np.flatnonzero((values > 0) & (units < UNIT))[: rows * UNIT - int(units.sum())]] += 1
        file = open_folder(folders, index.locations[0]) / files[0].name
        with io.whole(file) as target:
            np.save(target, np.concatenate([[passes], units]).astype(np.int32))
    try:
        stored = np.load(file, mmap_mode="r")
        units = stored[1:].reshape(index.samples)
    except (ValueError, EOFError) as error:
        raise io.DamagedFileError(file, f"does not hold the weights ({first_line(error)})", "remove it") from None
    sums = np.array([units[first:end].sum(dtype=np.int64) for first, end in pairwise(index.starts)])
    return Weights(units, sums, int(stored[0]))


def names_in(where: str) -> tuple[str, ...]:
    """Return all words of a condition that may be names of columns."""
    return tuple(dict.fromkeys(quoted or word for quoted, word in re.findall(r'"([^"]+)"|\b([^\W\d]\w*)', where)))


def fingerprint(indexes: Sequence[ShardIndex], sources: Sequence[Source], window: int, *others: str | None) -> str:
    """Return a digest of the shards' names and samples, of the settings of their order, and of other files."""
    facts = [(index.fingerprint, source.weight) for index, source in zip(indexes, sources, strict=True)]
    return hashlib.sha256(repr((facts, window, *filter(None, others))).encode()).hexdigest()


def weights_digest(weights: str | None) -> str | None:
    """Return a text that identifies the sample weights of `data.weights`."""
    if weights is None:
        return None
    return f"weights {io.digest_of(Path(weights)) if Path(weights).suffix in WEIGHT_FILES else weights}"


def stored_fingerprint(data: Mapping[str, Any], run: Path) -> str | None:
    """Return the fingerprint of a `data` node's dataset from its index, which `run` may hold; None if outdated."""
    if data["_target_"] != DATASET:
        return None
    rules: Rules = TarRules(data["caption_key"])
    if data.get("path") is not None:
        rules = TableRules(data["format"], data["image_key"], data["caption_key"], data["uid_key"])
    sources, indexes = rules.sources(data[rules.setting.removeprefix("data.")]), []
    names = ("where", "uids", "duplicates", "fraction", "selection_seed", "uid_key")
    selection = Selection(*map(data.get, names))
    for source in sources:
        folders = index_folders(source.shards, data["index_folder"], run)
        index = load(index_name(source.shards, rules), source.shards, folders)
        with suppress(OSError):
            # Another dataset may have shards of the same names.
            if index and states(source.shards, rules.is_table) == [shard.state for shard in index.shards]:
                if not selection.is_empty:
                    index = load(selection.name(index), source.shards, folders)
                indexes += [index] if index else []
    if len(indexes) < len(sources):
        return None
    joined, weights = data.get("caption_table"), weights_digest(data.get("weights"))
    return fingerprint(indexes, sources, data["shuffle_window"], joined and io.digest_of(Path(joined)), weights)


def _weights_of(
    index: ShardIndex, weights: str, reader: ShardReader, by_uid: tuple[np.ndarray, np.ndarray] | None, number: int
) -> np.ndarray:
    """Return the weights of the samples of a shard, [count]. by_uid: sorted digests of uids, and their weights."""
    values, keys = np.zeros(index.counts[number]), index.keys(number)
    for position in range(len(values)):
        value = None
        with suppress(BadSampleError):
            sample = reader.sample(index, number, position)
            value = sample.value(weights) if by_uid is None else sample.uid(reader.rules.uid_key) or keys[position]
        try:
            values[position] = value or 0 if by_uid is None else 0
        except (TypeError, ValueError):
            raise ConfigError(f"data.weights={weights} is {value!r:.60} in {index.locations[number]}") from None
        if by_uid is not None and value is not None:
            uids, listed = by_uid
            place = min(int(uids.searchsorted(np.uint64(digest(value)))), len(uids) - 1)
            values[position] = listed[place] if uids[place] == digest(value) else 0
    return values


def _examine(
    index: ShardIndex, selection: Selection, reader: ShardReader, uids: np.ndarray | None, number: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return for the samples of a shard, [count] each: where, uids, digests of images, digests of keys."""
    count, keys = int(index.counts[number]), list(index.keys(number))
    passing, listed = np.ones((2, count), bool)
    images, order = np.zeros((2, count), np.uint64)
    if selection.where is not None and count:
        pa, names, location = arrow(), names_in(selection.where), index.locations[number]
        rows, duckdb = np.arange(count), imported("duckdb", "data.where needs", "tables")
        try:
            table = reader.rules.columns(reader.cache, location, index.shards[number].state, names)
            if table is not None:
                rows = index.records_of(number)["image_offset"].astype(np.int64) - 1
            else:
                samples = [reader.sample(index, number, position) for position in range(count)]
                table = pa.table({name: pa.array([sample.value(name) for sample in samples]) for name in names})
            # The condition comes from the user's configuration; it can read nothing but the rows.
            connection = duckdb.connect(config={"enable_external_access": "false", "threads": "1"})
            connection.register("rows", table.append_column(_ROW, pa.array(np.arange(len(table)))))
            passed = connection.execute(f"SELECT {_ROW} FROM rows WHERE ({selection.where})").fetchnumpy()[_ROW]
        except (pa.ArrowException, duckdb.Error, BadSampleError, ValueError) as error:
            reason = " ".join(str(error).partition("LINE 1")[0].split())
            raise ConfigError(f"data.where={selection.where!r} cannot be applied to {location}: {reason}") from None
        passing = np.isin(rows, passed)
    for position, key in enumerate(keys if selection != Selection(where=selection.where) else ()):
        if selection.fraction is not None:
            order[position] = digest(f"{selection.seed or 0} {index.shards[number].name.rpartition('.')[0]} {key}")
        with suppress(BadSampleError):
            sample = reader.sample(index, number, position)
            if uids is not None and not reader.rules.is_table:
                keys[position] = sample.uid(selection.uid_key) or key
            if selection.duplicates in ("image", "pair"):
                content = sample.image()
                if selection.duplicates == "pair":
                    content += index.records_of(number)["caption"][position].tobytes()
                images[position] = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    if uids is not None and count:
        values = np.array(keys, str)
        if uids.dtype == _PAIRS:
            # A key that is not 32 hexadecimal digits becomes 0, which DataComp does not use as a uid.
            digits = [key if len(key) == 32 and set(key) <= set("0123456789abcdef") else "0" for key in keys]
            values = np.array([divmod(int(digit, 16), 2**64) for digit in digits], _PAIRS)
        listed = uids[np.minimum(np.searchsorted(uids, values), len(uids) - 1)] == values
    return passing, listed, images, order
