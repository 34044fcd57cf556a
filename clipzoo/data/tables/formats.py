"""Tables and image folders as sources: a file, or a part of a Parquet file, is a shard, a row is a sample.

The rows of a shard are Arrow record batches. Arrow files are memory-mapped as they are. Other tables are decoded once
into an Arrow file with the columns that training reads, a local copy in the same cache as those of remote shards.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, pairwise, product
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from clipzoo import io
from clipzoo.config.vocabulary import CaptionKeys, TableFormat
from clipzoo.data.captions import StoredSample, caption_keys, decoded, digest
from clipzoo.data.faults import BadSampleError
from clipzoo.data.images import LARGEST_FILE, read_image_file
from clipzoo.data.locations import (
    ShardCache,
    Shards,
    Source,
    State,
    files_below,
    is_remote,
    parse_sources,
    piece,
    states,
)
from clipzoo.data.tar import IMAGE_EXTENSIONS, RECORD, Scan, TarRules
from clipzoo.errors import ConfigError, TrainingError, first_line, imported

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS: dict[str, TableFormat] = {
    ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow",
    ".feather": "arrow",
}  # fmt: skip
"""Formats of tables by file extension."""
IMAGE_NAMES = (
    "image", "jpg", "png", "webp", "image_bytes", "bytes", "image_path", "filepath", "file_path", "path", "file_name",
    "filename", "file", "img", "photo",
)  # fmt: skip
CAPTION_NAMES = ("caption", "captions", "txt", "text", "title", "description", "alt_text", "sentence")
UID_NAMES = ("uid", "key", "__key__", "id", "sample_id")
"""Names of columns that are found without data.image_key, data.caption_key and data.uid_key, the first one first."""
JSON, TXT = ".json", ".txt"
"""Columns with the text of a .json and of a .txt."""
_ROWS = 256
"""Rows of a record batch of a copy."""
_SHARD_ROWS = 10_000
"""Rows of a shard of a Parquet file that has more, if its row groups allow it."""
_CHECKED = 16
"""Rows of a table whose image files are looked for when it is indexed."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class TableRules:
    """How the rows of tables are read.

    format: None to find it from the file. image_key, caption_key, uid_key: names of columns; None for the first one
    with a usual name. image_folder: of relative paths; None for the table's. further_keys: other columns to keep.
    """

    format: TableFormat | None = None
    image_key: str | None = None
    caption_key: CaptionKeys | None = None
    uid_key: str | None = None
    image_folder: str | None = None
    further_keys: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    setting: ClassVar[str] = "data.path"
    is_table: ClassVar[bool] = True

    def format_of(self, location: str) -> TableFormat:
        """Return the format of a file or folder. Raises ConfigError if its name does not tell."""
        by_name = "folder" if os.path.isdir(location) else FORMATS.get(Path(location).suffix.lower())
        if self.format is None and by_name is None:
            raise ConfigError(f"data.path: the name of {location} does not tell its format: give data.format")
        return self.format or by_name  # type: ignore[return-value]

    def sources(self, path: Shards) -> list[Source]:
        """Return the sources of `data.path`; see `parse_sources`. Parquet of many rows is several shards."""
        try:
            sources = parse_sources(path, self.files)
        except ConfigError as error:
            raise ConfigError(str(error).replace("data.shards", "data.path")) from None
        with ThreadPoolExecutor(16) as pool:
            return [Source(tuple(chain(*pool.map(self._parts, shards))), weight) for shards, weight in sources]

    def _parts(self, location: str) -> list[str]:
        """Return parts of about _SHARD_ROWS rows of a local Parquet file, cut at row groups; another file as it is."""
        if not is_remote(location) and self.format_of(location) == "parquet":
            arrow()
            from pyarrow import parquet

            with suppress(OSError, ValueError):  # a missing or torn file, which is reported when it is indexed
                facts, (name, extension) = parquet.read_metadata(location), os.path.splitext(location)
                ends = np.cumsum([facts.row_group(number).num_rows for number in range(facts.num_row_groups)])
                parts = max(1, round(facts.num_rows / _SHARD_ROWS))
                cuts = np.unique(ends.searchsorted(np.arange(parts) * facts.num_rows / parts, side="right")).tolist()
                if len(cuts) > 1:
                    return [f"{name}#groups{first}-{end}{extension}" for first, end in pairwise([*cuts, len(ends)])]
        return [location]

    def files(self, path: str) -> list[str] | None:
        """Return the tables of a local folder, the folder itself if it holds images; None if `path` is no folder.

        A folder written by Hugging Face's `save_to_disk` is read in the order of its state.json.
        """
        folder = Path(path).expanduser().absolute()
        if not folder.is_dir():
            return None
        if (folder / "dataset_dict.json").is_file():
            splits = ", ".join(sorted(state.parent.name for state in folder.glob("*/state.json")))
            raise ConfigError(f"data.path={path} has several splits: give the folder of one of them ({splits})")
        if (folder / "state.json").is_file():
            state = io.read_json(folder / "state.json", 64 * io.MB, fields={"_data_files": list})
            if state.get("_indices_files") or state.get("_indices_data_files"):
                raise ConfigError(f"data.path={path} selects rows by an index: save it after flatten_indices()")
            return [str(io.below(folder, entry["filename"], links=True)) for entry in state["_data_files"]]
        tables = [str(path) for path in sorted(folder.iterdir()) if path.suffix.lower() in FORMATS]
        formats = {self.format_of(path): path for path in tables if self.format != "folder"}
        if len(formats) > 1:
            raise ConfigError(
                f"data.path={path} has tables of several formats ({', '.join(formats)}): give their files"
            )
        return tables if formats else [str(folder)]

    @property
    def identity(self) -> str:
        """Text that differs if an index differs."""
        return repr(replace(self, image_folder=None, further_keys=()))

    def needs_copy(self, location: str) -> bool:
        """Return True if `open` reads a local copy of the table."""
        return is_remote(location) or self.format_of(location) != "arrow"

    def scan(self, cache: ShardCache, state: State | None, location: str) -> Scan:
        """List the samples of a table; a record holds the number of the row + 1 as offset of the image.

        Raises ConfigError if a column is missing, or if none of the first image files can be read.
        """
        if state is not None and state[0] <= 0:
            return Scan("empty" if state[0] == 0 else "missing")
        try:
            table = self.open(cache, location, state or (0, 0), columns=self.further_keys or [JSON])
        except BadSampleError as error:
            return Scan(str(error))
        records, keys = np.zeros(len(table), RECORD), []
        records["image_offset"] = np.arange(1, len(table) + 1)
        for row, record in enumerate(records):
            sample = TableSample(table, row)
            record["caption"] = sample.digest(self.caption_key)
            keys.append((sample.uid(self.uid_key) or f"{row:09d}").replace("\0", " "))
        checked = range(0, len(table), max(1, len(table) // _CHECKED)) if table.has_images else ()
        failures = list[BadSampleError]()
        for row in checked:
            try:
                TableSample(table, row).image()
            except BadSampleError as error:
                failures.append(error)
        if failures and len(failures) == len(checked):
            raise ConfigError(
                f"{location}: none of {len(failures)} images that were looked for can be read. First: {failures[0]}. "
                f"Paths in {table.names.image!r} (data.image_key) are relative to {table.folder} (data.image_folder)"
            )
        return Scan(None, records, keys, state[0] if state else 0)

    def columns(self, cache: ShardCache, location: str, state: State, names: Sequence[str]) -> pa.Table | None:
        """Return the rows with columns of these names, without images' bytes; None if they are in a .json."""
        table = self.open(cache, location, state, columns=names)
        return None if table.has_json else table.rows.drop_columns([] if table.has_paths else [table.names.image])

    def sample(self, opened: OpenTable, record: np.void) -> StoredSample:
        """Return the sample of a record of `scan`."""
        return TableSample(opened, int(record["image_offset"]) - 1)

    def open(
        self, cache: ShardCache, location: str, state: State, size: int = 0, columns: Sequence[str] = ()
    ) -> OpenTable:
        """Return an open table, from its copy unless it is an Arrow file. Raises BadSampleError if it is damaged.

        state: of the file when it was indexed. columns: further names; then without images' bytes or copies of Parquet.
        """
        form = self.format_of(location)
        try:
            if form == "arrow" or (columns and form == "parquet"):
                return OpenTable(self, location, list(self._batches(cache, location, state, columns)))

            def write(target: IO[bytes]) -> None:
                batches = self._batches(cache, location, state)
                if (first := next(batches, None)) is not None:
                    with arrow().ipc.new_file(target, first.schema) as writer:
                        for batch in chain([first], batches):
                            writer.write_batch(batch)

            facts = hashlib.sha256(repr((location, state, self.identity, self.further_keys)).encode()).hexdigest()
            name = f"{facts[:16]}-{Path(location).stem[-50:]}.arrow".replace(" ", "_")
            with os.fdopen(cache.copy(name, write, lambda size: True), "rb") as file:
                return OpenTable(self, location, list(_mapped(file)))
        except (BadSampleError, ConfigError, TrainingError):
            raise
        # pyarrow's errors are OSError, ValueError, or have bases of their own.
        except Exception as error:
            kind = "shard_missing" if isinstance(error, FileNotFoundError) else "shard_unreadable"
            raise BadSampleError(kind, f"not readable as {form}: {first_line(error)}") from error

    def _batches(
        self, cache: ShardCache, location: str, state: State, columns: Sequence[str] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a table. Arguments as in `open`."""
        pa, form = arrow(), self.format_of(location)
        if form == "folder":
            files = set(files_below(Path(location)))
            images = sorted(name for name in files if name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS)
            for first in range(0, len(images), _ROWS):
                names_of_images = images[first : first + _ROWS]
                texts: dict[str, list[bytes | None]] = {name: [None] * len(names_of_images) for name in (TXT, JSON)}
                for extension, (row, image) in product(texts, enumerate(names_of_images)):
                    if (name := image.rpartition(".")[0] + extension) in files:
                        with suppress(io.DamagedFileError):
                            path = io.below(Path(location), name, links=True)
                            texts[extension][row] = io.read_bytes(path, 16 * io.MB)
                columns_of_texts = {name: pa.array(values, pa.binary()) for name, values in texts.items()}
                yield pa.record_batch({IMAGE_NAMES[0]: pa.array(names_of_images, pa.string()), **columns_of_texts})
            return
        file_of_rows, groups = piece(location)
        with os.fdopen(cache.open(file_of_rows, size=state[0]), "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) != state[0] and not is_remote(location):
                raise BadSampleError("shard_changed", f"{location} has {size} bytes, {state[0]} when it was indexed")
            if form == "arrow":
                yield from _mapped(file)
            elif form == "jsonl":
                lines = (line for line in file if line.strip())
                while part := list(islice(lines, _ROWS)):
                    yield pa.record_batch({JSON: pa.array(part, pa.binary())})
            elif form == "parquet":
                from pyarrow import parquet

                with parquet.ParquetFile(file, pre_buffer=False) as source:
                    schema = source.schema_arrow
                    names = find_names(self, schema.names, location)
                    kept, numbers = names.kept, [*(groups or range(source.num_row_groups))]
                    if light := bool(columns) and not _is_text(schema.field(names.image).type):
                        kept.remove(names.image)
                    for batch in source.iter_batches(_ROWS, row_groups=numbers, columns=kept, use_threads=False):
                        yield batch.append_column(names.image, pa.nulls(len(batch))) if light else batch
            elif form in ("csv", "tsv"):
                from pyarrow import csv

                rows = csv.ParseOptions(delimiter="\t" if form == "tsv" else ",", newlines_in_values=True)
                header = csv.open_csv(file, csv.ReadOptions(use_threads=False), rows).schema.names
                file.seek(0)
                names, keys = find_names(self, header, location), caption_keys(self.caption_key)
                types = {name: pa.string() for name in (names.image, names.caption, names.uid, *keys) if name}
                options = csv.ConvertOptions(column_types=types, include_columns=names.kept)
                yield from csv.read_csv(file, csv.ReadOptions(use_threads=False), rows, options).to_batches(_ROWS)


def _mapped(file: IO[bytes]) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an Arrow file or stream, which is memory-mapped."""
    pa = arrow()
    if os.fstat(file.fileno()).st_size:
        content = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if content[:6].to_pybytes() == b"ARROW1":
            reader = pa.ipc.open_file(content)
            yield from map(reader.get_batch, range(reader.num_record_batches))
        elif content[-8:].to_pybytes() != _END_OF_STREAM:
            raise pa.ArrowInvalid("truncated: no end-of-stream mark")
        else:
            yield from pa.ipc.open_stream(content)


Rules = TarRules | TableRules
"""How shards are read: the tars of data.shards, or the tables of data.path."""


def holds_tables(path: str | Path) -> bool:
    """Return True for a table or pattern of tables, and for a local folder of tables or images without tars."""
    if not os.path.isdir(path) or any(Path(path).glob("*.tar")):
        return Path(path).suffix.lower() in FORMATS
    endings = {*FORMATS, *(f".{extension}" for extension in IMAGE_EXTENSIONS)}
    return any(Path(name).suffix.lower() in endings for name in files_below(Path(path)))


class Names(NamedTuple):
    """Columns of a table. caption: that of data.caption_key=null. kept: all columns that samples need."""

    image: str
    caption: str | None
    uid: str | None
    kept: list[str]


def find_names(rules: TableRules, present: Sequence[str], location: str) -> Names:
    """Find the columns among those that are present. Raises ConfigError if one is missing."""
    keys = caption_keys(rules.caption_key)
    wanted = [("image_key", rules.image_key, IMAGE_NAMES), ("uid_key", rules.uid_key, UID_NAMES)]
    without_key = None in keys and TXT not in present
    if without_key:
        wanted.append(("caption_key", None, CAPTION_NAMES))
    wanted += [("caption_key", key, ()) for key in keys if key is not None and JSON not in present]
    usual_names, found = {name.lower(): name for name in reversed(present)}, dict[str, str | None]()
    for setting, name, usual in wanted:
        column = name or next((usual_names[choice] for choice in usual if choice in usual_names), None)
        if column not in present and column not in rules.joined and (setting, column) != ("uid_key", None):
            name = "with a usual name" if column is None else repr(column)
            raise ConfigError(f"{location} has no column {name} (data.{setting}), but: {', '.join(present)}")
        found.setdefault(setting, column)
    names = [*found.values(), *keys, *rules.further_keys]
    kept = list(dict.fromkeys(name for name in names if name is not None and name in present))
    return Names(str(found["image_key"]), found["caption_key"] if without_key else None, found["uid_key"], kept)


class OpenTable:
    """An open table with random access. Raises ConfigError if its columns do not suffice."""

    def __init__(self, rules: TableRules, location: str, batches: list[pa.RecordBatch]) -> None:
        if not batches:
            raise ValueError("it has no rows")
        self.rows = arrow().Table.from_batches(batches)
        self.columns = dict(zip(self.rows.column_names, self.rows.columns, strict=True))
        self.has_json = JSON in self.columns
        self.folder = Path(location if os.path.isdir(location) else rules.image_folder or Path(location).parent)
        present = list(self.columns)
        if self.has_json:
            # The first row that is an object tells the names.
            texts = self.columns[JSON].chunk(0).to_pylist()
            entries = (entry for text in texts if text and isinstance(entry := _parsed(text), dict))
            if not (first := next(entries, {})) and TXT not in self.columns:
                raise ValueError("none of its first rows is a JSON object")
            present += first
        self.names = find_names(rules, present, location)
        images = self.columns.get(self.names.image)
        self.has_paths = images is None or _is_text(images.type)
        if self.has_paths and is_remote(location) and rules.image_folder is None:
            raise ConfigError(f"{location} has paths of images, which are read from disks: give data.image_folder")
        self.has_images = images is None or self.has_paths or not arrow().types.is_null(images.type)

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def cell(self, row: int, column: str) -> Any:
        """Return a value; None if the table has no such column."""
        return self.columns[column][row].as_py() if column in self.columns else None


class TableSample(StoredSample):
    """A row of a table; see `StoredSample`. Its .json is the row, or the row's own."""

    def __init__(self, table: OpenTable, row: int) -> None:
        self._table, self._row = table, row

    def image(self) -> bytes:
        table = self._table
        image = table.cell(self._row, table.names.image)
        if image is None and table.has_json and isinstance(self._entry, dict):
            image = self._entry.get(table.names.image)
        if isinstance(image, dict):
            # Hugging Face's feature Image.
            image = image.get("path") if image.get("bytes") is None else image["bytes"]
        if isinstance(image, bytes):
            if len(image) > LARGEST_FILE:
                raise BadSampleError("enormous_file", f"the image has {len(image):,} bytes")
            return image
        if not isinstance(image, str) or not image:
            raise BadSampleError("missing_image", f"{table.names.image} is {image!r:.80}, neither bytes nor a path")
        if is_remote(image):
            raise BadSampleError("remote_image", f"{image:.80} is not a file: download the images, as img2dataset does")
        try:
            name = image.removeprefix(f"{table.folder}".rstrip("/") + "/")
            return read_image_file(io.below(table.folder, name, links=True))
        except io.DamagedFileError as error:
            raise BadSampleError("unsafe_path", f"{error.fault}; see data.image_folder") from None

    def _text(self) -> Any:
        name = self._table.names.caption
        if name is not None:
            return self._value(name, "caption")
        text = self._table.cell(self._row, TXT)
        if text is None:
            raise BadSampleError("missing_caption", "no .txt next to the image")
        return decoded(text)

    def uid(self, key: str | None) -> str | None:
        return super().uid(key or self._table.names.uid)

    @cached_property
    def _entry(self) -> Any:
        table = self._table
        if not table.has_json:
            names = [name for name in table.names.kept if name != table.names.image or table.has_paths]
            return {name: table.cell(self._row, name) for name in names}
        text = table.cell(self._row, JSON)
        if text is None:
            return {}
        entry = _parsed(text)
        if entry is None:
            raise BadSampleError("bad_json", f"row {self._row} is not JSON: {text!r:.60}")
        return entry


class JoinedTable:
    """Values of other tables by uid, for the keys that samples lack. columns: those of `keys` that the tables have.

    path: as data.path. uid_key: None for "uid". Raises ConfigError if a uid occurs twice, or for no such column.
    """

    def __init__(self, path: str, keys: Sequence[str], uid_key: str | None, cache: ShardCache) -> None:
        # The uids take the place of the images.
        rules = TableRules(None, uid_key or "uid", list(keys), None, None, (), tuple(keys))
        locations = [location for source in rules.sources(path) for location in source.shards]
        try:
            opened = zip(locations, states(locations), strict=True)
            self._tables = [rules.open(cache, location, state or (0, 0)) for location, state in opened]
        except BadSampleError as error:
            raise ConfigError(f"data.caption_table={path}: {error}") from None
        self.columns = tuple(dict.fromkeys(key for table in self._tables for key in table.names.kept if key in keys))
        if not self.columns:
            raise ConfigError(f"data.caption_table={path} has no column of the caption keys {', '.join(keys)}")
        self._samples = np.cumsum([0, *map(len, self._tables)])
        uids = [TableSample(table, row).uid(rules.image_key) for table in self._tables for row in range(len(table))]
        digests = np.array([digest(uid or "") for uid in uids], np.uint64)
        self._rows = np.argsort(digests, kind="stable")
        self._digests = digests[self._rows]
        if len(repeated := np.flatnonzero(self._digests[1:] == self._digests[:-1])):
            uid = uids[self._rows[repeated[0]]]
            raise ConfigError(f"data.caption_table={path} has the {rules.image_key} {uid!r} more than once")
        self.digest = io.digest_of(*dict.fromkeys(Path(piece(location)[0]) for location in locations))

    def value(self, uid: str, key: str) -> Any:
        """Return the value of a column for a uid; None without one."""
        place = int(self._digests.searchsorted(np.uint64(digest(uid))))
        if place == len(self._digests) or self._digests[place] != digest(uid):
            return None
        row = int(self._rows[place])
        table = int(self._samples.searchsorted(row, side="right")) - 1
        return TableSample(self._tables[table], row - int(self._samples[table])).value(key)


def _is_text(kind: pa.DataType) -> bool:
    return arrow().types.is_string(kind) or arrow().types.is_large_string(kind)


def _parsed(text: bytes) -> Any:
    """Return the content of a JSON text, None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def arrow() -> Any:
    """Return pyarrow. Raises ConfigError if it is not installed."""
    return imported("pyarrow", "tables need", "tables")
