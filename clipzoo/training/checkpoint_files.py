"""Checkpoints on the disk, written completely or not at all, in one file or in one for each rank.

    step_00001234.pt          tensors and plain values as torch.save writes them, or
    step_00001234/            a shard for each rank and a manifest: `clipzoo.training.sharded_checkpoints`
    step_00001234.json        written last: size and SHA-256 of the file or of the manifest, and a few facts

The .json file marks the checkpoint as complete. After a kill or on a full disk, previous checkpoints remain valid
(`clipzoo.io.whole`). Nothing in a checkpoint is executed when it is read.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup

from clipzoo import io
from clipzoo.distributed.world import gather_objects
from clipzoo.io.weights import MANIFEST, checkpoints_in, is_sharded, mark_of, read_tensors, step_of
from clipzoo.training.sharded_checkpoints import (
    REMEDY,
    Chunks,
    HashedFile,
    Layout,
    Piece,
    StoredFile,
    chunks_of,
    map_tensors,
    read_manifest,
    read_sharded,
    write_manifest,
    write_shard,
)

T = TypeVar("T")
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
    _remove_old(path, keep)
    return path


def save_sharded(
    path: Path,
    pieces: Mapping[str, Piece],
    state: Any,
    facts: Mapping[str, Any],
    keep: int,
    rank: int,
    group: ProcessGroup | None,
    written: Callable[[], None] = lambda: None,
) -> None:
    """Write the checkpoint <folder>/step_<step>, then remove older ones but the newest `keep`. Collective.

    pieces: this rank's parts of the tensors, on the CPU, by name. state: `encoded` state, of the first rank. facts:
    small values for the .json file. group: process group of all ranks with a CPU backend; None for a single process.
    written: called when this rank's file is on the disk.

    Raises:
        WriteError: a file cannot be written, on this or another rank.
    """
    temporary = path.with_name(f".{path.name}.tmp")

    def begin() -> Chunks:
        if rank == 0:
            with io.explained(path):
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
        return chunks_of(pieces)

    chunks = _on_all_ranks(begin, group)

    def write() -> dict[str, Any]:
        shard = write_shard(temporary, rank, pieces, chunks)
        written()
        return shard

    shards = _on_all_ranks(write, group)

    def publish() -> None:
        if rank == 0:
            manifest = write_manifest(temporary, state, shards)
            with io.explained(path):
                _remove(path)
            io.publish_folder(temporary, path)
            io.write_json(mark_of(path), {**facts, **vars(manifest)})
            _remove_old(path, keep)

    _on_all_ranks(publish, group)


def write_marked(path: Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Write a file of tensors and the .json that marks it as complete; return its SHA-256.

    facts: small values for the .json file.

    Raises:
        WriteError: a file cannot be written.
    """
    with io.whole(path) as file:
        hashed: Any = HashedFile(file)
        try:
            torch.save(state, hashed)
        except RuntimeError:
            # torch hides the system's error, for example of a full disk.
            if hashed.error is not None:
                raise hashed.error from None
            raise
    stored: StoredFile = hashed.stored()
    io.write_json(mark_of(path), {**facts, **vars(stored)})
    return stored.sha256


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


def load_newest(folder: Path) -> tuple[dict[str, Any], Path] | None:
    """Return the content of the newest valid checkpoint, on the CPU, and its path."""
    path = newest(folder)
    return None if path is None else (read(path, verified=True), path)


def read(
    path: Path,
    *parts: str,
    layout: Layout | None = None,
    without: Collection[str] = (),
    verified: bool = False,
    mapped: bool = False,
) -> dict[str, Any]:
    """Return a checkpoint's content, on the CPU.

    parts: names that must be in it. layout: the parts of tensors that this rank needs; None for whole tensors. without:
    names that are left out. verified: the digests of its shards have been compared with its manifest. mapped: see
    `read_tensors`.

    Raises:
        DamagedFileError: a file is missing or no checkpoint, or holds objects other than weights and plain values.
    """
    if is_sharded(path):
        for name, fault in () if verified else _damaged_shards(path):
            raise io.DamagedFileError(io.below(path, name), f"is damaged ({fault})", REMEDY)
        content = read_sharded(path, layout, without)
    else:
        content = {key: value for key, value in read_tensors(path, REMEDY, mapped).items() if key not in without}
        if layout is not None:
            content = map_tensors(
                content, lambda keys, tensor: tensor[layout(keys, tuple(tensor.shape)).slices].clone()
            )
    if not content.keys() >= set(parts):
        raise io.DamagedFileError(path, f"holds no {' and '.join(parts)}", REMEDY)
    return content


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

    def value_in(mark: Path) -> float:
        content = io.read_json(mark, io.MB, "the next evaluation writes it again")
        io.require_fields(mark, content, {"value": (int, float)})
        return content["value"]

    damage = io.DamageLog()
    values = [damage.read(partial(value_in, mark), None) for mark in sorted(folder.glob("*.json"))]
    known = [value for value in values if value is not None]
    return best(known) if known else None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _on_all_ranks(action: Callable[[], T], group: ProcessGroup | None) -> list[T]:
    """Run `action` on every rank and return the results in rank order; the error of one is raised on all."""
    result: Any = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    outcomes = [(result, failure)] if group is None else gather_objects((result, failure), group)
    failures = [failure for _, failure in outcomes if failure is not None]
    for failure in failures:
        if isinstance(failure, io.WriteError):
            raise io.WriteError(f"{failure}. Earlier checkpoints are untouched") from None
    if failures:
        raise failures[0]
    return [result for result, _ in outcomes]


def _remove_old(path: Path, keep: int) -> None:
    """Remove checkpoints before `path` but the `keep` - 1 newest complete ones. Later ones will be overwritten."""
    others = [other for other in checkpoints_in(path.parent) if other != path]
    earlier = [other for other in others if step_of(other) < step_of(path)]
    complete = [other for other in [*earlier, path] if mark_of(other).exists()]
    for old in earlier:
        if old not in complete[-keep:]:
            _remove(old)
    # This step may also exist in the other format; its mark now belongs to `path`.
    twins = [other for other in others if step_of(other) == step_of(path)]
    for leftover in [*twins, *path.parent.glob(".step_*.tmp")]:
        _remove_content(leftover)


def _remove(path: Path) -> None:
    """Remove a checkpoint, its mark first: after an interruption, the rest counts as incomplete."""
    mark_of(path).unlink(missing_ok=True)
    _remove_content(path)


def _remove_content(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _fault(path: Path) -> str | None:
    """Return the reason why a checkpoint is invalid, None if it is valid."""
    mark = mark_of(path)
    if not mark.exists():
        return f"it is incomplete (there is no {mark.name})"
    try:
        content = io.read_json(mark, io.MB)
        io.require_fields(mark, content, {"bytes": int, "sha256": str})
        expected = StoredFile(content["bytes"], content["sha256"])
        if not is_sharded(path):
            return _difference(path, expected, mark.name)
        fault = _difference(path / MANIFEST, expected, mark.name)
        damaged = [(MANIFEST, fault)] if fault else _damaged_shards(path)
    except io.DamagedFileError as error:
        return f"{error.path.name} {error.fault}"
    return next((f"{name}: {fault}" for name, fault in damaged), None)


def _damaged_shards(path: Path) -> list[tuple[str, str]]:
    """Return the names of damaged shards, and their faults. Raises DamagedFileError."""
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
