"""Checkpoints that are written completely or not at all, in one file or in one for each rank.

A checkpoint is `step_00001234.pt`, or a folder `step_00001234` with the shards of its ranks, and, written after it,
`step_00001234.json` with a size and a SHA-256, which marks it as complete. After a kill or on a full disk, previous
checkpoints remain valid (`clipzoo.io.whole`). Nothing in a checkpoint is executed when it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.io.weights import MANIFEST, checkpoints_in, is_sharded, mark_of, read_tensors, step_of
from clipzoo.training.checkpoints import pieces
from clipzoo.training.checkpoints.manifest import REMEDY, StoredFile, read_manifest
from clipzoo.training.checkpoints.pieces import Layout, everything
from clipzoo.training.checkpoints.rotation import remove_old
from clipzoo.training.checkpoints.single_file import sha256, write_marked

log = logging.getLogger(__name__)

HASHED_AT_ONCE = 8
"""Shards whose digests are computed at the same time."""


def save(folder: Path, step: int, state: Mapping[str, Any], facts: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint of `step` in one file and remove older ones but the newest `keep`.

    facts: small values for the .json file.

    Raises:
        WriteError: the file cannot be written.
    """
    path = folder / f"step_{step:08d}.pt"
    try:
        write_marked(path, state, {"step": step, **facts})
    except io.WriteError as error:
        raise io.WriteError(f"{error}. Earlier checkpoints are untouched") from error
    remove_old(path, keep)
    return path


def newest(folder: Path, at_most: int | None = None) -> Path | None:
    """Return the newest valid checkpoint, None if there is none. Invalid ones are named in the log.

    at_most: largest number of steps.
    """
    for path in reversed(checkpoints_in(folder)):
        if at_most is not None and step_of(path) > at_most:
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
    marks: list[dict[str, Any]] = [damage.read(partial(io.read_json, path, io.MB), {}) for path in paths]
    return next((mark[name] for mark in marks if name in mark), None)


def value_of_best(folder: Path, best: Callable[[Iterable[float]], float] = max) -> float | None:
    """Return the value of the metric in the mark of the best checkpoint; None without one, or if it is damaged.

    best: min for a metric of which lower values are better.
    """
    damage = io.DamageLog()
    values = [damage.read(partial(_value, mark), None) for mark in sorted(folder.glob("*.json"))]
    known = [value for value in values if value is not None]
    return best(known) if known else None


def load_newest(folder: Path) -> tuple[dict[str, Any], Path] | None:
    """Return the content of the newest valid checkpoint, on the CPU, and its path."""
    path = newest(folder)
    return None if path is None else (read(path, verified=True), path)


def read(
    path: Path,
    *parts: str,
    layout: Layout = everything,
    without: Collection[str] = (),
    verified: bool = False,
    mapped: bool = False,
) -> dict[str, Any]:
    """Return a checkpoint's content, on the CPU.

    parts: names that must be in it. layout: the parts of tensors that this rank needs. without: names that are left
    out. verified: the digests of its shards have been compared with its manifest. mapped: see `read_tensors`.

    Raises:
        DamagedFileError: a file is missing or no checkpoint, or holds objects other than weights and plain values.
    """
    if is_sharded(path):
        # Imports torch.distributed.checkpoint, which takes half a second.
        from clipzoo.training.checkpoints.sharded_reader import read_sharded

        for name, fault in () if verified else _damaged_shards(path):
            raise io.DamagedFileError(io.below(path, name), f"is damaged ({fault})", REMEDY)
        content = read_sharded(path, layout, without)
    else:
        content = {key: value for key, value in read_tensors(path, REMEDY, mapped).items() if key not in without}
        if layout is not everything:
            content = pieces.mapped(
                content, lambda place, tensor: tensor[layout(place, tuple(tensor.shape)).slices].clone()
            )
    if not content.keys() >= set(parts):
        raise io.DamagedFileError(path, f"holds no {' and '.join(parts)}", REMEDY)
    return content


def _value(mark: Path) -> float | None:
    content = io.read_json(mark, io.MB, "the next evaluation writes it again")
    io.require_fields(mark, content, {"value": (int, float)})
    return content["value"]


def _fault(path: Path) -> str | None:
    """Return the reason why a checkpoint is invalid, None if it is valid."""
    mark = mark_of(path)
    if not mark.exists():
        return f"it is incomplete (there is no {mark.name})"
    try:
        expected = io.read_json(mark, io.MB)
        io.require_fields(mark, expected, {"bytes": int, "sha256": str})
        if not is_sharded(path):
            return _difference(path, StoredFile(expected["bytes"], expected["sha256"]), mark.name)
        fault = _difference(path / MANIFEST, StoredFile(expected["bytes"], expected["sha256"]), mark.name)
        damaged = [(MANIFEST, fault)] if fault else _damaged_shards(path)
    except io.DamagedFileError as error:
        return f"{error.path.name} {error.fault}"
    return next((f"{name}: {fault}" for name, fault in damaged), None)


def _damaged_shards(path: Path) -> list[tuple[str, str]]:
    """Return the names of damaged shards, and what is wrong with them. Raises DamagedFileError."""
    files = read_manifest(path).files
    with ThreadPoolExecutor(HASHED_AT_ONCE, "digest") as threads:
        faults = threads.map(lambda name: _difference(io.below(path, name), files[name], MANIFEST), files)
        return [(name, fault) for name, fault in zip(files, faults, strict=True) if fault is not None]


def _difference(path: Path, expected: StoredFile, record: str) -> str | None:
    """Return in which way a file differs from what the file `record` says about it."""
    if not path.is_file():
        return "it is missing"
    if path.stat().st_size != expected.bytes:
        return f"it has {path.stat().st_size} bytes, {record} says {expected.bytes}"
    return None if sha256(path) == expected.sha256 else f"its SHA-256 differs from the one in {record}"
