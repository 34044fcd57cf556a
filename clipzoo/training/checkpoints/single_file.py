"""A checkpoint in one file, as torch.save writes it. It is loaded with `weights_only`: nothing in it is executed."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

from clipzoo import io
from clipzoo.io.weights import mark_of
from clipzoo.training.checkpoints.manifest import REMEDY


def write_marked(path: Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Write a file of tensors and the .json that marks it as complete; return its SHA-256.

    facts: small values for the .json file.

    Raises:
        WriteError: a file cannot be written.
    """
    with io.whole(path) as file:
        _save(state, file)
    digest = sha256(path)
    io.write_json(mark_of(path), {**facts, "bytes": path.stat().st_size, "sha256": digest})
    return digest


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a file of tensors, on the CPU.

    Raises:
        DamagedFileError: the file is no checkpoint, or holds objects other than weights and plain values.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    # torch reports a file of another kind as UnpicklingError, RuntimeError, EOFError and others.
    except (OSError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        fault = f"is no checkpoint of weights and plain values ({_first_sentence(error)})"
        raise io.DamagedFileError(path, fault, REMEDY) from error
    if not isinstance(content, dict):
        raise io.DamagedFileError(path, "holds no mapping", REMEDY)
    return content


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save(state: Mapping[str, Any], file: IO[bytes]) -> None:
    """Call torch.save, and raise the system's error for a full disk where torch has an opaque RuntimeError."""
    errors: list[OSError] = []

    def write(content: bytes) -> int:
        try:
            return file.write(content)
        except OSError as error:
            errors.append(error)
            raise

    try:
        torch.save(state, SimpleNamespace(write=write, flush=file.flush))
    except RuntimeError:
        if errors:
            raise errors[0] from None
        raise


def _first_sentence(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
