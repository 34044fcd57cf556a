"""Evaluation datasets in the tar layout of CLIP_benchmark, with random access.

    <root>/<dataset>/classnames.txt                          class names, one per line, in the order of the labels
    <root>/<dataset>/zeroshot_classification_templates.txt   prompt templates, one per line, with {c}
    <root>/<dataset>/dataset_type.txt                        "retrieval", "multilabel", "choice" or "classification"
                                                             (the default)
    <root>/<dataset>/<split>/nshards.txt                     number k of tars
    <root>/<dataset>/<split>/{0..k-1}.tar                    images with .cls (label) or .txt (captions, one per line);
                                                             .npy: zeros and ones for all classes, or, next to .cls,
                                                             numbers of groups
    <root>/<dataset>/meta.json                               optional, clipzoo's own: metric, recipe, counts, digests

Datasets exported by CLIP_benchmark open unchanged, and CLIP_benchmark opens the datasets written here but for "choice",
whose samples are examples: images <key>.0.png, <key>.1.png, ... and <key>.json:

    {"captions": ["a dog bites a man", "a man bites a dog"], "pairs": [[0, 0], [1, 1]], "category": "swap"}

pairs: positions of an image and a caption that belong together. category: optional. images: names of the images,
"s0000003.0", if some are those of another example; an image is stored once.
"""

from __future__ import annotations

import hashlib
import io as streams
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np

from clipzoo import io
from clipzoo.data.tar import UNTERMINATED, Member, list_members
from clipzoo.errors import ConfigError, number_of
from clipzoo.evaluation.datasets.dataset import (
    METRICS,
    SIGNATURES,
    ChoiceDataset,
    ClassificationDataset,
    EvaluationDataset,
    Example,
    ImageFile,
    ImageFiles,
    LabelledSplit,
    RetrievalDataset,
    check_examples,
    read_range,
)

MEMBER_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
REMEDY = "restore the file, or convert the dataset again"
SMALL_BYTES = 4096
"""Size of labels and captions that are read together with the list of members."""
LINES = 16 * io.MB
"""Largest size of a list of class names or templates."""
NAMES_FILE, TEMPLATES_FILE = "classnames.txt", "zeroshot_classification_templates.txt"


@dataclass(frozen=True)
class TarSample:
    """Members of one tar with the same key, by extension. small: contents of those that are no images and small."""

    path: Path
    key: str
    members: Mapping[str, Member]
    small: Mapping[str, bytes]

    @property
    def image(self) -> ImageFile:
        member = next((self.members[extension] for extension in MEMBER_EXTENSIONS if extension in self.members), None)
        if member is None:
            kinds, extensions = ", ".join(MEMBER_EXTENSIONS), ", .".join(self.members)
            raise ConfigError(f"{self.path}: {self.key} has no image ({kinds}), only .{extensions}")
        return ImageFile(self.path, member.offset, member.size, self.key)

    def content(self, extension: str) -> bytes:
        if extension not in self.members:
            raise ConfigError(f"{self.path}: {self.key} has no .{extension}")
        member = self.members[extension]
        return self.small[extension] if extension in self.small else read_range(self.path, member.offset, member.size)

    def text(self, extension: str) -> str:
        try:
            return self.content(extension).decode("utf-8")
        except UnicodeDecodeError:
            raise io.DamagedFileError(self.path, f"has a .{extension} of {self.key} that is not UTF-8 text") from None

    def numbers(self) -> list[int]:
        """Integers of the .npy."""
        content = self.content("npy")
        try:
            return np.load(streams.BytesIO(content), allow_pickle=False).astype(np.int64).ravel().tolist()
        except (ValueError, TypeError, EOFError) as error:
            raise io.DamagedFileError(self.path, f"has a .npy of {self.key} that is not an array: {error}") from None


def dataset_names(root: Path | str) -> list[str]:
    """Names of the datasets in tar shards below `root`."""
    return sorted({path.parent.parent.name for path in Path(root).glob("*/*/nshards.txt")})


def open_tar_dataset(root: Path, name: str, group_column: int | None = None) -> EvaluationDataset:
    """Open <root>/<name>. Raises ConfigError if files are missing, damaged or contradict meta.json.

    group_column: position of the group's number in the .npy; None for no groups.
    """
    folder = io.below(Path(root), name, links=True)
    splits = sorted(path.parent.name for path in folder.glob("*/nshards.txt"))
    if not splits:
        others = f"(eval.root={root} has {', '.join(dataset_names(root)) or 'none'})"
        remedy = "`clipzoo world` generates the demo's in data/demo/downstream"
        raise ConfigError(f"no evaluation dataset {name} at {root}/{name} {others}; {remedy}")
    meta_file, type_file = folder / "meta.json", folder / "dataset_type.txt"
    meta = io.read_json(meta_file, io.MB, REMEDY) if meta_file.exists() else {}
    stated_splits = meta.get("splits", {})
    io.require_fields(meta_file, {"splits": stated_splits}, {"splits": dict}, REMEDY)
    io.require_fields(meta_file, stated_splits, dict.fromkeys(stated_splits, dict), REMEDY)
    for facts in stated_splits.values():
        io.require_fields(meta_file, facts, {"samples": int}, REMEDY)

    samples: dict[str, list[TarSample]] = {}
    for split in splits:
        place = io.below(folder, split, links=True)
        count = io.read_text(place / "nshards.txt", io.MB, REMEDY).strip()
        if not re.fullmatch("[0-9]{1,9}", count):
            raise ConfigError(f"{place / 'nshards.txt'} must hold the number of tars, not {count[:40]!r}")
        samples[split] = []
        for shard in range(int(count)):
            path = place / f"{shard}.tar"
            if not path.is_file():
                raise ConfigError(f"{path} is missing, but {place / 'nshards.txt'} counts it")
            samples[split] += tar_samples(path, "write the dataset again")
    for split, facts in stated_splits.items():
        if (held := len(samples.get(split, ()))) != facts["samples"]:
            place = io.below(folder, split, links=True)
            raise ConfigError(f"{place} has {number_of(held, 'sample')}, but its meta.json says {facts['samples']}")
    kind = io.read_text(type_file, io.MB, REMEDY).strip().lower() if type_file.exists() else "classification"
    if kind in ("classification", "multilabel"):
        return _classification(name, folder, meta, samples, kind == "multilabel", group_column)
    if kind not in ("retrieval", "choice"):
        kinds = "classification, multilabel, retrieval and choice"
        raise ConfigError(f"{type_file} says {kind!r}: only {kinds} datasets can be evaluated")
    if "test" not in samples:
        raise ConfigError(f"{folder}: a {kind} dataset needs the split test; it has {', '.join(samples)}")
    if kind == "choice":
        return _choice(name, samples["test"])
    captions: list[list[str]] = []
    for sample in samples["test"]:
        captions.append([line.strip() for line in sample.text("txt").splitlines() if line.strip()])
        if not captions[-1]:
            raise ConfigError(f"{sample.path}: {sample.key} has no caption")
    return RetrievalDataset.of_images(name, ImageFiles([sample.image for sample in samples["test"]]), captions)


def tar_samples(path: Path, remedy: str, unterminated: bool = False) -> list[TarSample]:
    """Samples of one tar in its order. Member names are only labels, never paths on disk.

    remedy: for the message about a damaged tar. unterminated: accept a tar without its closing blocks, as
    img2dataset may leave it.
    """
    samples: dict[str, tuple[dict[str, Member], dict[str, bytes]]] = {}
    with io.readable(path, io.ANY_SIZE, remedy) as file:
        members, flaw = list_members(file.fileno(), os.fstat(file.fileno()).st_size)
        if flaw is not None and not (unterminated and flaw == UNTERMINATED):
            raise ConfigError(f"{path}: {flaw}; {remedy}")
        for member in members:
            parent, slash, base = member.name.rpartition("/")
            stem, _, extension = base.partition(".")
            by_extension, small = samples.setdefault(parent + slash + stem, ({}, {}))
            by_extension[extension := extension.lower()] = member
            # Now, not when they are needed: opening the tar for each label takes most of the time.
            if member.size <= SMALL_BYTES and not extension.endswith(MEMBER_EXTENSIONS):
                small[extension] = os.pread(file.fileno(), member.size, member.offset)
    return [TarSample(path, key, *parts) for key, parts in samples.items()]


def _classification(
    name: str,
    folder: Path,
    meta: Mapping[str, Any],
    samples: Mapping[str, Sequence[TarSample]],
    multilabel: bool,
    group_column: int | None,
) -> ClassificationDataset:
    # Empty lines are ignored only at the end; elsewhere they are classes.
    class_names = io.read_lines(folder / NAMES_FILE, LINES, REMEDY)
    templates = io.read_lines(folder / TEMPLATES_FILE, LINES, REMEDY)
    if bad := [template for template in templates if "{c}" not in template]:
        fault = f"has the prompt template {bad[0]!r} without {{c}}, where the class name goes"
        raise io.DamagedFileError(folder / TEMPLATES_FILE, fault, REMEDY)
    metric = meta.get("metric", "mean_average_precision" if multilabel else "top1")
    if not isinstance(metric, str) or metric not in METRICS:
        raise ConfigError(f"{folder / 'meta.json'}: metric {metric!r} is not one of {', '.join(METRICS)}")
    splits, group_names = {}, set[int]()
    for split, part in samples.items():
        labels, every, groups = list[int](), list[list[int]](), list[int]()
        for sample in part:
            if multilabel:
                flags = sample.numbers()
                every.append([label for label, flag in enumerate(flags) if flag])
                labels.append(every[-1][0] if every[-1] else -1)
                given = f"{len(flags)} flags" if len(flags) != len(class_names) else ""
            else:
                label = sample.text("cls").strip()
                given = f"the label {label!r}" if not label.isdecimal() or int(label) >= len(class_names) else ""
                labels.append(-1 if given else int(label))
            if given:
                count = number_of(len(class_names), "class", "es")
                raise ConfigError(f"{sample.path}: {sample.key} has {given}, but {NAMES_FILE} names {count}")
            if group_column is not None:
                groups.append(sample.numbers()[group_column])
        group_names.update(groups)
        images = ImageFiles([sample.image for sample in part])
        splits[split] = LabelledSplit(images, labels, groups, every if multilabel else None)
    names = [str(number) for number in range(max(group_names, default=-1) + 1)]
    return ClassificationDataset(name, class_names, templates, metric, splits, names)


def _choice(name: str, samples: Sequence[TarSample]) -> ChoiceDataset:
    files: dict[str, ImageFile] = {}
    names_by_sample: list[list[str]] = []
    for sample in samples:
        images = {
            f"{sample.key}.{kind.rpartition('.')[0]}": ImageFile(sample.path, member.offset, member.size, sample.key)
            for kind, member in sample.members.items()
            if kind.endswith(MEMBER_EXTENSIONS)
        }
        files |= images
        names_by_sample.append(sorted(images, key=lambda name: (len(name), name)))
    places = {image: index for index, image in enumerate(files)}
    captions: list[str] = []
    examples = []
    for sample, own in zip(samples, names_by_sample, strict=True):
        try:
            facts = json.loads(sample.text("json"))
            texts, pairs = facts["captions"], frozenset((int(image), int(text)) for image, text in facts["pairs"])
            rows = tuple(places[image] for image in facts.get("images", own))
            if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
                raise ValueError("captions are not texts")
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            fault = f"has a .json of {sample.key} without captions and pairs of its images ({error!r:.100})"
            raise io.DamagedFileError(sample.path, fault, REMEDY) from None
        columns = tuple(range(len(captions), len(captions) + len(texts)))
        examples.append(Example(rows, columns, pairs, str(facts.get("category", ""))))
        captions += texts
    dataset = ChoiceDataset(name, ImageFiles(list(files.values())), captions, examples)
    check_examples(dataset)
    return dataset


def write_classification(
    folder: Path,
    *,
    class_names: Sequence[str],
    templates: Sequence[str],
    metric: str,
    recipe: str,
    splits: Mapping[str, Iterable[tuple[bytes, Any]]],
    shard_size: int = 1000,
) -> None:
    """Write a classification dataset; the encoded images are stored unchanged.

    folder: of the dataset; it appears only when it is complete. metric: "top1" or "mean_per_class", or
    "mean_average_precision" for images with several classes. recipe: a sentence on how the splits were made, for
    meta.json. splits: (encoded image, label or list of labels) pairs. shard_size: samples per tar.
    """
    kind = "multilabel" if metric == "mean_average_precision" else "classification"

    def row(image: bytes, label: Any) -> tuple[bytes, str, str | bytes]:
        if kind == "classification":
            return image, "cls", str(label)
        stream = streams.BytesIO()
        np.save(stream, np.isin(np.arange(len(class_names)), label).astype(np.uint8))
        return image, "npy", stream.getvalue()

    lists = {NAMES_FILE: class_names, TEMPLATES_FILE: templates}
    rows = {split: starmap(row, examples) for split, examples in splits.items()}
    _write_dataset(folder, kind, {"metric": metric, "recipe": recipe}, lists, rows, shard_size)


def write_retrieval(
    folder: Path, *, recipe: str, examples: Iterable[tuple[bytes, Sequence[str]]], shard_size: int = 1000
) -> None:
    """Write a retrieval dataset with the split "test". examples: encoded images with their captions."""
    rows = ((image, "txt", _joined(captions)) for image, captions in examples)
    _write_dataset(folder, "retrieval", {"recipe": recipe}, {}, {"test": rows}, shard_size)


def write_choice(
    folder: Path, recipe: str, captions: Sequence[str], examples: Sequence[Example], encoded: Callable[[int], bytes]
) -> None:
    """Write a choice dataset with the split "test". encoded: index -> encoded image, called once for each image."""

    def rows() -> Iterator[tuple[dict[str, bytes], str, str]]:
        names: dict[int, str] = {}
        for number, (images, texts, pairs, category) in enumerate(examples):
            new = [image for image in dict.fromkeys(images) if image not in names]
            names |= {image: f"{_key(number)}.{place}" for place, image in enumerate(new)}
            facts: dict[str, object] = {"captions": [captions[text] for text in texts], "pairs": sorted(pairs)}
            facts |= {"category": category} if category else {}
            facts |= {"images": [names[image] for image in images]} if new != list(images) else {}
            yield {f"{place}.": encoded(image) for place, image in enumerate(new)}, "json", json.dumps(facts)

    _write_dataset(folder, "choice", {"recipe": recipe}, {}, {"test": rows()}, 1000)


def _write_dataset(
    folder: Path,
    kind: str,
    meta: Mapping[str, str],
    lists: Mapping[str, Sequence[str]],
    splits: Mapping[str, Iterable[tuple[bytes | dict[str, bytes], str, str | bytes]]],
    shard_size: int,
) -> None:
    """Write a dataset; its folder appears only when all is written, and is removed after an error.

    lists: lines of text by file name. splits: (image, extension of the annotation, annotation) rows; or several
    images by the beginning of their extension.
    """
    from webdataset.writer import ShardWriter  # imports torch

    if folder.exists():
        raise ConfigError(f"{folder} exists already: remove it to write the dataset again")
    with io.new_folder(folder) as new:
        for name, lines in lists.items():
            io.write_whole(new / name, _joined(lines))
        facts = {}
        for split, rows in splits.items():
            place = io.below(new, split)
            place.mkdir()
            digest, count = hashlib.sha256(), 0
            with ShardWriter(f"{place}/%d.tar", maxcount=shard_size, verbose=0, mtime=0) as writer:
                for images, extension, annotation in rows:
                    encoded = annotation.encode("utf-8") if isinstance(annotation, str) else annotation
                    members: dict[str, str | bytes] = {"__key__": _key(count), extension: encoded}
                    for stem, image in ({"": images} if isinstance(images, bytes) else images).items():
                        encoding = next((name for start, name in SIGNATURES.items() if image.startswith(start)), None)
                        if encoding is None:
                            begin = f"one that begins with {image[:8]!r}"
                            raise ConfigError(f"the tar layout holds JPEG, PNG and WebP images, not {begin}")
                        digest.update(hashlib.sha256(image).digest())
                        members[stem + encoding] = image
                    digest.update(hashlib.sha256(encoded).digest())
                    writer.write(members)
                    count += 1
                shards = writer.shard
            io.write_whole(place / "nshards.txt", f"{shards}\n")
            facts[split] = {"samples": count, "digest": digest.hexdigest()}
        io.write_whole(new / "dataset_type.txt", kind + "\n")
        io.write_json(new / "meta.json", {**meta, "splits": facts})


def _key(number: int) -> str:
    return f"s{number:07d}"


def _joined(lines: Sequence[str]) -> str:
    for line in lines:
        if line != line.strip() or len(line.splitlines()) != 1:
            raise ConfigError(f"the tar layout has one name, template or caption per line: {line!r} is not one line")
    return "\n".join(lines) + "\n"
