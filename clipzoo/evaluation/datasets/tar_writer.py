"""Write evaluation datasets in the tar layout of CLIP_benchmark (see `tar_dataset`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.images import EXTENSIONS
from clipzoo.evaluation.datasets.tar_dataset import NAMES_FILE, TEMPLATES_FILE
from clipzoo.io import below, new_folder, write_json, write_whole


class SplitFacts(TypedDict):
    """A split in meta.json: the number of samples and a digest of their bytes."""

    samples: int
    digest: str


def write_classification(
    folder: Path,
    *,
    class_names: Sequence[str],
    templates: Sequence[str],
    metric: str,
    recipe: str,
    splits: Mapping[str, Iterable[tuple[bytes, int]]],
    shard_size: int = 1000,
) -> None:
    """Write a classification dataset; the encoded images are stored unchanged.

    folder: of the dataset; it appears only when it is complete. metric: "top1" or "mean_per_class". recipe: a sentence
    on how the splits were made, for meta.json. splits: (encoded image, label) pairs. shard_size: samples per tar.
    """
    with _new_dataset(folder) as new:
        write_whole(new / NAMES_FILE, _joined(class_names))
        write_whole(new / TEMPLATES_FILE, _joined(templates))
        facts = {
            split: _write_split(
                below(new, split), ((image, "cls", str(label)) for image, label in examples), shard_size
            )
            for split, examples in splits.items()
        }
        _describe(new, "classification", {"metric": metric, "recipe": recipe, "splits": facts})


def write_retrieval(
    folder: Path, *, recipe: str, examples: Iterable[tuple[bytes, Sequence[str]]], shard_size: int = 1000
) -> None:
    """Write a retrieval dataset with the split "test". examples: encoded images with their captions."""
    with _new_dataset(folder) as new:
        rows = ((image, "txt", _joined(captions)) for image, captions in examples)
        facts = {"test": _write_split(new / "test", rows, shard_size)}
        _describe(new, "retrieval", {"recipe": recipe, "splits": facts})


@contextmanager
def _new_dataset(folder: Path) -> Iterator[Path]:
    """A folder to write to that takes its name when all is written, and is removed after an error."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already: remove it to write the dataset again")
    with new_folder(folder) as new:
        yield new


def _write_split(folder: Path, rows: Iterable[tuple[bytes, str, str]], shard_size: int) -> SplitFacts:
    """Write (image, extension of the annotation, annotation) rows to tars of `shard_size` samples."""
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
    write_whole(folder / "nshards.txt", f"{shards}\n")
    return {"samples": count, "digest": digest.hexdigest()}


def _describe(folder: Path, kind: str, meta: Mapping[str, object]) -> None:
    write_whole(folder / "dataset_type.txt", kind + "\n")
    write_json(folder / "meta.json", meta)


def _image_extension(image: bytes) -> str:
    for signature, extension in EXTENSIONS.items():
        if image.startswith(signature):
            return extension
    raise ConfigError(f"the tar layout holds JPEG, PNG and WebP images, not one that begins with {image[:8]!r}")


def _joined(lines: Sequence[str]) -> str:
    for line in lines:
        if line != line.strip() or len(line.splitlines()) != 1:
            raise ConfigError(f"the tar layout has one name, template or caption per line: {line!r} is not one line")
    return "\n".join(lines) + "\n"
