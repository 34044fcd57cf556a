"""Downstream sets in CLIP_benchmark's layout, read from their tars at random.

    <root>/<set>/classnames.txt                              a class a line, in the order of the labels
    <root>/<set>/zeroshot_classification_templates.txt       a template a line, with {c}
    <root>/<set>/dataset_type.txt                            "retrieval", or "classification" (as where it is missing)
    <root>/<set>/<split>/nshards.txt                         k
    <root>/<set>/<split>/{0..k-1}.tar                        an image with .cls (label) or .txt (a caption a line)
    <root>/<set>/meta.json                                   ours, optional: metric, recipe, counts and digests

Sets that CLIP_benchmark exported open as they are; what `downstream_writer` writes opens there.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from clipzoo.data.shards.tar import list_members
from clipzoo.errors import ConfigError

IMAGES = ("jpg", "jpeg", "png", "webp")
METRICS = ("top1", "mean_per_class")


@dataclass(frozen=True)
class ClassificationSet:
    """splits: "train", "test" and the like; each item is (RGB image, label). metric: the one that papers report."""

    name: str
    class_names: list[str]
    templates: list[str]
    metric: Literal["top1", "mean_per_class"]
    splits: dict[str, Dataset]


@dataclass(frozen=True)
class RetrievalSet:
    """captions: all of them, images in order. caption_image: the index of each caption's image."""

    name: str
    images: Dataset
    captions: list[str]
    caption_image: list[int]


def open_set(root: Path, name: str) -> ClassificationSet | RetrievalSet:
    """The set `name` under `root`. Raises ConfigError for what is missing, damaged or at odds with its meta.json."""
    folder = Path(root) / name
    found = sorted(path.parent.name for path in folder.glob("*/nshards.txt"))
    if not found:
        raise ConfigError(_missing(Path(root), name))
    meta = json.loads(_text(folder / "meta.json")) if (folder / "meta.json").exists() else {}
    members = {split: _open_split(folder / split) for split in found}
    for split, facts in meta.get("splits", {}).items():
        count = len(members[split]) if split in members else 0
        if count != facts["samples"]:
            raise ConfigError(f"{folder / split} has {count} samples, its meta.json says {facts['samples']}")
    kind = folder / "dataset_type.txt"
    stated = _text(kind).strip().lower() if kind.exists() else "classification"
    if stated == "retrieval":
        return _retrieval(name, folder, members)
    if stated == "classification":
        return _classification(name, folder, meta, members)
    raise ConfigError(f"{kind} says {stated!r}: only classification and retrieval sets can be evaluated")


def _classification(
    name: str, folder: Path, meta: dict[str, Any], members: dict[str, list[_Sample]]
) -> ClassificationSet:
    class_names = _lines(folder / "classnames.txt")
    templates = _lines(folder / "zeroshot_classification_templates.txt")
    for template in templates:
        if "{c}" not in template:
            raise ConfigError(f"{folder}: the template {template!r} lacks {{c}}, the place of the class name")
    metric = meta.get("metric", "top1")
    if metric not in METRICS:
        raise ConfigError(f"{folder / 'meta.json'}: metric {metric!r} is none of {', '.join(METRICS)}")
    splits: dict[str, Dataset] = {}
    for split, samples in members.items():
        labels = [_label(sample, len(class_names)) for sample in samples]
        splits[split] = LabelledImages(TarImages(samples), labels)
    return ClassificationSet(name, class_names, templates, metric, splits)


def _retrieval(name: str, folder: Path, members: dict[str, list[_Sample]]) -> RetrievalSet:
    if "test" not in members:
        raise ConfigError(f"{folder}: a retrieval set needs the split test, there is {', '.join(members)}")
    captions: list[str] = []
    caption_image: list[int] = []
    for index, sample in enumerate(members["test"]):
        own = [line.strip() for line in sample.annotation("txt").splitlines() if line.strip()]
        if not own:
            raise ConfigError(f"{sample.path}: {sample.key} has no caption")
        captions += own
        caption_image += [index] * len(own)
    return RetrievalSet(name, TarImages(members["test"]), captions, caption_image)


class TarImages(Dataset):
    """Images that lie in tars: item -> PIL image, RGB. Safe to read from forked or spawned workers."""

    def __init__(self, samples: list[_Sample]) -> None:
        self._paths = sorted({sample.path for sample in samples})
        number = {path: index for index, path in enumerate(self._paths)}
        self._keys = np.array([sample.key for sample in samples])
        # [n, 3]: which tar, offset, size.
        self._places = np.array([(number[each.path], *each.image) for each in samples], np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Image.Image:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number, offset, size = self._places[index].tolist()
        encoded = _read(self._paths[number], offset, size)
        try:
            return Image.open(io.BytesIO(encoded)).convert("RGB")
        # Damaged bytes end in OSError, SyntaxError, ValueError, struct.error, DecompressionBombError and more.
        except Exception as error:
            raise ConfigError(f"{self._paths[number]}: {self._keys[index]} cannot be decoded: {error}") from error


class LabelledImages(Dataset):
    """Item -> (image, label)."""

    def __init__(self, images: TarImages, labels: list[int]) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.images[index], self.labels[index]


@dataclass
class _Sample:
    """One key of a tar: where its image lies, and where each other member does."""

    path: Path
    key: str
    image: tuple[int, int]
    others: dict[str, tuple[int, int]]

    def annotation(self, extension: str) -> str:
        if extension not in self.others:
            raise ConfigError(f"{self.path}: {self.key} has no .{extension}")
        return _read(self.path, *self.others[extension]).decode("utf-8")


def _open_split(folder: Path) -> list[_Sample]:
    stated = _text(folder / "nshards.txt").strip()
    if not stated.isdigit():
        raise ConfigError(f"{folder / 'nshards.txt'} should hold a number of tars, not {stated!r}")
    return [sample for shard in range(int(stated)) for sample in _open_tar(folder / f"{shard}.tar")]


def _open_tar(path: Path) -> list[_Sample]:
    """Keys in the order of the tar. The names inside are labels: none is ever used as a path on disk."""
    if not path.is_file():
        raise ConfigError(f"{path} is missing, but {path.parent / 'nshards.txt'} counts it")
    with path.open("rb") as file:
        contents = list_members(_reader(file.fileno()), os.fstat(file.fileno()).st_size)
    if contents.flaw is not None:
        raise ConfigError(f"{path}: {contents.flaw}; make the set again")
    groups: dict[str, dict[str, tuple[int, int]]] = {}
    for member in contents.members:
        parent, slash, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        groups.setdefault(parent + slash + stem, {})[extension.lower()] = member.offset, member.size
    return [_sample(path, key, members) for key, members in groups.items()]


def _sample(path: Path, key: str, members: dict[str, tuple[int, int]]) -> _Sample:
    image = next((extension for extension in IMAGES if extension in members), None)
    if image is None:
        raise ConfigError(f"{path}: {key} has no image ({', '.join(IMAGES)}), only .{', .'.join(members)}")
    return _Sample(path, key, members[image], members)


def _label(sample: _Sample, classes: int) -> int:
    text = sample.annotation("cls").strip()
    if not text.isdigit() or int(text) >= classes:
        raise ConfigError(f"{sample.path}: {sample.key} has the label {text!r}, there are {classes} classes")
    return int(text)


def _reader(descriptor: int) -> Callable[[int, int], bytes]:
    return lambda length, offset: os.pread(descriptor, length, offset)


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def _text(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"{path} is missing")
    return path.read_text(encoding="utf-8")


def _lines(path: Path) -> list[str]:
    # An empty line inside would be a class of its own; only those at the end mean nothing.
    return [line.strip() for line in _text(path).rstrip().splitlines()]


def _missing(root: Path, name: str) -> str:
    there = sorted({path.parent.parent.name for path in root.glob("*/*/nshards.txt")})
    listed = f"there are {', '.join(there)}" if there else "there are none"
    return (
        f"no downstream set {name} at {root / name} ({listed} in eval.root={root}); "
        "`python scripts/make_world.py` makes the demo's in data/demo/downstream"
    )
