"""A sharded checkpoint: a .safetensors file for each rank, and a manifest that says which tensors they hold.

    step_00001234/rank_00000.safetensors ...      the parts of the ranks
    step_00001234/manifest.json                   plain values, places of tensors in the files, digests:

        state: nested mappings and lists as they were saved; {"__tensor__": NAME} represents a tensor
        tensors: NAME -> {"dtype", "shape", "chunks": [[offsets, sizes, file], ...]}
        files: file -> {"bytes", "sha256"}

A tensor that all ranks hold is written by one of them; ranks share this work evenly. Any number of ranks reads the
parts that it needs. The manifest is checked before a tensor is read, and nothing in the files is executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from clipzoo import io
from clipzoo.io import shortened
from clipzoo.io.weights import MANIFEST, require_bounded

VERSION = 1
TENSOR, TUPLE, ITEMS = "__tensor__", "__tuple__", "__items__"
"""Keys of mappings that represent what JSON lacks: a tensor, a tuple, a mapping whose keys are not text."""
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Data types by name, with their names in a .safetensors file."""
MOST_TENSORS = 50_000
SHARD = re.compile(r"rank_\d{5}\.safetensors")
BLOCK = 2**26
"""Bytes that are written and hashed at once."""
REMEDY = "give another checkpoint of the run"
Keys = tuple[str | int, ...]
"""Keys and positions that lead to a value in nested mappings and lists."""


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
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class Piece:
    """This rank's part of a tensor, and its place."""

    local: Tensor
    place: Place


Layout = Callable[[Keys, tuple[int, ...]], Place]
"""Function of the path and the whole shape of a stored tensor -> the part of it that this rank needs."""
Chunks = dict[tuple[str, tuple[int, ...]], int]
"""Size in bytes of the chunks of tensors that a rank holds, by name and offsets."""


def is_dtensor(tensor: Tensor) -> bool:
    """Return True for a DTensor. Does not import torch.distributed.tensor, which takes half a second."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; other tensors as they are."""
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


# --- Writing ---


class HashedFile:
    """A file that is written from its start to its end; counts and hashes the content. error: of the system."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._bytes, self._digest = file, 0, hashlib.sha256()
        self.flush = file.flush
        self.error: OSError | None = None

    def write(self, content: bytes | memoryview) -> int:
        content = memoryview(content)
        for start in range(0, len(content), BLOCK):
            block = content[start : start + BLOCK]
            try:
                self._file.write(block)
            except OSError as error:
                self.error = error
                raise
            self._digest.update(block)
        self._bytes += len(content)
        return len(content)

    def stored(self) -> StoredFile:
        return StoredFile(self._bytes, self._digest.hexdigest())


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


def write_shard(folder: Path, rank: int, pieces: Mapping[str, Piece], held: Sequence[Chunks]) -> dict[str, Any]:
    """Write the file of a rank, and return the part of the manifest that describes it: its tensors and files.

    pieces: by name; only those that no other rank writes are in the file. held: `chunks_of` the pieces of all ranks.

    Raises:
        WriteError: the file cannot be written.
    """
    # A chunk that several ranks hold is written by the one of them that writes the fewest bytes so far.
    totals, writers = [0] * len(held), {}
    for chunk, size in {chunk: size for chunks in held for chunk, size in chunks.items()}.items():
        holders = (holder for holder, chunks in enumerate(held) if chunk in chunks)
        writers[chunk] = min(holders, key=totals.__getitem__)
        totals[writers[chunk]] += size or 1
    names = [name for name, piece in pieces.items() if writers.get((name, piece.place.offsets)) == rank]
    if not names:
        return {"tensors": {}, "files": {}}
    # Readers need tensors aligned to the size of their entries.
    own = {name: pieces[name] for name in sorted(names, key=lambda name: -pieces[name].local.element_size())}
    file = f"rank_{rank:05d}.safetensors"
    header: dict[str, Any] = {}
    described: dict[str, Any] = {}
    end = 0
    for name, piece in own.items():
        dtype, place = str(piece.local.dtype).removeprefix("torch."), piece.place
        if dtype not in DTYPES:
            raise TypeError(f"a sharded checkpoint cannot hold a tensor of {piece.local.dtype}")
        start, end = end, end + piece.local.nbytes
        header[_key(name, place)] = {"dtype": DTYPES[dtype], "shape": place.sizes, "data_offsets": (start, end)}
        described[name] = {"dtype": dtype, "shape": place.whole, "chunks": [(place.offsets, place.sizes, file)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    # safetensors' own writer returns the whole file as bytes: it would need the memory of the state once more.
    with io.whole(folder / file) as opened:
        hashed = HashedFile(opened)
        hashed.write(len(text).to_bytes(8, "little") + text)
        for piece in own.values():
            values: Any = piece.local.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            hashed.write(values)
    return {"tensors": described, "files": {file: vars(hashed.stored())}}


def chunks_of(pieces: Mapping[str, Piece]) -> Chunks:
    """Return the size of a rank's pieces, without those that are empty although their tensor is not."""
    full = {name: piece for name, piece in pieces.items() if piece.local.numel() or not math.prod(piece.place.whole)}
    return {(name, piece.place.offsets): piece.local.nbytes for name, piece in full.items()}


def write_manifest(folder: Path, state: Any, shards: Sequence[Mapping[str, Any]]) -> StoredFile:
    """Write the manifest of all shards, in rank order. state: `encoded`. shards: what `write_shard` returned.

    Raises:
        ValueError: the pieces of the ranks do not cover a tensor.
    """
    tensors: dict[str, Any] = {}
    for name, described in (item for shard in shards for item in shard["tensors"].items()):
        tensors.setdefault(name, {**described, "chunks": []})["chunks"] += described["chunks"]
    files = {name: facts for shard in shards for name, facts in shard["files"].items()}
    for name, facts in tensors.items():
        _stored_tensor(name, facts, files)
    content = {"format": VERSION, "state": state, "tensors": tensors, "files": files}
    text = json.dumps(content, separators=(",", ":")).encode()
    with io.whole(folder / MANIFEST) as opened:
        hashed = HashedFile(opened)
        hashed.write(text)
    return hashed.stored()


def _key(name: str, place: Place) -> str:
    """Return the name of a chunk in its file: that of its tensor, followed by its offsets unless it is the first."""
    return f"{name}@{','.join(map(str, place.offsets))}" if any(place.offsets) else name


# --- Reading ---


@dataclass(frozen=True)
class StoredFile:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredTensor:
    """chunks: boxes that cover the tensor, with the files that hold them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[Place, str], ...]


@dataclass(frozen=True)
class Manifest:
    """See the module."""

    state: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]


def read_sharded(folder: Path, layout: Layout | None = None, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the state of a sharded checkpoint, on the CPU.

    layout: the parts of tensors that this rank needs; None for whole tensors. without: keys that are left out.

    Raises:
        DamagedFileError: a file is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    manifest = read_manifest(folder)
    # By file: key of a chunk, the part of the chunk that is needed, and the memory for it.
    reads: dict[str, list[tuple[str, tuple[slice, ...], Tensor]]] = defaultdict(list)

    def allocate(path: Keys, name: str) -> Tensor:
        stored = manifest.tensors[name]
        place = Place.everything(stored.shape) if layout is None else layout(path, stored.shape)
        part = torch.zeros(place.sizes, dtype=stored.dtype)
        for chunk, file in stored.chunks:
            starts = [max(pair) for pair in zip(chunk.offsets, place.offsets, strict=True)]
            ends = [min(pair) for pair in zip(_ends(chunk), _ends(place), strict=True)]
            common = [range(start, end) for start, end in zip(starts, ends, strict=True)]
            if all(common):
                source, target = (
                    tuple(slice(one.start - at, one.stop - at) for one, at in zip(common, box.offsets, strict=True))
                    for box in (chunk, place)
                )
                reads[file].append((_key(name, chunk), source, part[target]))
        return part

    state = {key: value for key, value in manifest.state.items() if key not in without}
    content: dict[str, Any] = decoded(state, allocate)
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


def decoded(value: Any, tensor: Callable[[Keys, str], Any], path: Keys = ()) -> Any:
    """Return the value that was `encoded`. tensor: function of the path and the name of a tensor.

    Raises:
        ValueError: the value is malformed.
    """
    if isinstance(value, list):
        return [decoded(item, tensor, (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        _require(isinstance(value[TENSOR], str), "the name of a tensor is not a string")
        return tensor(path, value[TENSOR])
    if TUPLE in value:
        _require(isinstance(value[TUPLE], list), "a tuple is not a list")
        return tuple(decoded(item, tensor, (*path, index)) for index, item in enumerate(value[TUPLE]))
    items = value[ITEMS] if ITEMS in value else list(value.items())
    _require(
        isinstance(items, list) and all(len(item) == 2 and isinstance(item[0], str | int) for item in items),
        "a mapping is not a list of keys and values",
    )
    return {key: decoded(item, tensor, (*path, key)) for key, item in items}


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a sharded checkpoint.

    Raises:
        DamagedFileError: it is missing or damaged, or its tensors do not fit its files.
    """
    path = folder / MANIFEST
    content = io.read_json(path, 32 * io.MB, REMEDY)
    io.require_fields(path, content, {"format": int, "state": dict, "tensors": dict, "files": dict}, REMEDY)
    if content["format"] != VERSION:
        fault = f"has format {content['format']}, this version of clipzoo reads {VERSION}"
        raise io.DamagedFileError(path, fault, "update clipzoo")
    try:
        files = {}
        for name, facts in content["files"].items():
            # A path would lead out of the folder.
            _require(SHARD.fullmatch(name) is not None, f"{shortened(name)} is not the name of a shard")
            files[name] = StoredFile(facts["bytes"], facts["sha256"])
            is_described = _is_count(facts["bytes"]) and isinstance(facts["sha256"], str)
            _require(is_described, f"{name} has no size and digest")
            shard = io.below(folder, name)
            if not shard.is_file():
                raise io.DamagedFileError(shard, "is missing", REMEDY)
            if shard.stat().st_size != facts["bytes"]:
                raise io.DamagedFileError(shard, f"has {shard.stat().st_size} bytes, not {facts['bytes']}", REMEDY)
        count = len(content["tensors"])
        _require(count <= MOST_TENSORS, f"it lists {count} tensors, more than {MOST_TENSORS}")
        tensors = {name: _stored_tensor(name, facts, files) for name, facts in content["tensors"].items()}
        needed = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
        stored = sum(file.bytes for file in files.values())
        _require(needed <= stored, "its tensors are larger than its files")
        unlisted = "its state names a tensor that it does not list"
        decoded(content["state"], lambda _, name: _require(name in tensors, unlisted))
    except io.DamagedFileError:
        raise
    # Values of another kind than expected end in any of these.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise io.DamagedFileError(path, f"is not the manifest of a checkpoint ({error})", REMEDY) from None
    return Manifest(content["state"], tensors, files)


def _stored_tensor(name: str, facts: Mapping[str, Any], files: Mapping[str, StoredFile]) -> StoredTensor:
    """Check that the chunks cover the tensor, so that no entry keeps a value that was not stored."""
    shape = tuple(facts["shape"])
    _require(facts["dtype"] in DTYPES, f"{name} has the data type {shortened(facts['dtype'])}")
    _require(all(map(_is_count, shape)), f"{name} has the shape {shortened(shape)}")
    chunks = tuple((Place(shape, tuple(offsets), tuple(sizes)), file) for offsets, sizes, file in facts["chunks"])
    for chunk, file in chunks:
        _require(file in files, f"{name} is in {shortened(file)}, which is not listed")
        _require(len(chunk.offsets) == len(chunk.sizes) == len(shape), f"a chunk of {name} has another rank")
        _require(all(map(_is_count, (*chunk.offsets, *chunk.sizes))), f"a chunk of {name} has no place")
        _require(all(end <= n for end, n in zip(_ends(chunk), shape, strict=True)), f"a chunk of {name} sticks out")
    full = [chunk for chunk, _ in chunks if math.prod(chunk.sizes)]
    is_covered = sum(math.prod(chunk.sizes) for chunk in full) == math.prod(shape)
    _require(
        is_covered and len({chunk.offsets for chunk in full}) == len(full), f"the chunks of {name} do not cover it"
    )
    return StoredTensor(getattr(torch, facts["dtype"]), shape, chunks)


def _ends(place: Place) -> list[int]:
    return [start + size for start, size in zip(place.offsets, place.sizes, strict=True)]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise ValueError(fault)
