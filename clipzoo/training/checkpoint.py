"""Checkpoints that are written completely or not at all.

A checkpoint is `step_00001234.pt` and, written after it, `step_00001234.json` with its size and SHA-256, which marks it
as complete. Both are written under a temporary name, flushed to the disk and renamed: after a kill or on a full disk,
previous checkpoints remain valid. Weights are loaded with `weights_only`, so nothing in the file is executed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from clipzoo.errors import ConfigError, TrainingError

log = logging.getLogger(__name__)


def save(folder: Path, step: int, state: Mapping[str, Any], facts: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint of `step` and remove older ones but the newest `keep`.

    facts: small values for the .json file.

    Raises:
        TrainingError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:08d}.pt"
    try:
        _write_atomically(path, lambda temporary: torch.save(state, temporary))
        mark = {"step": step, "bytes": path.stat().st_size, "sha256": _sha256(path), **facts}
        _write_atomically(_mark(path), lambda temporary: temporary.write_text(json.dumps(mark, indent=1)))
    except (OSError, RuntimeError) as error:
        # torch reports a full disk as an opaque RuntimeError.
        raise TrainingError(
            f"could not write the checkpoint {path} ({error}): is the disk full? Earlier checkpoints are untouched"
        ) from error
    _remove_old(path, keep)
    return path


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


def newest(folder: Path) -> Path | None:
    """Return the newest valid checkpoint, None if there is none. Invalid ones are named in the log."""
    for path in sorted(folder.glob("step_*.pt"), reverse=True):
        reason = _fault(path)
        if reason is None:
            return path
        log.warning("checkpoint %s is not used: %s", path, reason)
    return None


def load_newest(folder: Path) -> tuple[dict[str, Any], Path] | None:
    """Return the content of the newest valid checkpoint, on the CPU, and its path."""
    path = newest(folder)
    return None if path is None else (read(path), path)


def read(path: Path) -> dict[str, Any]:
    """Return a checkpoint's content, on the CPU.

    Raises:
        ConfigError: the file is no checkpoint, or holds objects other than weights and plain values.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    # torch reports a file of another kind as UnpicklingError, RuntimeError, EOFError and others.
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is no checkpoint of weights and plain values: {_first_sentence(error)}") from error


def _remove_old(path: Path, keep: int) -> None:
    """Remove earlier checkpoints but the `keep` - 1 complete ones before `path`. Later ones will be overwritten."""
    earlier = [other for other in sorted(path.parent.glob("step_*.pt")) if other < path]
    complete = [other for other in [*earlier, path] if _mark(other).exists()]
    for old in set(earlier) - set(complete[-keep:]):
        _mark(old).unlink(missing_ok=True)
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
    mark = _mark(path)
    if not mark.exists():
        return f"it is incomplete (there is no {mark.name})"
    try:
        expected = json.loads(mark.read_text())
    except json.JSONDecodeError:
        return f"{mark.name} is not JSON"
    if path.stat().st_size != expected["bytes"]:
        return f"it has {path.stat().st_size} bytes, {mark.name} says {expected['bytes']}"
    if _sha256(path) != expected["sha256"]:
        return f"its SHA-256 differs from the one in {mark.name}"
    return None


def _first_sentence(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__


def _mark(path: Path) -> Path:
    return path.with_suffix(".json")


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary file, which takes the final name once it is on the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        temporary.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
