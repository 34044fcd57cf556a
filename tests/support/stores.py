"""A store in memory that fails on request: `faulty://...`, a file system of fsspec."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem

from clipzoo.training import checkpoint_files


class FaultyFileSystem(MemoryFileSystem):
    """operations: what was done to which file, such as ("put", "a/config.yaml"), in order.

    before_get: called before metrics.jsonl is read. faults: by operation, errors to raise the next times, or
    "truncated": half of the bytes are stored.
    """

    protocol = "faulty"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    operations: list[tuple[str, str]] = []
    before_get: Callable[[str], object] = staticmethod(lambda name: None)
    faults: dict[str, list[Exception | str]] = {}
    creating = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("faulty://", "memory://")))

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        fault = self._begin("put", rpath)
        content = Path(lpath).read_bytes()
        self.pipe_file(rpath, content[: len(content) // 2] if fault == "truncated" else content)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        with self.creating:  # exclusive creation is atomic, as in S3
            super().pipe_file(path, value, mode=mode, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        fault = self._begin("get", path)
        if path.endswith("metrics.jsonl"):
            type(self).before_get(path)
        content: bytes = super().cat_file(path, start, end)
        return content[: len(content) // 2] if fault == "truncated" else content

    def rm_file(self, path: str) -> None:
        self._begin("remove", path)
        super().rm_file(path)

    @classmethod
    def _begin(cls, operation: str, path: str) -> str | None:
        name = cls._strip_protocol(path).lstrip("/")
        waiting = [key for key in cls.faults if name.endswith(key.partition(" ")[2]) and key.startswith(operation)]
        for key in waiting:
            if cls.faults[key]:
                fault = cls.faults[key].pop(0)
                if isinstance(fault, Exception):
                    raise fault
                return fault
        cls.operations.append((operation, name))
        return None


@contextmanager
def faulty_store() -> Iterator[type[FaultyFileSystem]]:
    """Register an empty store for URLs `faulty://...`."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    FaultyFileSystem.store.clear()
    FaultyFileSystem.pseudo_dirs[:] = [""]
    FaultyFileSystem.operations.clear()
    FaultyFileSystem.faults.clear()
    FaultyFileSystem.before_get = staticmethod(lambda name: None)
    yield FaultyFileSystem
    FaultyFileSystem.store.clear()


def save_checkpoint(folder: Path, step: int, keep: int = 2, size: int = 1000) -> None:
    """Write the checkpoint of a step, and remove old ones as a training does."""
    checkpoint_files.save(
        folder / "checkpoints", step, {"step": step, "weight": torch.full((size,), float(step))}, {}, keep
    )


def log_step(folder: Path, step: int) -> None:
    """Append a line to metrics.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": 1.0 / step}) + "\n")
