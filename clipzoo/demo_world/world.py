"""The generated world: a small dataset of scenes on which a model learns in minutes on two cores.

    <root>/train/00000.tar ...        training pairs in img2dataset's layout: jpg, txt, json (caption, size, scene)
    <root>/downstream/<dataset>/      held-out datasets in CLIP_benchmark's layout: shapes, colours, textures, counts,
                                      scenes
    <root>/world.json                 parameters and digests; written last

A scene shows coloured, textured shapes on one of six backgrounds: a single one in one of three sizes, one to five
equal ones, or two side by side or stacked. The downstream datasets use their own random streams: their images are not
in the training split, but all shapes, colours, textures, counts and backgrounds are, also in combination.

A world is a pure function of its parameters: any number of processes writes the same bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.data.children import map_in_children
from clipzoo.demo_world import parts as world_parts
from clipzoo.demo_world.parts import Part, WorldParameters
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets import tar_writer

RECORD = "world.json"


def ensure_world(root: Path, parameters: WorldParameters, processes: int, progress: Callable[[int, int], None]) -> bool:
    """Generate the world at `root` unless it exists, complete and with the same parameters and code.

    An interrupted generation leaves nothing under `root`; a different world there is replaced.
    progress(images done, images in total) is called after every part. Returns True if the world was generated. Raises
    ConfigError if `root` holds anything else.
    """
    root = Path(root).absolute()
    with _locked(root):
        if is_complete(root, parameters):
            return False
        if root.exists() and any(root.iterdir()) and not (root / RECORD).exists():
            raise ConfigError(f"{root} holds something else than a generated world: choose another folder or remove it")
        partial, old = (root.with_name(f".{root.name}.{suffix}") for suffix in ("partial", "old"))
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        with io.explained(root, only_full_disks=True):
            _generate(partial, parameters, processes, progress)
        if root.exists():
            os.replace(root, old)
        os.replace(partial, root)
        shutil.rmtree(old, ignore_errors=True)
    return True


def is_complete(root: Path, parameters: WorldParameters) -> bool:
    """Return True if `root` holds exactly this world: same parameters and code, and all files unchanged."""
    path = root / RECORD
    if not path.is_file():
        return False
    record: dict[str, Any] = io.DamageLog().read(lambda: io.read_json(path, "the world is generated again"), {})
    files = record.get("files")
    if {key: record.get(key) for key in ("parameters", "code")} != _recipe(parameters) or not isinstance(files, dict):
        return False
    return all((root / name).is_file() and _digest(root / name) == digest for name, digest in files.items())


def _generate(folder: Path, parameters: WorldParameters, processes: int, progress: Callable[[int, int], None]) -> None:
    folder.mkdir(parents=True)
    parts = world_parts.parts(parameters)
    total, done = sum(part.images for part in parts), 0
    for part in _write(parts, folder, processes):
        done += part.images
        progress(done, total)
    files = {str(path.relative_to(folder)): _digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    record = _recipe(parameters) | {"digest": digest, "files": files}
    io.write_whole(folder / RECORD, json.dumps(record, indent=1) + "\n")


def _write(parts: list[Part], folder: Path, processes: int) -> Iterator[Part]:
    """Write all parts; yield each when it is complete."""
    if processes <= 1:
        for part in parts:
            part.write(folder)
            yield part
        return
    yield from map_in_children(partial(_write_part, folder), parts, processes, chunk=1)


def _write_part(folder: Path, part: Part) -> Part:
    part.write(folder)
    return part


def _recipe(parameters: WorldParameters) -> dict[str, object]:
    """Return everything that determines the bytes of the world: its parameters and a digest of the code."""
    sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(tar_writer.__file__)]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return {"parameters": asdict(parameters), "code": code}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Let one process at a time generate a world at `root`; the others wait and then use it."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_name(f".{root.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
