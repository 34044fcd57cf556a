"""Checkpoints that are there whole or not at all.

A checkpoint is `step_00001234.pt` and, written after it, `step_00001234.json` with its size and SHA-256: the commit
mark. Each is written to a temporary name, flushed to the disk and renamed, so that a kill or a full disk at any moment
leaves the previous checkpoints in use. Weights load with `weights_only`: nothing in the file is executed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from clipzoo.errors import TrainingError

log = logging.getLogger(__name__)


def save(folder: Path, step: int, state: dict[str, Any], facts: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of `step`, then remove all but the newest `keep`. facts: small, shown in the mark."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:08d}.pt"
    try:
        _replace(path, lambda temporary: torch.save(state, temporary))
        mark = {"step": step, "bytes": path.stat().st_size, "sha256": _digest(path), **facts}
        _replace(_mark(path), lambda temporary: temporary.write_text(json.dumps(mark, indent=1)))
    except (OSError, RuntimeError) as error:
        # torch reports a full disk as an opaque RuntimeError.
        raise TrainingError(
            f"could not write the checkpoint {path} ({error}): is the disk full? Earlier checkpoints are untouched"
        ) from error
    _remove_old(path, keep)
    return path


class Writer:
    """Writes checkpoints one after the other. background: from a copy, while the caller goes on."""

    def __init__(self, background: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._pending: Future[Path] | None = None

    def save(self, folder: Path, step: int, state: dict[str, Any], facts: dict[str, Any], keep: int) -> None:
        """`save`; an error in the background is raised by the next call."""
        self.wait()
        if self._thread is None:
            save(folder, step, state, facts, keep)
        else:
            self._pending = self._thread.submit(save, folder, step, _copied(state), facts, keep)

    def wait(self) -> None:
        """Until all is on the disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole; None when there is none. Broken ones are named in the log."""
    for path in sorted(folder.glob("step_*.pt"), reverse=True):
        reason = _fault(path)
        if reason is None:
            return path
        log.warning("checkpoint %s is not used: %s", path, reason)
    return None


def load_newest(folder: Path) -> tuple[dict[str, Any], Path] | None:
    """The content of `newest` on the CPU, and its path."""
    path = newest(folder)
    return None if path is None else (read(path), path)


def read(path: Path) -> dict[str, Any]:
    """A checkpoint's content, on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _remove_old(path: Path, keep: int) -> None:
    """All but `path` and the `keep` - 1 whole ones before it. Broken ones of later steps will be overwritten."""
    kept = [each for each in sorted(path.parent.glob("step_*.pt")) if each <= path and _mark(each).exists()][-keep:]
    for old in path.parent.glob("step_*.pt"):
        if old < path and old not in kept:
            _mark(old).unlink(missing_ok=True)
            old.unlink()
    for stale in path.parent.glob(".step_*.tmp"):
        stale.unlink()


def _copied(value: Any) -> Any:
    """The same nested mappings and lists with copies of all tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list | tuple) else value


def _fault(path: Path) -> str | None:
    mark = _mark(path)
    if not mark.exists():
        return "it was not finished (no mark beside it)"
    try:
        stated = json.loads(mark.read_text())
    except json.JSONDecodeError:
        return f"its mark {mark.name} is not JSON"
    if path.stat().st_size != stated["bytes"]:
        return f"it has {path.stat().st_size} bytes, its mark says {stated['bytes']}"
    if _digest(path) != stated["sha256"]:
        return "its SHA-256 differs from its mark's"
    return None


def _mark(path: Path) -> Path:
    return path.with_suffix(".json")


def _replace(path: Path, write: Any) -> None:
    """Write through a temporary file that takes the name only when all of it is on the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        temporary.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
