"""Weights by the name that a configuration gives them: their file and its digest. Needs no torch."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from clipzoo.errors import ConfigError
from clipzoo.io.reading import read_json, readable, require_fields

REGISTRIES = ("open_clip", "timm", "huggingface")
RANDOM = "random"
"""The name of the initial values that the seed gives."""
BLOCK = 2**24
"""Bytes that are read at once."""
MANIFEST = "manifest.json"
"""File of a sharded checkpoint's folder that lists the others."""
_NAME = re.compile(r"step_(\d+)(\.pt)?")
FORMS_ON_DISK = "a run directory, one of its checkpoints or a .safetensors file"
FORMS = f"{FORMS_ON_DISK}, open_clip:NAME/TAG, timm or huggingface"


def registry_of(name: str) -> str | None:
    """Return the registry that has the weights: "timm" for "timm" and "timm:NAME"; None for weights on the disk."""
    registry = name.partition(":")[0]
    return registry if registry in REGISTRIES else None


def weights_file(name: str, key: str) -> Path:
    """Return the file of weights on the disk: of a run its newest complete checkpoint, of an export its safetensors.

    A sharded checkpoint is a folder.

    key: of the configuration, for the message.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(name)
    if path.is_file() or is_sharded(path):
        return path
    if "://" in name:
        raise ConfigError(f"{key}={name} is in a store, but weights are read from the disk: give {key} a local copy")
    if not path.exists():
        raise ConfigError(f"{key}={name} does not exist: give {FORMS}")
    if (path / "config.yaml").exists():
        checkpoints = [one for one in checkpoints_in(path / "checkpoints") if mark_of(one).exists()]
        if not checkpoints:
            raise ConfigError(f"{key}={name} is a run without a checkpoint: train it first")
        return checkpoints[-1]
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ConfigError(f"{key}={name} is no run and not a folder with one .safetensors file (it has {found})")
    return files[0]


def weights_digest(name: str, key: str) -> str:
    """Return the SHA-256 of weights on the disk; weights of a registry are known by their name.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    registry = registry_of(name)
    place = name if registry is None else _place_on_disk(registry, name)
    if name == RANDOM or place is None:
        return name
    path = weights_file(place, key)
    # Beside a file of another program stands a .json of another program.
    if mark_of(path).exists() and is_checkpoint(path) and (run_of(path) / "config.yaml").exists():
        content = read_json(mark_of(path), "give another checkpoint")
        require_fields(mark_of(path), content, {"sha256": str})
        return content["sha256"]
    digest = hashlib.sha256()
    with readable(path / MANIFEST if is_sharded(path) else path) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _place_on_disk(registry: str, name: str) -> str | None:
    """Return the file or folder that a registry's name leads to: open_clip:local-dir:FOLDER, open_clip:NAME/FILE,
    huggingface:FOLDER; None if it leads to the registry."""
    rest = name.partition(":")[2]
    if rest.startswith("local-dir:"):
        return rest.removeprefix("local-dir:")
    place = rest.partition("/")[2] if registry == "open_clip" else rest
    return place if place and Path(place).exists() else None


def mark_of(checkpoint: Path) -> Path:
    """Return the .json file that marks a checkpoint as complete."""
    return checkpoint.with_suffix(".json")


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, in files or sharded, complete or not, from the oldest to the newest."""
    return sorted((path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)), key=step_of)


def is_checkpoint(path: Path) -> bool:
    """Return True for a checkpoint: its file or folder, or a path with the name of one at which there is nothing.

    A run may have any name, also "x.pt": its directory has a config.yaml.
    """
    if path.is_dir():
        return is_sharded(path)
    return _NAME.fullmatch(path.name) is not None or (path.suffix == ".pt" and path.is_file())


def is_sharded(path: Path) -> bool:
    """Return True for the folder of a sharded checkpoint; False for a checkpoint in one file, and for a run."""
    return path.is_dir() and _NAME.fullmatch(path.name) is not None and not (path / "config.yaml").exists()


def step_of(checkpoint: Path) -> int:
    """Return the number of steps after which a checkpoint was saved.

    Raises:
        ConfigError: its name does not say so.
    """
    name = _NAME.fullmatch(checkpoint.name)
    if name is None:
        raise ConfigError(f"{checkpoint} does not have the name of a run's checkpoint: give RUN/checkpoints/step_*.pt")
    return int(name[1])


def run_of(path: Path) -> Path:
    """Return the run directory of a checkpoint <run>/checkpoints/step_*, or `path` itself."""
    return path.parent.parent if is_checkpoint(path) else path
