"""Checkpoints that are written completely or not at all.

A checkpoint is `step_00001234.pt` and, written after it, `step_00001234.json` with its size and SHA-256, which marks it
as complete. After a kill or on a full disk, previous checkpoints remain valid (`clipzoo.io.whole`). Weights are loaded
with `weights_only`, so nothing in the file is executed.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

from clipzoo import io
from clipzoo.io.weights import mark_of

log = logging.getLogger(__name__)

REMEDY = "give another checkpoint of the run"


def save(folder: Path, step: int, state: Mapping[str, Any], facts: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint of `step` and remove older ones but the newest `keep`.

    facts: small values for the .json file.

    Raises:
        WriteError: the file cannot be written.
    """
    path = folder / f"step_{step:08d}.pt"
    try:
        write_marked(path, state, {"step": step, **facts})
    except io.WriteError as error:
        raise io.WriteError(f"{error}. Earlier checkpoints are untouched") from error
    _remove_old(path, keep)
    return path


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


class CheckpointWriter:
    """Writes one checkpoint after the other. background: in a thread, from a copy of the state."""

    def __init__(self, background: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._pending: Future[Path] | None = None

    def save(self, folder: Path, step: int, state: Mapping[str, Any], facts: Mapping[str, Any], keep: int) -> None:
        """Call `save`; an error in the background is raised by the next call of `save` or `wait`."""
        self.wait()
        if self._thread is None:
            save(folder, step, state, facts, keep)
        else:
            self._pending = self._thread.submit(save, folder, step, _copy_to_cpu(state), facts, keep)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def newest(folder: Path, at_most: int | None = None) -> Path | None:
    """Return the newest valid checkpoint, None if there is none. Invalid ones are named in the log.

    at_most: largest number of steps.
    """
    for path in sorted(folder.glob("step_*.pt"), reverse=True):
        if at_most is not None and int(path.stem.removeprefix("step_")) > at_most:
            continue
        reason = _fault(path)
        if reason is None:
            return path
        log.warning("checkpoint %s is not used: %s", path, reason)
    return None


def recorded(folder: Path, name: str) -> Any:
    """Return a fact in the mark of the newest checkpoint that has it; None without one. Weights are not verified."""
    damage = io.DamageLog()
    paths = sorted(folder.glob("step_*.json"), reverse=True)
    marks: list[dict[str, Any]] = [damage.read(partial(io.read_json, path), {}) for path in paths]
    return next((mark[name] for mark in marks if name in mark), None)


def value_of_best(folder: Path) -> float | None:
    """Return the value of the metric in the mark of the best checkpoint; None without one, or if it is damaged."""
    damage = io.DamageLog()
    values = [damage.read(partial(_value, mark), None) for mark in sorted(folder.glob("*.json"))]
    return max((value for value in values if value is not None), default=None)


def load_newest(folder: Path) -> tuple[dict[str, Any], Path] | None:
    """Return the content of the newest valid checkpoint, on the CPU, and its path."""
    path = newest(folder)
    return None if path is None else (read(path), path)


def read(path: Path, *parts: str) -> dict[str, Any]:
    """Return a checkpoint's content, on the CPU. parts: names that must be in it.

    Raises:
        DamagedFileError: the file is no checkpoint, or holds objects other than weights and plain values.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    # torch reports a file of another kind as UnpicklingError, RuntimeError, EOFError and others.
    except (OSError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        fault = f"is no checkpoint of weights and plain values ({_first_sentence(error)})"
        raise io.DamagedFileError(path, fault, REMEDY) from error
    if not isinstance(content, dict) or not content.keys() >= set(parts):
        raise io.DamagedFileError(path, f"holds no {' and '.join(parts) or 'mapping'}", REMEDY)
    return content


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


def _value(mark: Path) -> float | None:
    content = io.read_json(mark, "the next evaluation writes it again")
    io.require_fields(mark, content, {"value": (int, float)})
    return content["value"]


def _remove_old(path: Path, keep: int) -> None:
    """Remove earlier checkpoints but the `keep` - 1 complete ones before `path`. Later ones will be overwritten."""
    earlier = [other for other in sorted(path.parent.glob("step_*.pt")) if other < path]
    complete = [other for other in [*earlier, path] if mark_of(other).exists()]
    for old in set(earlier) - set(complete[-keep:]):
        mark_of(old).unlink(missing_ok=True)
        old.unlink()
    for temporary in path.parent.glob(".step_*.tmp"):
        temporary.unlink()


def _copy_to_cpu(value: Any) -> Any:
    """Return the nested mappings and lists with copies of all tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copy_to_cpu(item) for key, item in value.items()}
    return [_copy_to_cpu(item) for item in value] if isinstance(value, list | tuple) else value


def _fault(path: Path) -> str | None:
    """Return the reason why a checkpoint is invalid, None if it is valid."""
    mark = mark_of(path)
    if not mark.exists():
        return f"it is incomplete (there is no {mark.name})"
    try:
        expected = io.read_json(mark)
        io.require_fields(mark, expected, {"bytes": int, "sha256": str})
    except io.DamagedFileError as error:
        return f"{mark.name} {error.fault}"
    if path.stat().st_size != expected["bytes"]:
        return f"it has {path.stat().st_size} bytes, {mark.name} says {expected['bytes']}"
    if sha256(path) != expected["sha256"]:
        return f"its SHA-256 differs from the one in {mark.name}"
    return None


def _first_sentence(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
