"""A folder that is a function of a recipe: written completely or not at all, and written again when it has changed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clipzoo.errors import ConfigError
from clipzoo.io.names import below
from clipzoo.io.reading import ANY_SIZE, MB, DamageLog, read_json, readable
from clipzoo.io.writing import new_folder, write_whole


def ensure_folder(
    root: Path, record: str, recipe: Mapping[str, object], write: Callable[[Path], None], contents: str
) -> bool:
    """Fill `root` by `write(folder)` unless it is complete, unchanged and made from the same recipe.

    An interruption leaves nothing under `root`; a folder from another recipe is replaced. Other files may be added to
    it. One process at a time writes; the others wait and then use the folder.

    record: name of the JSON file in `root` with the recipe and the digests of all files; written last. recipe:
    everything that determines the files, as JSON holds it. contents: words for the message, "a generated world".

    Returns:
        True if the folder was written.

    Raises:
        ConfigError: `root` holds other files.
        WriteError: the disk is full.
    """
    root = Path(root).absolute()
    with _locked(root):
        if is_complete(root, record, recipe):
            return False
        if root.exists() and any(root.iterdir()) and not (root / record).exists():
            raise ConfigError(f"{root} holds something else than {contents}: choose another folder or remove it")
        old = root.with_name(f".{root.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        with new_folder(root) as folder:
            write(folder)
            files = {str(path.relative_to(folder)): digest_of(path) for path in _files(folder)}
            digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
            write_whole(folder / record, json.dumps({**recipe, "digest": digest, "files": files}, indent=1) + "\n")
            if root.exists():
                os.rename(root, old)
        shutil.rmtree(old, ignore_errors=True)
    return True


def is_complete(root: Path, record: str, recipe: Mapping[str, object]) -> bool:
    """Return True if `root` was made from this recipe and all its files are unchanged."""
    path = root / record
    if not path.is_file():
        return False
    facts: dict[str, Any] = DamageLog().read(lambda: read_json(path, 16 * MB, "the folder is written again"), {})
    files = facts.get("files")
    if {key: facts.get(key) for key in recipe} != dict(recipe) or not isinstance(files, dict):
        return False
    return all(below(root, name).is_file() and digest_of(below(root, name)) == digest for name, digest in files.items())


def digest_of(*paths: Path) -> str:
    """SHA-256 of the content of files, end to end."""
    digest = hashlib.sha256()
    for path in paths:
        with readable(path, ANY_SIZE) as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_name(f".{root.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
