"""Benchmark sets read from the files that their authors distribute, by torchvision's classes where there are any.

Each reader takes the set's folder and gives a RawSet with the set's own class names. What is not there raises
FileNotFoundError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clipzoo.evaluation.datasets.examples import Arrays, Examples, Files, RawSet

IMAGES = {".jpg", ".jpeg", ".png", ".ppm"}


def imagenet(folder: Path) -> RawSet:
    """train/<wnid>/ and val/<wnid>/; the labelled validation images are what papers test on."""
    return _by_folders({split: folder / name for split, name in (("train", "train"), ("test", "val"))})


def imagenet_v2(folder: Path) -> RawSet:
    """Three variants, a folder a label each."""
    names = [f"imagenetv2-{variant}-format-val" for variant in ("matched-frequency", "threshold0.7", "top-images")]
    paths = [path for name in names for path in _images(_there(folder / name))]
    return RawSet(
        [str(label) for label in range(1000)], {"test": Files(paths, [int(each.parent.name) for each in paths])}
    )


def imagenet_r(folder: Path) -> RawSet:
    return _by_folders({"test": folder / "imagenet-r"})


def folders(folder: Path) -> RawSet:
    """train/<Class_name>/ and test/<Class_name>/."""
    return _by_folders({"train": folder / "train", "test": folder / "test"})


def cifar10(folder: Path) -> RawSet:
    return _torchvision("CIFAR10", folder, {"train": {"train": True}, "test": {"train": False}})


def cifar100(folder: Path) -> RawSet:
    return _torchvision("CIFAR100", folder, {"train": {"train": True}, "test": {"train": False}})


def stl10(folder: Path) -> RawSet:
    return _torchvision("STL10", folder, _splits("train", "test"))


def food101(folder: Path) -> RawSet:
    return _torchvision("Food101", folder, _splits("train", "test"))


def cars(folder: Path) -> RawSet:
    return _torchvision("StanfordCars", folder, _splits("train", "test"))


def aircraft(folder: Path) -> RawSet:
    return _torchvision("FGVCAircraft", folder, _splits("train", "val", "test"))


def flowers(folder: Path) -> RawSet:
    return _torchvision("Flowers102", folder, _splits("train", "val", "test"))


def dtd(folder: Path) -> RawSet:
    """The first of its ten partitions."""
    return _torchvision("DTD", folder, _splits("train", "val", "test"))


def country211(folder: Path) -> RawSet:
    return _torchvision(
        "Country211", folder, {"train": {"split": "train"}, "val": {"split": "valid"}, "test": {"split": "test"}}
    )


def gtsrb(folder: Path) -> RawSet:
    return _torchvision("GTSRB", folder, _splits("train", "test"), names=[str(label) for label in range(43)])


def pets(folder: Path) -> RawSet:
    found = _torchvision("OxfordIIITPet", folder, {"train": {"split": "trainval"}, "test": {"split": "test"}})
    # torchvision writes all names with capitals; the files tell cats (capital) from dogs.
    test = found.splits["test"]
    assert isinstance(test, Files)
    names = {label: path.stem.rsplit("_", 1)[0] for path, label in zip(test.paths, test.labels, strict=True)}
    return RawSet([names[label] for label in sorted(names)], found.splits)


def eurosat(folder: Path) -> RawSet:
    whole = _torchvision("EuroSAT", folder, {"all": {}})
    return _cut(whole, "all", lambda count: {"train": range(1000), "test": range(1000, 1500)})


def sun397(folder: Path) -> RawSet:
    whole = _torchvision("SUN397", folder, {"all": {}})
    names = [name.replace("/", " ") for name in whole.class_names]

    def shares(count: int) -> dict[str, range]:
        first, second = int(0.7 * count), int(0.8 * count)
        return {"train": range(first), "val": range(first, second), "test": range(second, count)}

    return RawSet(names, _cut(whole, "all", shares).splits)


def caltech101(folder: Path) -> RawSet:
    """With the background class, which torchvision's reader leaves out."""
    whole = _by_folders({"all": folder / "caltech101" / "101_ObjectCategories"})
    return _cut(whole, "all", lambda count: {"train": range(30), "test": range(30, count)})


def ucf101(folder: Path) -> RawSet:
    """frames/<Class>/<video>.jpg by the test lists of ucfTrainTestlist/, the three folds together."""
    lists = _there(folder / "ucfTrainTestlist")
    order = [line.split()[1] for line in _lines(lists / "classInd.txt")]
    videos = [line.split()[0] for fold in (1, 2, 3) for line in _lines(lists / f"testlist0{fold}.txt")]
    paths = [(_there(folder / "frames") / video).with_suffix(".jpg") for video in videos]
    test = Files(paths, [order.index(path.parent.name) for path in paths])
    return RawSet([re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name) for name in order], {"test": test})


def _splits(*names: str) -> dict[str, dict[str, Any]]:
    return {name: {"split": name} for name in names}


def _torchvision(
    kind: str, folder: Path, splits: Mapping[str, Mapping[str, Any]], names: list[str] | None = None
) -> RawSet:
    """torchvision's own class for each split; nothing is downloaded."""
    import torchvision.datasets

    found: dict[str, Examples] = {}
    classes: list[str] = names or []
    for split, arguments in splits.items():
        try:
            data = getattr(torchvision.datasets, kind)(str(folder), **arguments)
        except RuntimeError as error:
            raise FileNotFoundError(f"{folder}: {error}") from error
        found[split] = _examples(data)
        classes = classes or [str(name) for name in data.classes]
    return RawSet(classes, found)


def _examples(data: Any) -> Examples:
    """torchvision keeps pixels in `data`, or paths and labels under one of four pairs of names."""
    if hasattr(data, "data"):
        pixels = np.asarray(data.data)
        # STL-10 has channels first.
        pixels = pixels.transpose(0, 2, 3, 1) if pixels.shape[1] == 3 else pixels
        return Arrays(pixels, data.targets if hasattr(data, "targets") else data.labels)
    samples = getattr(data, "_samples", None) or getattr(data, "samples", None)
    if samples is not None:
        paths, labels = zip(*samples, strict=True)
        return Files(paths, labels)
    return Files(data._images if hasattr(data, "_images") else data._image_files, data._labels)


def _by_folders(splits: Mapping[str, Path]) -> RawSet:
    """A folder a class; labels in the order of the names."""
    found: dict[str, list[Path]] = {split: list(_images(_there(path))) for split, path in splits.items()}
    names = sorted({path.parent.name for paths in found.values() for path in paths})
    place = {name: index for index, name in enumerate(names)}
    files = {split: Files(paths, [place[path.parent.name] for path in paths]) for split, paths in found.items()}
    return RawSet(names, files)


def _cut(whole: RawSet, split: str, shares: Callable[[int], Mapping[str, range]]) -> RawSet:
    """Splits of our own: every class's files in the order of their names, cut by position."""
    source = whole.splits[split]
    assert isinstance(source, Files)
    by_class: dict[int, list[Path]] = {}
    for path, label in sorted(zip(source.paths, source.labels, strict=True), key=lambda pair: (pair[1], pair[0].name)):
        by_class.setdefault(label, []).append(path)
    parts: dict[str, tuple[list[Path], list[int]]] = {}
    for label, paths in by_class.items():
        for name, places in shares(len(paths)).items():
            chosen = paths[places.start : places.stop]
            kept = parts.setdefault(name, ([], []))
            kept[0].extend(chosen)
            kept[1].extend([label] * len(chosen))
    return RawSet(whole.class_names, {name: Files(*part) for name, part in parts.items()})


def _images(folder: Path) -> Iterable[Path]:
    return (path for path in sorted(folder.glob("*/*")) if path.suffix.lower() in IMAGES)


def _lines(path: Path) -> list[str]:
    return [line for line in _there(path).read_text().splitlines() if line.strip()]


def _there(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there")
    return path
