"""A checkpoint in one file, as torch.save writes it; `clipzoo.io.weights.read_tensors` reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

from clipzoo import io
from clipzoo.io.weights import mark_of


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
