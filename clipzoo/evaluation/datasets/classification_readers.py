"""Classification datasets read from the files that their authors distribute, by torchvision's classes where possible.

Each reader takes the dataset's folder, returns the dataset's own class names, and raises FileNotFoundError for missing
files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clipzoo.evaluation.datasets.images import ImageFile, ImageFiles, LabelledSplit, PixelArrays

EXTENSIONS = {".jpg", ".jpeg", ".png", ".ppm"}


@dataclass(frozen=True)
class SourceClassification:
    """class_names: the dataset's own, in the order of its labels. splits: train, optionally val, test."""

    class_names: Sequence[str]
    splits: Mapping[str, LabelledSplit]


def imagenet(folder: Path) -> SourceClassification:
    """train/<wnid>/ and val/<wnid>/; the labelled validation images are what papers test on."""
    return _class_folders({"train": folder / "train", "test": folder / "val"})


def imagenet_v2(folder: Path) -> SourceClassification:
    """Three variants, each with one folder per label."""
    variants = [f"imagenetv2-{variant}-format-val" for variant in ("matched-frequency", "threshold0.7", "top-images")]
    paths = [path for variant in variants for path in _image_paths(_existing(folder / variant))]
    test = _files(paths, [int(path.parent.name) for path in paths])
    return SourceClassification([str(label) for label in range(1000)], {"test": test})


def imagenet_r(folder: Path) -> SourceClassification:
    return _class_folders({"test": folder / "imagenet-r"})


def folders(folder: Path) -> SourceClassification:
    """train/<Class_name>/ and test/<Class_name>/."""
    return _class_folders({"train": folder / "train", "test": folder / "test"})


def cifar10(folder: Path) -> SourceClassification:
    return _torchvision("CIFAR10", folder, {"train": {"train": True}, "test": {"train": False}})


def cifar100(folder: Path) -> SourceClassification:
    return _torchvision("CIFAR100", folder, {"train": {"train": True}, "test": {"train": False}})


def stl10(folder: Path) -> SourceClassification:
    return _torchvision("STL10", folder, _named("train", "test"))


def food101(folder: Path) -> SourceClassification:
    return _torchvision("Food101", folder, _named("train", "test"))


def cars(folder: Path) -> SourceClassification:
    return _torchvision("StanfordCars", folder, _named("train", "test"))


def aircraft(folder: Path) -> SourceClassification:
    return _torchvision("FGVCAircraft", folder, _named("train", "val", "test"))


def flowers(folder: Path) -> SourceClassification:
    return _torchvision("Flowers102", folder, _named("train", "val", "test"))


def dtd(folder: Path) -> SourceClassification:
    """The first of ten partitions."""
    return _torchvision("DTD", folder, _named("train", "val", "test"))


def country211(folder: Path) -> SourceClassification:
    splits = {"train": {"split": "train"}, "val": {"split": "valid"}, "test": {"split": "test"}}
    return _torchvision("Country211", folder, splits)


def gtsrb(folder: Path) -> SourceClassification:
    return _torchvision("GTSRB", folder, _named("train", "test"), [str(label) for label in range(43)])


def pets(folder: Path) -> SourceClassification:
    source = _torchvision("OxfordIIITPet", folder, {"train": {"split": "trainval"}, "test": {"split": "test"}})
    # torchvision capitalises all names; the files tell cats (capital) from dogs.
    paths, labels = _paths(source.splits["test"]), source.splits["test"].labels
    names = {label: path.stem.rsplit("_", 1)[0] for path, label in zip(paths, labels, strict=True)}
    return SourceClassification([names[label] for label in sorted(names)], source.splits)


def eurosat(folder: Path) -> SourceClassification:
    whole = _torchvision("EuroSAT", folder, {"all": {}})
    return _cut(whole, lambda count: {"train": range(1000), "test": range(1000, 1500)})


def sun397(folder: Path) -> SourceClassification:
    whole = _torchvision("SUN397", folder, {"all": {}})

    def ranges(count: int) -> dict[str, range]:
        first, second = int(0.7 * count), int(0.8 * count)
        return {"train": range(first), "val": range(first, second), "test": range(second, count)}

    names = [name.replace("/", " ") for name in whole.class_names]
    return SourceClassification(names, _cut(whole, ranges).splits)


def caltech101(folder: Path) -> SourceClassification:
    """With the background class, which torchvision's reader leaves out."""
    whole = _class_folders({"all": folder / "caltech101" / "101_ObjectCategories"})
    return _cut(whole, lambda count: {"train": range(30), "test": range(30, count)})


def ucf101(folder: Path) -> SourceClassification:
    """frames/<Class>/<video>.jpg of the test lists in ucfTrainTestlist/, all three folds together."""
    lists = _existing(folder / "ucfTrainTestlist")
    names = [line.split()[1] for line in _lines(lists / "classInd.txt")]
    videos = [line.split()[0] for fold in (1, 2, 3) for line in _lines(lists / f"testlist0{fold}.txt")]
    paths = [(_existing(folder / "frames") / video).with_suffix(".jpg") for video in videos]
    test = _files(paths, [names.index(path.parent.name) for path in paths])
    return SourceClassification([re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name) for name in names], {"test": test})


def _named(*splits: str) -> dict[str, dict[str, Any]]:
    return {split: {"split": split} for split in splits}


def _torchvision(
    kind: str, folder: Path, splits: Mapping[str, Mapping[str, Any]], class_names: Sequence[str] = ()
) -> SourceClassification:
    """Read each split by torchvision's class `kind` with the split's arguments; nothing is downloaded."""
    import torchvision.datasets

    parts: dict[str, LabelledSplit] = {}
    for split, arguments in splits.items():
        try:
            dataset = getattr(torchvision.datasets, kind)(str(folder), **arguments)
        except RuntimeError as error:
            raise FileNotFoundError(f"{folder}: {error}") from error
        parts[split] = _split(dataset)
        class_names = class_names or [str(name) for name in dataset.classes]
    return SourceClassification(class_names, parts)


def _split(dataset: Any) -> LabelledSplit:
    """torchvision keeps pixels in `data`, or paths and labels under one of four pairs of names."""
    if hasattr(dataset, "data"):
        pixels = np.asarray(dataset.data)
        # STL-10 has channels first.
        pixels = pixels.transpose(0, 2, 3, 1) if pixels.shape[1] == 3 else pixels
        return LabelledSplit(PixelArrays(pixels), dataset.targets if hasattr(dataset, "targets") else dataset.labels)
    samples = getattr(dataset, "_samples", None) or getattr(dataset, "samples", None)
    if samples is not None:
        return _files(*zip(*samples, strict=True))
    return _files(dataset._images if hasattr(dataset, "_images") else dataset._image_files, dataset._labels)


def _class_folders(splits: Mapping[str, Path]) -> SourceClassification:
    """One folder per class; labels in the order of the folders' names."""
    paths = {split: list(_image_paths(_existing(folder))) for split, folder in splits.items()}
    names = sorted({path.parent.name for part in paths.values() for path in part})
    labels = {name: label for label, name in enumerate(names)}
    parts = {split: _files(part, [labels[path.parent.name] for path in part]) for split, part in paths.items()}
    return SourceClassification(names, parts)


def _cut(whole: SourceClassification, ranges: Callable[[int], Mapping[str, range]]) -> SourceClassification:
    """Splits by position: each class's files in the order of their names, cut by `ranges(number of files)`."""
    source = whole.splits["all"]
    samples = sorted(zip(source.labels, _paths(source), strict=True), key=lambda sample: (sample[0], sample[1].name))
    by_class: dict[int, list[Path]] = {}
    for label, path in samples:
        by_class.setdefault(label, []).append(path)
    parts: dict[str, tuple[list[Path], list[int]]] = {}
    for label, paths in by_class.items():
        for split, rows in ranges(len(paths)).items():
            chosen = paths[rows.start : rows.stop]
            split_paths, split_labels = parts.setdefault(split, ([], []))
            split_paths += chosen
            split_labels += [label] * len(chosen)
    return SourceClassification(whole.class_names, {split: _files(*part) for split, part in parts.items()})


def _files(paths: Iterable[Path | str], labels: Sequence[int]) -> LabelledSplit:
    return LabelledSplit(ImageFiles([ImageFile(Path(path)) for path in paths]), labels)


def _paths(split: LabelledSplit) -> list[Path]:
    assert isinstance(split.images, ImageFiles)
    return [split.images.path(index) for index in range(len(split))]


def _image_paths(folder: Path) -> Iterable[Path]:
    return (path for path in sorted(folder.glob("*/*")) if path.suffix.lower() in EXTENSIONS)


def _lines(path: Path) -> list[str]:
    return [line for line in _existing(path).read_text().splitlines() if line.strip()]


def _existing(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    return path
