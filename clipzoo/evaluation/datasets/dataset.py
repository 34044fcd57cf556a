"""Evaluation datasets as the evaluators read them, their images, and the catalogue of the papers' benchmarks.

Needs no torch.
"""

from __future__ import annotations

import hashlib
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import yaml
from PIL.Image import Image, fromarray

from clipzoo.config.groups import option_file, options
from clipzoo.data.faults import BadSampleError
from clipzoo.data.images import DECODING, LARGEST_FILE, decode
from clipzoo.errors import ConfigError, number_of
from clipzoo.io import ANY_SIZE, DamagedFileError, below, read_yaml, readable, shortened

Metric = Literal[
    "top1", "top5", "mean_per_class", "macro_f1", "mean_average_precision", "worst_group_top1", "worst_group_top5"
]
METRICS: tuple[Metric, ...] = get_args(Metric)
SIGNATURES = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp"}
"""First bytes of the formats that the tar layout stores unchanged -> file extension."""


class Images(ABC):
    """RGB images with random access; worker processes get a copy of the object."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Image: ...

    def encoded(self, index: int) -> bytes:
        """JPEG, PNG or WebP file with exactly these pixels; the original file if it has one of these formats."""
        return png(self[index])

    def fingerprint(self) -> str:
        """Digest that changes with the images, for the cache of results; by default of all pixels, decoded."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            image = self[index]
            digest.update(repr(image.size).encode() + image.tobytes())
        return digest.hexdigest()


@dataclass(eq=False)
class LabelledSplit:
    """One split of a classification dataset: index -> (RGB image, label).

    labels: class of each image. groups: index of each image's group in `ClassificationDataset.groups`; empty without
    groups. all_labels: every class of each image, in a multi-label dataset, whose `labels` are the first of them (-1
    for an image without a class); None otherwise.
    """

    images: Images
    labels: Sequence[int]
    groups: Sequence[int] = ()
    all_labels: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        self.labels, self.groups = ([int(number) for number in numbers] for numbers in (self.labels, self.groups))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        return self.images[index], self.labels[index]


@dataclass(frozen=True)
class ClassificationDataset:
    """Splits of labelled images with the class names and prompt templates of zero-shot classification.

    class_names: in the order of the labels. templates: "{c}" is replaced by the class name. metric: the metric that
    papers report. splits: "test", for linear probes also "train" and optionally "val". groups: names of the groups of
    samples whose accuracies are compared, such as regions.
    """

    task: ClassVar[str] = "zero_shot"
    name: str
    class_names: Sequence[str]
    templates: Sequence[str]
    metric: Metric
    splits: Mapping[str, LabelledSplit]
    groups: Sequence[str] = ()

    def split_images(self, split: str) -> Images:
        return self.splits[split].images


@dataclass(frozen=True)
class RetrievalDataset:
    """n images and k >= n captions. caption_image: index of each caption's image."""

    task: ClassVar[str] = "retrieval"
    name: str
    images: Images
    captions: Sequence[str]
    caption_image: Sequence[int]

    @classmethod
    def of_images(cls, name: str, images: Images, captions: Sequence[Sequence[str]]) -> RetrievalDataset:
        """captions: those of each image."""
        caption_image = [index for index, texts in enumerate(captions) for _ in texts]
        return cls(name, images, [text for texts in captions for text in texts], caption_image)

    def split_images(self, split: str) -> Images:
        return self.images


class Example(NamedTuple):
    """An example of a `ChoiceDataset`: which of its captions belong to which of its images?

    images, captions: indices into those of the dataset. pairs: positions (image, caption) in these two that belong
    together. category: the kind of the example, such as "replace object".
    """

    images: tuple[int, ...]
    captions: tuple[int, ...]
    pairs: frozenset[tuple[int, int]]
    category: str = ""


@dataclass(frozen=True)
class ChoiceDataset:
    """Examples of a few images and captions, of which some belong together: compositional benchmarks."""

    task: ClassVar[str] = "choice"
    name: str
    images: Images
    captions: Sequence[str]
    examples: Sequence[Example]

    def split_images(self, split: str) -> Images:
        return self.images


EvaluationDataset = ClassificationDataset | RetrievalDataset | ChoiceDataset


def dataset_key(key: str, dataset: EvaluationDataset) -> str:
    """Cache key over `key`, the decoding of images, the images (see `version_of`), names, prompts, labels, captions."""
    if isinstance(dataset, ClassificationDataset):
        facts: list[object] = [dataset.class_names, dataset.templates, dataset.metric, dataset.groups]
        for split, samples in dataset.splits.items():
            facts += [split, samples.labels, samples.groups, samples.all_labels]
        images = {split: dataset.split_images(split).fingerprint() for split in dataset.splits}
    else:
        facts, images = [dataset.captions], {"": dataset.images.fingerprint()}
        if isinstance(dataset, RetrievalDataset):
            facts.append(dataset.caption_image)
        else:
            facts += [(*example[:2], sorted(example.pairs), example.category) for example in dataset.examples]
    return hashlib.sha256(repr((key, DECODING, facts, images)).encode()).hexdigest()


class ImageFile(NamedTuple):
    """An encoded image: a whole file, or a member of a tar archive. key: name of the sample in messages."""

    path: Path
    offset: int = 0
    size: int = -1
    key: str = ""


class EncodedImages(Images):
    """Images that are read and decoded on access."""

    @abstractmethod
    def place(self, index: int) -> str:
        """Return file and name of the image, for messages."""

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Return the encoded image."""

    def __getitem__(self, index: int) -> Image:
        if not 0 <= index < len(self):
            raise IndexError(index)
        try:
            return decode(self.read(index))
        except (BadSampleError, OSError) as error:
            raise ConfigError(f"{self.place(index)} cannot be decoded: {error}") from error

    def encoded(self, index: int) -> bytes:
        content = self.read(index)
        return content if content.startswith(tuple(SIGNATURES)) else png(self[index])


class ImageFiles(EncodedImages):
    """Images in files or members of tar archives. Safe to use in forked or spawned worker processes."""

    def __init__(self, files: Sequence[ImageFile]) -> None:
        # Arrays, not objects: worker processes share their memory.
        self._paths = sorted({file.path for file in files})
        numbers = {path: number for number, path in enumerate(self._paths)}
        self._keys = np.array([file.key for file in files])
        members = [(numbers[path], offset, size) for path, offset, size, _ in files]
        self._members = np.array(members, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._members)

    def place(self, index: int) -> str:
        return f"{self.path(index)}: {self._keys[index]}".rstrip()

    def path(self, index: int) -> Path:
        """File that holds the image."""
        return self._paths[self._members[index, 0]]

    def fingerprint(self) -> str:
        return version_of(self._paths, self._members.tobytes())

    def read(self, index: int) -> bytes:
        _, offset, size = self._members[index].tolist()
        return read_range(self.path(index), offset, size)


class PixelArrays(Images):
    """Images in memory: uint8 pixels [n, H, W, 3]."""

    def __init__(self, pixels: np.ndarray) -> None:
        self._pixels = pixels

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, index: int) -> Image:
        return fromarray(self._pixels[index])

    def fingerprint(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self._pixels).data).hexdigest()


def version_of(paths: Sequence[Path], *facts: object) -> str:
    """Digest that changes with every write to the files, which are not read, and with other facts."""
    # The kernel sets ctime at each change of the content or of the other times, and no program can set it: a changed
    # byte is noticed even if size and mtime are restored. A copied dataset counts as changed.
    digest = hashlib.sha256(repr(facts).encode())
    for path in paths:
        state = path.stat()
        digest.update(repr((path.name, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)).encode())
    return digest.hexdigest()


def read_range(path: Path, offset: int, size: int) -> bytes:
    """Read `size` bytes from `offset`; -1 reads a whole file. At most LARGEST_FILE bytes. Raises DamagedFileError."""
    with readable(path, ANY_SIZE if size >= 0 else LARGEST_FILE) as file:
        if size > LARGEST_FILE:
            raise DamagedFileError(path, f"has a member of {size:,} bytes, more than {LARGEST_FILE:,}")
        file.seek(offset)
        return file.read(size)


def existing(folder: Path, name: str | None = None) -> Path:
    """Return <folder>/<name>. Raises FileNotFoundError if it is missing, ConfigError if it is not below `folder`."""
    path = folder if name is None else below(folder, name, links=True)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    return path


def png(image: Image) -> bytes:
    """Encode an image as PNG."""
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


Benchmark = Mapping[str, Any]
"""An entry of catalogue.yaml, whose first lines explain the keys; `captions` makes it a retrieval dataset, `examples`
a choice dataset."""


@cache
def catalogue() -> dict[str, Benchmark]:
    """Benchmark datasets by name, of all YAML files of this folder; catalogue.yaml explains the keys."""
    entries: dict[str, Benchmark] = {}
    document = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.yaml")))
    for name, facts in yaml.safe_load(document).items():
        if name.startswith("."):
            continue
        kind = {"reader": "read_tables"} if "examples" in facts else {} if "captions" in facts else {"metric": "top1"}
        facts = {"licence": "not stated by its authors", **kind, **facts}
        languages = facts.pop("languages", {})
        for language, place in languages.items() or [("", "")]:
            key = f"{name}_{language}" if languages else name
            text = json.dumps(facts | ({"family": name} if languages else {}))
            words = {"dataset": key, "class": facts.get("class"), "place": place}
            for word, value in (words | {"language": language, "LANGUAGE": language.upper()}).items():
                text = text.replace(f"{{{word}}}", str(value))
            entries[key] = json.loads(text)
    return entries


@cache
def suites() -> dict[str, dict[str, list[str]]]:
    """Names of the datasets that each option of `eval` lists, by task."""
    contents = {option: read_yaml(file) for option in options("eval") if (file := option_file("eval", option))}
    tasks = [data.task for data in get_args(EvaluationDataset)]
    return {
        option: {task: names for task in tasks if isinstance(names := facts.get(task), list)}
        for option, facts in contents.items()
    }


def check_size(dataset: EvaluationDataset, benchmark: Benchmark) -> None:
    """Raise ConfigError unless the dataset has as many classes and samples as in the papers."""
    expected: dict[str, Any]
    if isinstance(dataset, RetrievalDataset):
        images, present = benchmark["images"], {"images": len(dataset.images), "captions": len(dataset.captions)}
        expected = {"images": images, "captions": images and images * benchmark["captions"]}
    elif isinstance(dataset, ChoiceDataset):
        expected, present = {"examples": benchmark["examples"]}, {"examples": len(dataset.examples)}
    else:
        expected = {split: size for split, size in benchmark["samples"].items() if size is not None}
        present = {split: len(samples) for split, samples in dataset.splits.items()}
        if "train" not in present:
            expected = {split: size for split, size in expected.items() if split in ("test", *present)}
        if benchmark.get("checked") == "total":
            expected, present = {"total": sum(expected.values())}, {"total": sum(present.values())}
        if "val" not in present and "val" in expected:
            # Some copies have train and validation in one split.
            expected["train"] += expected.pop("val")
        expected["classes"], present["classes"] = benchmark["classes"], len(dataset.class_names)
    if wrong := {name: size for name, size in expected.items() if size not in (None, present.get(name, 0))}:
        differences = ", ".join(f"{name} {present.get(name, 0)} (not {size})" for name, size in wrong.items())
        raise ConfigError(f"{dataset.name} has the wrong size: {differences}")


def check_examples(dataset: ChoiceDataset) -> None:
    """Raise ConfigError unless all examples have pairs that belong together and others that do not."""
    images, captions = len(dataset.images), len(dataset.captions)
    if not dataset.examples:
        raise ConfigError(f"{dataset.name} has no examples")
    for number, example in enumerate(dataset.examples):
        rows, columns = range(len(example.images)), range(len(example.captions))
        if not (
            all(image in range(images) for image in example.images)
            and all(caption in range(captions) for caption in example.captions)
            and all(image in rows and caption in columns for image, caption in example.pairs)
            and 0 < len(example.pairs) < len(rows) * len(columns)
        ):
            some = f"some of {number_of(images, 'image')} and {number_of(captions, 'caption')}"
            rule = f"must have {some}, of which some pairs belong together, but not all"
            raise ConfigError(f"{dataset.name}: example {number} {rule}: {shortened(example, 300)}")
