"""Removing old checkpoints, of either kind. A checkpoint is removed only once its successor is complete."""

from __future__ import annotations

import shutil
from pathlib import Path

from clipzoo.io.weights import checkpoints_in, mark_of, step_of


def remove_old(path: Path, keep: int) -> None:
    """Remove checkpoints before `path` but the `keep` - 1 newest complete ones. Later ones will be overwritten."""
    others = [other for other in checkpoints_in(path.parent) if other != path]
    earlier = [other for other in others if step_of(other) < step_of(path)]
    complete = [other for other in [*earlier, path] if mark_of(other).exists()]
    for old in earlier:
        if old not in complete[-keep:]:
            remove(old)
    for twin in others:
        # This step may also exist in the other format; its mark now belongs to `path`.
        if step_of(twin) == step_of(path):
            _remove_content(twin)
    for temporary in path.parent.glob(".step_*.tmp"):
        _remove_content(temporary)


def remove(path: Path) -> None:
    """Remove a checkpoint, its mark first: what is left after an interruption counts as incomplete."""
    mark_of(path).unlink(missing_ok=True)
    _remove_content(path)


def temporary_folder(path: Path) -> Path:
    """Return the name of a sharded checkpoint's folder until it is complete. All ranks write to it."""
    return path.with_name(f".{path.name}.tmp")


def _remove_content(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
