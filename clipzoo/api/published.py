"""Models in directories that others have published: clipzoo.json and model.safetensors. Nothing in them is executed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from clipzoo import io
from clipzoo.config.trust import require_trusted, values_of
from clipzoo.errors import ConfigError
from clipzoo.io.weights import from_hub, read_tensors
from clipzoo.runs.renamed import current

CONFIG, WEIGHTS = "clipzoo.json", "model.safetensors"
HUB = "hf-hub:"
VERSION = 1
FILES = ("*.json", "*.safetensors")
"""Files of a hub's repository that are downloaded."""
REMEDY = "export the model again"
FIELDS = {"version": int, "encoder": dict, "head": dict, "interpolation": str}
PREPROCESSING, PAIR_FIELDS = ("interpolation", "resize_mode"), ("log_scale", "bias")
HERE = "."
"""Name of a tokenizer whose files are in the directory."""
OUTSIDE = ("/", "~", "\\", "local-dir:", HUB)
"""Beginnings of values that name files elsewhere."""


def is_published(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def downloaded(name: str) -> Path:
    """Download "hf-hub:USER/NAME" or "hf-hub:USER/NAME@REVISION" and return its folder in the hub's cache.

    Raises:
        ConfigError: the hub has no such model, or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.removeprefix(HUB).partition("@")
    with from_hub(name, f"{name} cannot be downloaded"):
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(FILES)))


def read_published(folder: Path, trust: Collection[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return configuration and weights of a directory.

    Raises:
        ConfigError: the directory names code, classes of packages that are not trusted, or files outside it, or its
            weights are no safetensors file.
    """
    path = folder / CONFIG
    # Files of the hub's cache are links to its blobs.
    blobs = [folder.resolve().parent.parent / "blobs"] if folder.resolve().parent.name == "snapshots" else []
    io.require_no_links(folder, *blobs)
    _refuse_code(folder)
    content = io.read_json(path, io.MB, REMEDY)
    io.require_fields(path, content, FIELDS, REMEDY)
    if content["version"] > VERSION:
        raise ConfigError(f"{path} has version {content['version']}, this clipzoo reads up to {VERSION}: upgrade it")
    nodes = current({"encoder": content["encoder"], "head": content["head"]})
    require_trusted(nodes, trust)
    if fault := next(value_faults(nodes), None):
        raise ConfigError(f"{path}: {fault}")
    tokenizer = nodes["encoder"].get("tokenizer")
    if isinstance(tokenizer, dict) and tokenizer.get("name") == HERE:
        tokenizer["name"] = str(folder)
    config = {**nodes, "seed": 0, "data": {key: content[key] for key in PREPROCESSING if key in content}}
    if "pair" in content:
        io.require_fields(path, content, {"pair": dict}, REMEDY)
        io.require_numbers(path, {key: content["pair"].get(key) for key in PAIR_FIELDS}, REMEDY)
        config["pair"] = {key: content["pair"][key] for key in PAIR_FIELDS}
    return config, read_weights(folder / WEIGHTS)


def value_faults(nodes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values that a published model must not have: other weights, variables, places outside its directory."""
    for key, value in values_of(nodes):
        if key.endswith("pretrained") and value not in (None, False):
            yield f"{key}={value} asks for other weights than those of the directory"
        if not isinstance(value, str):
            continue
        if "${" in value:
            yield f"{key} refers to a variable, {value}: a published model has plain values"
        if value.startswith(OUTSIDE) or "://" in value or ".." in value.replace("\\", "/").split("/"):
            yield f"{key}={value} names a place outside the directory"


def _refuse_code(folder: Path) -> None:
    """Raise ConfigError if a JSON file of the directory names code that transformers would import."""
    for file in sorted(folder.glob("*.json")):
        text = io.read_bytes(file, 64 * io.MB, REMEDY)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            continue  # clipzoo.json is read below, with a message of its own; no other file is used
        if isinstance(content, Mapping) and "auto_map" in content:
            raise ConfigError(f"{file} names code in auto_map: clipzoo executes no code of a model; remove the entry")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises DamagedFileError."""
    if not path.exists():
        others = sorted(file.name for file in path.parent.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".pkl"))
        note = f"{', '.join(others)} may execute code and is not read; " if others else ""
        raise io.DamagedFileError(path, "is missing", note + REMEDY)
    return read_tensors(path, REMEDY)
