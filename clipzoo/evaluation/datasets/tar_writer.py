"""Writes downstream sets in CLIP_benchmark's layout (see `downstream`), with the original bytes of the images."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from clipzoo.errors import ConfigError

_SIGNATURES = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp"}


def write_classification(
    folder: Path,
    *,
    class_names: list[str],
    templates: list[str],
    metric: str,
    recipe: str,
    splits: Mapping[str, Iterable[tuple[bytes, int]]],
    shard_size: int = 1000,
) -> None:
    """splits: (encoded image, label) of each; recipe: a sentence on how the splits were made, for meta.json."""
    with _NewSet(folder) as new:
        (new / "classnames.txt").write_text(_joined(class_names), encoding="utf-8")
        (new / "zeroshot_classification_templates.txt").write_text(_joined(templates), encoding="utf-8")
        facts = {
            split: _write_split(new / split, ((image, "cls", str(label)) for image, label in examples), shard_size)
            for split, examples in splits.items()
        }
        _describe(new, "classification", {"metric": metric, "recipe": recipe, "splits": facts})


def write_retrieval(
    folder: Path, *, recipe: str, examples: Iterable[tuple[bytes, list[str]]], shard_size: int = 1000
) -> None:
    """examples: (encoded image, its captions); they become the split "test"."""
    with _NewSet(folder) as new:
        rows = ((image, "txt", _joined(captions)) for image, captions in examples)
        facts = {"test": _write_split(new / "test", rows, shard_size)}
        _describe(new, "retrieval", {"recipe": recipe, "splits": facts})


class _NewSet:
    """A folder that appears under its name only when it is whole."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._partial = folder, folder.with_name(f".{folder.name}.partial")

    def __enter__(self) -> Path:
        if self._folder.exists():
            raise ConfigError(f"{self._folder} exists already: remove it to make the set again")
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        return self._partial

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is None:
            os.replace(self._partial, self._folder)
        else:
            shutil.rmtree(self._partial)


def _write_split(folder: Path, rows: Iterable[tuple[bytes, str, str]], shard_size: int) -> dict[str, Any]:
    """Rows are (image, extension of the annotation, annotation). Returns the split's facts for meta.json."""
    from webdataset.writer import ShardWriter  # imports torch

    folder.mkdir()
    digest = hashlib.sha256()
    count = 0
    with ShardWriter(f"{folder}/%d.tar", maxcount=shard_size, verbose=0, mtime=0) as writer:
        for image, extension, annotation in rows:
            encoded = annotation.encode("utf-8")
            digest.update(hashlib.sha256(image).digest() + hashlib.sha256(encoded).digest())
            writer.write({"__key__": f"s{count:07d}", _image_extension(image): image, extension: encoded})
            count += 1
        shards = writer.shard
    (folder / "nshards.txt").write_text(f"{shards}\n")
    return {"samples": count, "digest": digest.hexdigest()}


def _describe(folder: Path, kind: str, meta: dict[str, Any]) -> None:
    (folder / "dataset_type.txt").write_text(kind + "\n")
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _image_extension(image: bytes) -> str:
    for signature, extension in _SIGNATURES.items():
        if image.startswith(signature):
            return extension
    raise ConfigError(f"the layout holds JPEG, PNG and WebP images, not one that begins with {image[:8]!r}")


def _joined(lines: list[str]) -> str:
    for line in lines:
        if line != line.strip() or len(line.splitlines()) != 1:
            raise ConfigError(f"the layout has one name, template or caption a line: {line!r} is not one line")
    return "\n".join(lines) + "\n"
