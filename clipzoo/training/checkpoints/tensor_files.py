"""Tensors in .safetensors files: written in one pass with their digest, read in slices."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from clipzoo import io
from clipzoo.io.weights import MANIFEST, require_bounded
from clipzoo.training.checkpoints.manifest import DTYPES, REMEDY, StoredFile, dtype_name

BLOCK = 2**26
"""Bytes that are written and hashed at once."""
ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
    """Write tensors on the CPU to a .safetensors file, atomically and durably; see `io.whole`.

    safetensors' own writer returns the whole file as bytes; this one needs no copy, and computes the digest.

    Raises:
        WriteError: the file cannot be written.
    """
    # Readers need tensors aligned to the size of their entries.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        dtype = DTYPES[dtype_name(tensor)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    digest, size = hashlib.sha256(), 0
    with io.whole(path) as file:
        for content in (len(text).to_bytes(8, "little"), text):
            size += _write(file, digest, memoryview(content))
        for tensor in tensors.values():
            size += _write(file, digest, _bytes_of(tensor))
    return StoredFile(size, digest.hexdigest())


@contextmanager
def opened(path: Path) -> Any:
    """Open a .safetensors file to read tensors and slices of them. Raises DamagedFileError, also for the block."""
    from safetensors import SafetensorError, safe_open

    require_bounded(path, REMEDY)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise io.DamagedFileError(path, "is missing", REMEDY) from None
    except (SafetensorError, OSError) as error:
        fault = f"is not a .safetensors file with the tensors of its checkpoint ({error})"
        raise io.DamagedFileError(path, fault, REMEDY) from None


def read_slice(file: Any, name: str, slices: tuple[slice, ...], like: Tensor) -> Tensor:
    """Return a part of a tensor of an `opened` file; all of it if `slices` is empty, as for a number.

    like: a tensor of the shape and the type that the part must have.
    """
    tensor: Tensor = file.get_slice(name)[slices] if slices else file.get_tensor(name)
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise OSError(f"{name} has another shape or data type than {MANIFEST} says")
    return tensor


def _write(file: IO[bytes], digest: Any, content: memoryview) -> int:
    for start in range(0, len(content), BLOCK):
        block = content[start : start + BLOCK]
        file.write(block)
        digest.update(block)
    return len(content)


def _bytes_of(tensor: Tensor) -> memoryview:
    values: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)
