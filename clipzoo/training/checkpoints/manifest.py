"""The manifest of a sharded checkpoint: a JSON file that says which tensors it holds, and in which files.

`torch.distributed.checkpoint` writes this information as a pickle, which can execute code when it is read. A manifest
holds plain values only, and is checked before a tensor is read:

    state: nested mappings and lists as they were saved; {"__tensor__": NAME} represents a tensor
    tensors: NAME -> {"dtype", "shape", "chunks": [[offsets, sizes, file], ...]}
    files: file -> {"bytes", "sha256"}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipzoo import io
from clipzoo.io import shortened
from clipzoo.io.weights import MANIFEST
from clipzoo.training.checkpoints.pieces import Keys

VERSION = 1
TENSOR, TUPLE, ITEMS = "__tensor__", "__tuple__", "__items__"
"""Keys of mappings that stand for what JSON has not: a tensor, a tuple, a mapping whose keys are not text."""
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Data types by name, with their names in a .safetensors file."""
MOST_TENSORS = 50_000
SHARD = re.compile(r"rank_\d{5}\.safetensors")
REMEDY = "give another checkpoint of the run"


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the file that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class StoredTensor:
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


@dataclass(frozen=True)
class StoredFile:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """state: see the module."""

    state: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]

    def text(self) -> str:
        """Return the content of the file."""
        content = {
            "format": VERSION,
            "state": self.state,
            "tensors": {
                name: {
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "chunks": [(chunk.offsets, chunk.sizes, chunk.file) for chunk in tensor.chunks],
                }
                for name, tensor in self.tensors.items()
            },
            "files": {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in self.files.items()},
        }
        return json.dumps(content, separators=(",", ":"))

    def without(self, parts: Collection[str]) -> Manifest:
        """Return the manifest of a checkpoint without these parts of its state."""
        return Manifest({key: value for key, value in self.state.items() if key not in parts}, self.tensors, self.files)


def name_of(path: Keys) -> str:
    """Return the name of a tensor: its path, joined by slashes."""
    return "/".join(str(key) for key in path)


def key_of(name: str, offsets: Sequence[int]) -> str:
    """Return the name of a chunk in its file: that of its tensor, followed by its offsets unless it is the first."""
    return f"{name}@{','.join(map(str, offsets))}" if any(offsets) else name


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's data type. Raises TypeError if a checkpoint cannot hold it."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"a sharded checkpoint cannot hold a tensor of {tensor.dtype}")
    return name


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


def tensor_paths(value: Any, path: Keys = ()) -> dict[Keys, str]:
    """Return the names of the tensors in an encoded value by their paths. Raises ValueError if it is malformed."""
    found: dict[Keys, str] = {}
    decoded(value, lambda at, name: found.setdefault(at, name), path)
    return found


def decoded(value: Any, tensor: Callable[[Keys, str], Any], path: Keys = ()) -> Any:
    """Return the value that was `encoded`. tensor: function of the path and the name of a tensor.

    Raises:
        ValueError: it is malformed.
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
        files = {name: _file(name, facts) for name, facts in content["files"].items()}
        count = len(content["tensors"])
        _require(count <= MOST_TENSORS, f"it lists {count} tensors, more than {MOST_TENSORS}")
        tensors = {name: _tensor(name, facts, files) for name, facts in content["tensors"].items()}
        for name, file in files.items():
            shard = io.below(folder, name)
            if not shard.is_file():
                raise io.DamagedFileError(shard, "is missing", REMEDY)
            if shard.stat().st_size != file.bytes:
                raise io.DamagedFileError(shard, f"has {shard.stat().st_size} bytes, not {file.bytes}", REMEDY)
        stored = sum(file.bytes for file in files.values())
        _require(sum(tensor.bytes for tensor in tensors.values()) <= stored, "its tensors are larger than its files")
        names = tensor_paths(content["state"]).values()
        _require(set(names) <= set(tensors), "its state names a tensor that it does not list")
    # Values of another kind than expected end in any of these.
    except io.DamagedFileError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise io.DamagedFileError(path, f"is not the manifest of a checkpoint ({error})", REMEDY) from None
    return Manifest(content["state"], tensors, files)


def _file(name: str, facts: Mapping[str, Any]) -> StoredFile:
    # A path would lead out of the folder.
    _require(SHARD.fullmatch(name) is not None, f"{shortened(name)} is not the name of a shard")
    _require(_is_count(facts["bytes"]) and isinstance(facts["sha256"], str), f"{name} has no size and digest")
    return StoredFile(facts["bytes"], facts["sha256"])


def _tensor(name: str, facts: Mapping[str, Any], files: Mapping[str, StoredFile]) -> StoredTensor:
    """Check that the chunks cover the tensor, so that no entry is left as the memory happens to be."""
    shape = tuple(facts["shape"])
    _require(facts["dtype"] in DTYPES, f"{name} has the data type {shortened(facts['dtype'])}")
    _require(all(map(_is_count, shape)), f"{name} has the shape {shortened(shape)}")
    chunks = tuple(Chunk(tuple(offsets), tuple(sizes), file) for offsets, sizes, file in facts["chunks"])
    for chunk in chunks:
        _require(chunk.file in files, f"{name} is in {shortened(chunk.file)}, which is not listed")
        _require(len(chunk.offsets) == len(chunk.sizes) == len(shape), f"a chunk of {name} has another rank")
        _require(all(map(_is_count, (*chunk.offsets, *chunk.sizes))), f"a chunk of {name} has no place")
        ends = (offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
        _require(all(end <= length for end, length in zip(ends, shape, strict=True)), f"a chunk of {name} sticks out")
    volume = sum(math.prod(chunk.sizes) for chunk in chunks)
    distinct = len({chunk.offsets for chunk in chunks if math.prod(chunk.sizes)})
    full = sum(1 for chunk in chunks if math.prod(chunk.sizes))
    _require(volume == math.prod(shape) and distinct == full, f"the chunks of {name} do not cover it")
    return StoredTensor(facts["dtype"], shape, chunks)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise ValueError(fault)
