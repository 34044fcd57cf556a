"""Checkpoints on the disk, written completely or not at all, in one file or in one file for each rank.

    step_00001234.pt          tensors and plain values as torch.save writes them, or a folder with
    step_00001234/rank_00000.safetensors ...      the parts of the ranks, and
    step_00001234/manifest.json                   plain values, places of tensors in the files, digests:

        state: nested mappings and lists as they were saved; {"__tensor__": NAME} represents a tensor
        tensors: NAME -> {"dtype", "shape", "chunks": [[offsets, sizes, file], ...]}
        files: file -> {"bytes", "sha256"}

    step_00001234.json        written last: size and SHA-256 of the file or of the manifest, and a few facts

The .json file marks the checkpoint as complete. After a kill or on a full disk, previous checkpoints remain valid
(`clipzoo.io.whole`). Any number of ranks reads the parts of a sharded checkpoint that it needs; a tensor that all ranks
hold is written by one of them, and ranks share this work evenly. Nothing in a checkpoint is executed when it is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from clipzoo import io
from clipzoo.distributed.world import gather_objects, outcome_of
from clipzoo.io import shortened
from clipzoo.io.weights import MANIFEST, checkpoints_in, is_sharded, mark_of, read_tensors, require_bounded, step_of

VERSION = 1
"""Version of the manifest's format."""
TENSOR, TUPLE, ITEMS = "__tensor__", "__tuple__", "__items__"
"""Keys of mappings that represent what JSON lacks: a tensor, a tuple, a mapping whose keys are not text."""
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Data types by name, with their names in a .safetensors file."""
MOST_TENSORS = 50_000
"""Largest number of tensors in a manifest."""
SHARD = re.compile(r"rank_\d{5}\.safetensors")
REMEDY = "give another checkpoint of the run"
T = TypeVar("T")
Keys = tuple[str | int, ...]
"""Keys and positions that lead to a value in nested mappings and lists."""
Chunks = dict[tuple[str, tuple[int, ...]], int]
"""Size in bytes of the chunks of tensors that a rank holds, by name and offsets."""
log = logging.getLogger(__name__)


def save(folder: Path, step: int, state: Mapping[str, Any], facts: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint of `step` to one file and keep the newest `keep`. facts: for its mark. Raises WriteError."""
    path = folder / f"step_{step:08d}.pt"
    _on_all_ranks(lambda: write_marked(path, state, {"step": step, **facts}), group=None)
    _remove_old(path, keep)
    return path


def write_marked(path: Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Write a file of tensors and the .json that marks it as complete; return its SHA-256. Raises WriteError."""
    with io.whole(path) as file:
        hashed: Any = HashedFile(file)
        try:
            torch.save(state, hashed)
        except RuntimeError:
            # torch hides the system's error, for example of a full disk.
            if hashed.error is not None:
                raise hashed.error from None
            raise
    stored: dict[str, Any] = hashed.stored()
    io.write_json(mark_of(path), {**facts, **stored})
    return stored["sha256"]


def save_sharded(
    path: Path,
    pieces: Mapping[str, Piece],
    state: Any,
    facts: Mapping[str, Any],
    keep: int,
    rank: int,
    group: ProcessGroup | None,
    written: Callable[[], None] = lambda: None,
) -> None:
    """Write the checkpoint <folder>/step_<step>, then remove older ones until `keep` remain. Collective.

    pieces: this rank's parts of the tensors, on the CPU, by name. state: `encoded` state, of the first rank. facts:
    small values for the .json file. group: process group of all ranks with a CPU backend; None for a single process.
    written: called once this rank's file is on the disk.

    Raises on all ranks: WriteError; ValueError if the pieces of the ranks do not cover a tensor.
    """
    temporary = path.with_name(f".{path.name}.tmp")

    def begin() -> Chunks:
        if rank == 0:
            with io.explained(path):
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
        # Pieces that are empty although their tensor is not are left out.
        return {
            (name, place.offsets): part.nbytes
            for name, (part, place) in pieces.items()
            if part.numel() or not math.prod(place.whole)
        }

    chunks = _on_all_ranks(begin, group)

    def write() -> dict[str, Any]:
        shard = _write_shard(temporary, rank, pieces, chunks)
        written()
        return shard

    shards = _on_all_ranks(write, group)

    def publish() -> None:
        tensors: dict[str, Any] = {}
        for name, entry in (item for shard in shards for item in shard["tensors"].items()):
            tensors.setdefault(name, {**entry, "chunks": []})["chunks"] += entry["chunks"]
        files = {name: stored for shard in shards for name, stored in shard["files"].items()}
        for name, entry in tensors.items():
            _stored_tensor(name, entry, files)
        content = {"format": VERSION, "state": state, "tensors": tensors, "files": files}
        text = json.dumps(content, separators=(",", ":"))
        io.write_whole(temporary / MANIFEST, text)
        with io.explained(path):
            _remove(path)
        io.publish_folder(temporary, path)
        io.write_json(mark_of(path), {**facts, "bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()})
        _remove_old(path, keep)

    _on_all_ranks(publish if rank == 0 else lambda: None, group)


def newest(folder: Path, at_most: int | None = None) -> Path | None:
    """Return the newest valid checkpoint of at most `at_most` steps, or None. Invalid ones are named in the log."""
    for path in reversed(checkpoints_in(folder)):
        if at_most is not None and step_of(path) > at_most:
            continue
        reason = _fault(path)
        if reason is None:
            return path
        log.warning("checkpoint %s is not used: %s", path, reason)
    return None


def load_newest(folder: Path) -> tuple[dict[str, Any], Path] | None:
    """Return the content of the newest valid checkpoint, on the CPU, and its path."""
    path = newest(folder)
    return None if path is None else (read(path, verified=True), path)


def read(
    path: Path,
    *parts: str,
    layout: Layout | None = None,
    without: Collection[str] = (),
    verified: bool = False,
    mapped: bool = False,
) -> dict[str, Any]:
    """Return a checkpoint's content, on the CPU.

    parts: keys that it must have. layout: the parts of tensors that this rank needs; None for whole tensors. without:
    keys to leave out. verified: the digests of the shards have been checked. mapped: see `read_tensors`.

    Raises DamagedFileError if a file is missing or damaged, or holds objects other than tensors and plain values.
    """
    if is_sharded(path):
        if not verified:
            _require_digests(path)
        content = _read_sharded(path, layout, without)
    else:
        content = {key: value for key, value in read_tensors(path, REMEDY, mapped).items() if key not in without}
        if layout is not None:
            content = map_tensors(
                content, lambda keys, tensor: tensor[layout(keys, tuple(tensor.shape)).slices].clone()
            )
    if not content.keys() >= set(parts):
        raise io.DamagedFileError(path, f"holds no {' and '.join(parts)}", REMEDY)
    return content


def _on_all_ranks(action: Callable[[], T], group: ProcessGroup | None) -> list[T]:
    """Run `action` on every rank and return the results in rank order; an error of one rank is raised on all."""
    outcome: tuple[Any, Exception | None] = outcome_of(action)
    outcomes = [outcome] if group is None else gather_objects(outcome, group)
    failures = [failure for _, failure in outcomes if failure is not None]
    for failure in failures:
        if isinstance(failure, io.WriteError):
            raise io.WriteError(f"{failure}. Earlier checkpoints are untouched") from None
    if failures:
        raise failures[0]
    return [result for result, _ in outcomes]


def _remove_old(path: Path, keep: int) -> None:
    """Remove checkpoints before `path`, except the newest `keep` - 1 complete ones. Later ones will be overwritten."""
    others = [other for other in checkpoints_in(path.parent) if other != path]
    earlier = [other for other in others if step_of(other) < step_of(path)]
    complete = [other for other in [*earlier, path] if mark_of(other).exists()]
    for old in earlier:
        if old not in complete[-keep:]:
            _remove(old)
    # This step may also exist in the other format; its mark now belongs to `path`.
    twins = [other for other in others if step_of(other) == step_of(path)]
    for leftover in [*twins, *path.parent.glob(".step_*.tmp")]:
        _remove(leftover, with_mark=False)


def _remove(path: Path, with_mark: bool = True) -> None:
    """Remove a checkpoint, its mark first: after an interruption, the rest counts as incomplete."""
    if with_mark:
        mark_of(path).unlink(missing_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _fault(path: Path) -> str | None:
    """Return the reason why a checkpoint is invalid, None if it is valid."""
    mark = mark_of(path)
    file, name = (path / MANIFEST, f"{MANIFEST}: ") if is_sharded(path) else (path, "")
    if not mark.exists():
        return f"it is incomplete (there is no {mark.name})"
    try:
        content = io.read_json(mark, io.MB, fields={"bytes": int, "sha256": str})
        if not file.is_file():
            return f"{name}it is missing"
        if file.stat().st_size != content["bytes"]:
            return f"{name}it has {file.stat().st_size} bytes, {mark.name} says {content['bytes']}"
        if io.digest_of(file) != content["sha256"]:
            return f"{name}its SHA-256 differs from the one in {mark.name}"
        if is_sharded(path):
            _require_digests(path)
    except io.DamagedFileError as error:
        return f"{error.path.name} {error.fault}"
    return None


def _require_digests(path: Path) -> None:
    """Raise DamagedFileError unless the shards of a checkpoint have the digests in its manifest."""
    _, _, files = _read_manifest(path)
    with ThreadPoolExecutor(max_workers=8, thread_name_prefix="digest") as threads:
        digests = threads.map(lambda name: io.digest_of(io.below(path, name)), files)
        for (name, stored), digest in zip(files.items(), digests, strict=True):
            if digest != stored["sha256"]:
                fault = f"is damaged (its SHA-256 differs from the one in {MANIFEST})"
                raise io.DamagedFileError(io.below(path, name), fault, REMEDY)


# --- Parts of tensors ---


@dataclass(frozen=True)
class Place:
    """A box in a tensor of shape `whole`: `sizes` entries from `offsets` on, in every dimension."""

    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def everything(cls, shape: Sequence[int]) -> Place:
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Return the place of this rank's part: of a DTensor, or of a tensor that is whole on every rank."""
        if not is_dtensor(tensor):
            return cls.everything(tensor.shape)
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        return cls(tuple(tensor.shape), tuple(chunk.offsets), tuple(chunk.sizes))

    @property
    def ends(self) -> list[int]:
        return [start + size for start, size in zip(self.offsets, self.sizes, strict=True)]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.offsets, self.ends))

    def key(self, name: str) -> str:
        """Return the key of this chunk in its file: the tensor's name, and the offsets unless all are 0."""
        return f"{name}@{','.join(map(str, self.offsets))}" if any(self.offsets) else name


Piece = tuple[Tensor, Place]
"""This rank's part of a tensor, and its place."""
Layout = Callable[[Keys, tuple[int, ...]], Place]
"""Function of the path and the whole shape of a stored tensor -> the part of it that this rank needs."""


StoredTensor = tuple[torch.dtype, tuple[int, ...], list[tuple[Place, str]]]
"""A tensor in a manifest: its data type, its shape, and boxes that cover it, with the files that hold them."""


def is_dtensor(tensor: Tensor) -> bool:
    """Return True for a DTensor. Does not import torch.distributed.tensor, which takes half a second."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor unchanged."""
    part: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return part


def map_tensors(value: Any, change: Callable[[Keys, Tensor], Any], path: Keys = ()) -> Any:
    """Return nested mappings, lists and tuples with `change(path, tensor)` in place of every tensor."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change, (*path, index)) for index, item in enumerate(value))
    return value


def tensors_with_paths(value: Any) -> Iterator[tuple[Keys, Tensor]]:
    """Yield all tensors in nested mappings, lists and tuples, with their paths."""
    pairs: list[tuple[Keys, Tensor]] = []
    map_tensors(value, lambda path, tensor: pairs.append((path, tensor)))
    return iter(pairs)


@torch.no_grad()
def fill(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor], origin: str) -> None:
    """Copy values into the tensors of the same names. Raises RuntimeError for other names. origin: for the message."""
    if tensors.keys() != values.keys():
        raise RuntimeError(f"{origin} has other tensors: {sorted(tensors.keys() ^ values.keys())[:4]}")
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def name_of(path: Keys) -> str:
    """Return the name of a tensor: its path, joined by slashes."""
    return "/".join(map(str, path))


def encoded(value: Any, path: Keys = ()) -> Any:
    """Return nested mappings, lists and tuples of tensors and plain values as JSON can hold them."""
    if isinstance(value, Tensor):
        return {TENSOR: name_of(path)}
    if isinstance(value, Mapping):
        items = [(key, encoded(item, (*path, key))) for key, item in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("__") for key in value)
        return dict(items) if plain else {ITEMS: items}
    if isinstance(value, list | tuple):
        parts = [encoded(item, (*path, index)) for index, item in enumerate(value)]
        return parts if isinstance(value, list) else {TUPLE: parts}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a sharded checkpoint cannot hold {name_of(path)}, a {type(value).__name__}")


def _decoded(value: Any, tensor: Callable[[Keys, str], Any], path: Keys = ()) -> Any:
    """Return the value that was `encoded`. tensor: called with path and name of a tensor. Raises ValueError."""
    if isinstance(value, list):
        return [_decoded(item, tensor, (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        _require(isinstance(value[TENSOR], str), "the name of a tensor is not a string")
        return tensor(path, value[TENSOR])
    if TUPLE in value:
        _require(isinstance(value[TUPLE], list), "a tuple is not a list")
        return tuple(_decoded(value[TUPLE], tensor, path))
    items = value[ITEMS] if ITEMS in value else list(value.items())
    _require(
        isinstance(items, list) and all(len(item) == 2 and isinstance(item[0], str | int) for item in items),
        "a mapping is not a list of keys and values",
    )
    return {key: _decoded(item, tensor, (*path, key)) for key, item in items}


# --- Files of sharded checkpoints ---


class HashedFile:
    """A file that is written sequentially; counts and hashes its bytes. error: the system's error, if any."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._bytes, self._digest = file, 0, hashlib.sha256()
        self.flush = file.flush
        self.error: OSError | None = None

    def write(self, content: bytes | memoryview) -> int:
        try:
            self._file.write(content)
        except OSError as error:
            self.error = error
            raise
        self._digest.update(content)
        self._bytes += len(content)
        return len(content)

    def stored(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def _write_shard(folder: Path, rank: int, pieces: Mapping[str, Piece], held: Sequence[Chunks]) -> dict[str, Any]:
    """Write this rank's share of its pieces; return tensors and files for the manifest. held: chunks of all ranks."""
    # A chunk that several ranks hold is written by the rank with the fewest bytes so far.
    totals, writers = [0] * len(held), {}
    for chunk, size in {chunk: size for chunks in held for chunk, size in chunks.items()}.items():
        writers[chunk] = min((holder for holder, chunks in enumerate(held) if chunk in chunks), key=totals.__getitem__)
        totals[writers[chunk]] += size or 1
    names = [name for name, (_, place) in pieces.items() if writers.get((name, place.offsets)) == rank]
    if not names:
        return {"tensors": {}, "files": {}}
    # Readers need tensors aligned to the size of their entries.
    names.sort(key=lambda name: -pieces[name][0].element_size())
    file = f"rank_{rank:05d}.safetensors"
    header: dict[str, Any] = {}
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        part, place = pieces[name]
        dtype = str(part.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise TypeError(f"a sharded checkpoint cannot hold a tensor of {part.dtype}")
        start, end = end, end + part.nbytes
        header[place.key(name)] = {"dtype": DTYPES[dtype], "shape": place.sizes, "data_offsets": (start, end)}
        entries[name] = {"dtype": dtype, "shape": place.whole, "chunks": [(place.offsets, place.sizes, file)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    # The writer of safetensors returns the file as bytes: it would need the memory of the state once more.
    with io.whole(folder / file) as opened:
        hashed = HashedFile(opened)
        hashed.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            values: Any = pieces[name][0].detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            hashed.write(values)
    return {"tensors": entries, "files": {file: hashed.stored()}}


def _read_sharded(folder: Path, layout: Layout | None, without: Collection[str]) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    stored_state, tensors, _ = _read_manifest(folder)
    # By file: key of a chunk, the part of the chunk that is needed, and the memory for it.
    reads: dict[str, list[tuple[str, tuple[slice, ...], Tensor]]] = defaultdict(list)

    def allocate(path: Keys, name: str) -> Tensor:
        dtype, shape, chunks = tensors[name]
        place = Place.everything(shape) if layout is None else layout(path, shape)
        part = torch.zeros(place.sizes, dtype=dtype)
        for chunk, file in chunks:
            common = list(map(range, map(max, chunk.offsets, place.offsets), map(min, chunk.ends, place.ends)))
            if all(common):
                source, target = (
                    tuple(slice(one.start - at, one.stop - at) for one, at in zip(common, box.offsets, strict=True))
                    for box in (chunk, place)
                )
                reads[file].append((chunk.key(name), source, part[target]))
        return part

    state = {key: value for key, value in stored_state.items() if key not in without}
    content: dict[str, Any] = _decoded(state, allocate)
    for file, parts in reads.items():
        path = io.below(folder, file)
        require_bounded(path, REMEDY)
        try:
            with safe_open(path, framework="pt") as shard:
                for key, source, target in parts:
                    values: Tensor = shard.get_slice(key)[source] if source else shard.get_tensor(key)
                    if values.shape != target.shape or values.dtype != target.dtype:
                        raise OSError(f"{key} has another shape or data type than {MANIFEST} says")
                    target.copy_(values)
        except (SafetensorError, OSError) as error:
            fault = f"is not a .safetensors file with the tensors of its checkpoint ({error})"
            raise io.DamagedFileError(path, fault, REMEDY) from None
    return content


def _read_manifest(folder: Path) -> tuple[dict[str, Any], dict[str, StoredTensor], dict[str, dict[str, Any]]]:
    """Return encoded state, tensors and files of a valid manifest. Raises DamagedFileError."""
    path = folder / MANIFEST
    content = io.read_json(
        path, 32 * io.MB, REMEDY, fields={"format": int, "state": dict, "tensors": dict, "files": dict}
    )
    if content["format"] != VERSION:
        fault = f"has format {content['format']}, this version of clipzoo reads {VERSION}"
        raise io.DamagedFileError(path, fault, "update clipzoo")
    try:
        files = content["files"]
        for name, facts in files.items():
            # A name with a path could lead out of the folder.
            _require(SHARD.fullmatch(name) is not None, f"{shortened(name)} is not the name of a shard")
            _require(_is_count(facts["bytes"]) and isinstance(facts["sha256"], str), f"{name} has no size and digest")
            shard = io.below(folder, name)
            if not shard.is_file():
                raise io.DamagedFileError(shard, "is missing", REMEDY)
            if shard.stat().st_size != facts["bytes"]:
                raise io.DamagedFileError(shard, f"has {shard.stat().st_size} bytes, not {facts['bytes']}", REMEDY)
        count = len(content["tensors"])
        _require(count <= MOST_TENSORS, f"it lists {count} tensors, more than {MOST_TENSORS}")
        tensors = {name: _stored_tensor(name, facts, files) for name, facts in content["tensors"].items()}
        needed = sum(math.prod(shape) * dtype.itemsize for dtype, shape, _ in tensors.values())
        _require(needed <= sum(file["bytes"] for file in files.values()), "its tensors are larger than its files")
        unlisted = "its state names a tensor that it does not list"
        _decoded(content["state"], lambda _, name: _require(name in tensors, unlisted))
    except io.DamagedFileError:
        raise
    # Unexpected values raise any of these.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise io.DamagedFileError(path, f"is not the manifest of a checkpoint ({error})", REMEDY) from None
    return content["state"], tensors, files


def _stored_tensor(name: str, facts: Mapping[str, Any], files: Mapping[str, object]) -> StoredTensor:
    """Check that the chunks cover the tensor, so that no entry keeps a value that was not stored."""
    shape = tuple(facts["shape"])
    _require(facts["dtype"] in DTYPES, f"{name} has the data type {shortened(facts['dtype'])}")
    _require(all(map(_is_count, shape)), f"{name} has the shape {shortened(shape)}")
    chunks = [(Place(shape, tuple(offsets), tuple(sizes)), file) for offsets, sizes, file in facts["chunks"]]
    for chunk, file in chunks:
        _require(file in files, f"{name} is in {shortened(file)}, which is not listed")
        _require(len(chunk.offsets) == len(chunk.sizes) == len(shape), f"a chunk of {name} has another rank")
        _require(all(map(_is_count, (*chunk.offsets, *chunk.sizes))), f"a chunk of {name} has no place")
        _require(all(end <= n for end, n in zip(chunk.ends, shape, strict=True)), f"a chunk of {name} sticks out")
    full = [chunk for chunk, _ in chunks if math.prod(chunk.sizes)]
    is_covered = sum(math.prod(chunk.sizes) for chunk in full) == math.prod(shape)
    is_distinct = len({chunk.offsets for chunk in full}) == len(full)
    _require(is_covered and is_distinct, f"the chunks of {name} do not cover it")
    return getattr(torch, facts["dtype"]), shape, chunks


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise ValueError(fault)
