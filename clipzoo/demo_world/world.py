"""The generated world: a data set of scenes that is made on the spot, worth learning in minutes on two cores.

    <root>/train/00000.tar ...     pairs in img2dataset's layout: jpg, txt, json (caption, size, facts of the scene)
    <root>/downstream/<set>/       held-out sets in CLIP_benchmark's layout: shapes, colours, textures, counts, scenes
    <root>/world.json              parameters, code and digest; there only when all the rest is

Scenes hold coloured, textured shapes: one of three sizes, one to five alike, or two side by side or stacked, on six
backgrounds. What is held out is scenes: the downstream sets draw from random streams of their own, so that no picture
and no caption was trained on as it is, but every shape, colour, texture, count and background occurs in training, also
in combination.

A world is a pure function of its parameters: a rerun gives the same bytes, with any number of processes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from clipzoo.demo_world import parts as world_parts
from clipzoo.demo_world.parts import World
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets import tar_writer

RECORD = "world.json"


def ensure_world(root: Path, world: World, processes: int, progress: Callable[[int, int], None]) -> bool:
    """Make the world at `root` unless it is there, whole and made with the same parameters and code.

    progress(images done, images in all) is called now and then. Returns whether anything had to be made. What was
    interrupted left nothing under `root` and is made again; another world there is replaced.
    """
    root = Path(root).absolute()
    with _alone(root):
        if is_complete(root, world):
            return False
        if root.exists() and any(root.iterdir()) and not (root / RECORD).exists():
            raise ConfigError(f"{root} holds something else than a generated world: give another folder or remove it")
        partial, old = (root.with_name(f".{root.name}.{suffix}") for suffix in ("partial", "old"))
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        _make(partial, world, processes, progress)
        if root.exists():
            os.replace(root, old)
        os.replace(partial, root)
        shutil.rmtree(old, ignore_errors=True)
    return True


def is_complete(root: Path, world: World) -> bool:
    """Whether `root` holds exactly this world: parameters, code and every file's bytes."""
    path = root / RECORD
    if not path.is_file():
        return False
    record = json.loads(path.read_text())
    if {key: record.get(key) for key in ("parameters", "code")} != _recipe(world):
        return False
    files = record["files"]
    return all((root / name).is_file() and _digest(root / name) == digest for name, digest in files.items())


def _make(folder: Path, world: World, processes: int, progress: Callable[[int, int], None]) -> None:
    folder.mkdir(parents=True)
    parts = world_parts.parts(world)
    total, done = sum(part.images for part in parts), 0
    for images in _finished(parts, folder, processes):
        done += images
        progress(done, total)
    files = {str(path.relative_to(folder)): _digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    record = _recipe(world) | {"digest": digest, "files": files}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def _finished(parts: list[world_parts.Part], folder: Path, processes: int) -> Iterator[int]:
    """Makes every part; yields the number of images of each as it is finished."""
    if processes <= 1:
        for part in parts:
            yield part.make(folder)
        return
    # Fresh interpreters: a fork of a process that has used torch's threads may hang.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(part.make, folder) for part in parts]):
            yield future.result()


def _recipe(world: World) -> dict[str, Any]:
    """What decides the world's bytes. The code is named by its digest: a world of older code is made again."""
    sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(tar_writer.__file__)]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return {"parameters": asdict(world), "code": code}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One process at a time makes a world at `root`; the others wait and then find it."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_name(f".{root.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
