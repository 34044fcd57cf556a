"""Datasets read from the files that their authors distribute, by torchvision's classes where possible.

Each reader takes the dataset's folder and raises FileNotFoundError for missing files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from clipzoo import io
from clipzoo.evaluation.datasets.dataset import ImageFile, ImageFiles, Images, LabelledSplit, PixelArrays
from clipzoo.evaluation.datasets.tar import MEMBER_EXTENSIONS, tar_samples
from clipzoo.io import MB, below, read_lines

FOLDER_EXTENSIONS = {".jpg", ".jpeg", ".png", ".ppm"}
REMEDY = "download it again"

ClassificationSource = tuple[Sequence[str], Mapping[str, LabelledSplit]]
"""Class names of the dataset, in the order of its labels, and the splits train, optionally val, and test."""
RetrievalSource = tuple[Images, Sequence[Sequence[str]]]
"""Images and the captions of each image."""


def read_torchvision(
    kind: str, splits: Mapping[str, Mapping[str, Any]], folder: Path, class_names: Sequence[str] = ()
) -> ClassificationSource:
    """Read splits by torchvision's class `kind`, called with the arguments of the split; nothing is downloaded."""
    import torchvision.datasets

    parts: dict[str, LabelledSplit] = {}
    for split, arguments in splits.items():
        try:
            dataset = getattr(torchvision.datasets, kind)(str(folder), **arguments)
        except RuntimeError as error:
            raise FileNotFoundError(f"{folder}: {error}") from error
        # torchvision has pixels in `data`, or paths and labels under one of four pairs of names.
        samples = getattr(dataset, "_samples", None) or getattr(dataset, "samples", None)
        if hasattr(dataset, "data"):
            pixels = np.asarray(dataset.data)
            # STL-10 has channels first.
            pixels = pixels.transpose(0, 2, 3, 1) if pixels.shape[1] == 3 else pixels
            labels = dataset.targets if hasattr(dataset, "targets") else dataset.labels
            parts[split] = LabelledSplit(PixelArrays(pixels), labels)
        elif samples is not None:
            parts[split] = _files(*zip(*samples, strict=True))
        else:
            paths = dataset._images if hasattr(dataset, "_images") else dataset._image_files
            parts[split] = _files(paths, dataset._labels)
        class_names = class_names or [str(name) for name in dataset.classes]
    return class_names, parts


def read_class_folders(splits: Mapping[str, str], folder: Path) -> ClassificationSource:
    """Read splits of one folder per class; labels are in the order of the folders' names.

    splits: name -> folder. A folder for "train" may be absent: only linear probes need it.
    """
    places = {split: below(folder, part, links=True) for split, part in splits.items()}
    paths = {
        split: list(_image_paths(_existing(place)))
        for split, place in places.items()
        if split != "train" or place.exists()
    }
    names = sorted({path.parent.name for part in paths.values() for path in part})
    labels = {name: label for label, name in enumerate(names)}
    parts = {split: _files(part, [labels[path.parent.name] for path in part]) for split, part in paths.items()}
    return names, parts


# Arguments of torchvision's classes by split.
FLAGS: Mapping[str, Mapping[str, Any]] = {"train": {"train": True}, "test": {"train": False}}
TRAIN_TEST: Mapping[str, Mapping[str, Any]] = {split: {"split": split} for split in ("train", "test")}
TRAIN_VAL_TEST: Mapping[str, Mapping[str, Any]] = {split: {"split": split} for split in ("train", "val", "test")}
TRAIN_VALID_TEST = {"train": {"split": "train"}, "val": {"split": "valid"}, "test": {"split": "test"}}

cifar10 = partial(read_torchvision, "CIFAR10", FLAGS)
cifar100 = partial(read_torchvision, "CIFAR100", FLAGS)
stl10 = partial(read_torchvision, "STL10", TRAIN_TEST)
food101 = partial(read_torchvision, "Food101", TRAIN_TEST)
cars = partial(read_torchvision, "StanfordCars", TRAIN_TEST)
gtsrb = partial(read_torchvision, "GTSRB", TRAIN_TEST, class_names=[str(label) for label in range(43)])
aircraft = partial(read_torchvision, "FGVCAircraft", TRAIN_VAL_TEST)
flowers = partial(read_torchvision, "Flowers102", TRAIN_VAL_TEST)
dtd = partial(read_torchvision, "DTD", TRAIN_VAL_TEST)  # the first of ten partitions
country211 = partial(read_torchvision, "Country211", TRAIN_VALID_TEST)
# Papers test on ImageNet's labelled validation images.
imagenet = partial(read_class_folders, {"train": "train", "test": "val"})
imagenet_r = partial(read_class_folders, {"test": "imagenet-r"})
folders = partial(read_class_folders, {"train": "train", "test": "test"})


def imagenet_v2(folder: Path) -> ClassificationSource:
    """All three variants together, each with one folder per label."""
    variants = [f"imagenetv2-{variant}-format-val" for variant in ("matched-frequency", "threshold0.7", "top-images")]
    paths = [path for variant in variants for path in _image_paths(_existing(folder / variant))]
    test = _files(paths, [int(path.parent.name) for path in paths])
    return [str(label) for label in range(1000)], {"test": test}


def pets(folder: Path) -> ClassificationSource:
    _, splits = read_torchvision("OxfordIIITPet", {"train": {"split": "trainval"}, "test": {"split": "test"}}, folder)
    # torchvision capitalises all names; in the files only cats are capitalised.
    labelled = zip(_paths(splits["test"]), splits["test"].labels, strict=True)
    names = {label: path.stem.rsplit("_", 1)[0] for path, label in labelled}
    return [names[label] for label in sorted(names)], splits


def eurosat(folder: Path) -> ClassificationSource:
    names, whole = read_torchvision("EuroSAT", {"all": {}}, folder)
    return names, _cut(whole, lambda count: {"train": range(1000), "test": range(1000, 1500)})


def sun397(folder: Path) -> ClassificationSource:
    names, whole = read_torchvision("SUN397", {"all": {}}, folder)

    def ranges(count: int) -> dict[str, range]:
        first, second = int(0.7 * count), int(0.8 * count)
        return {"train": range(first), "val": range(first, second), "test": range(second, count)}

    return [name.replace("/", " ") for name in names], _cut(whole, ranges)


def caltech101(folder: Path) -> ClassificationSource:
    """With the background class, which torchvision's reader leaves out."""
    names, whole = read_class_folders({"all": "caltech101/101_ObjectCategories"}, folder)
    return names, _cut(whole, lambda count: {"train": range(30), "test": range(30, count)})


def ucf101(folder: Path) -> ClassificationSource:
    """frames/<Class>/<video>.jpg of the test lists in ucfTrainTestlist/, all three folds together."""
    lists = _existing(folder / "ucfTrainTestlist")

    def column(file: Path, place: int) -> list[str]:
        lines = read_lines(_existing(file), 64 * MB, REMEDY)
        return [line.split()[place] for line in lines if line.strip()]

    names = column(lists / "classInd.txt", 1)
    videos = [video for fold in (1, 2, 3) for video in column(lists / f"testlist0{fold}.txt", 0)]
    paths = [below(_existing(folder / "frames"), video, links=True).with_suffix(".jpg") for video in videos]
    test = _files(paths, [names.index(path.parent.name) for path in paths])
    return [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name) for name in names], {"test": test}


def karpathy(folder: Path, split: str, captions: int) -> RetrievalSource:
    """Karpathy's dataset_*.json next to the images, with the first `captions` captions of each image, as in papers.

    Raises DamagedFileError.
    """
    lists = sorted(folder.glob("dataset_*.json"))
    if not lists:
        raise FileNotFoundError(f"{folder} has no dataset_*.json")
    content = io.read_json(lists[0], 160 * io.MB, REMEDY, fields={"images": list})
    for entry in content["images"]:
        io.require_fields(lists[0], entry, {"split": str, "filename": str, "sentences": list}, REMEDY)
        for sentence in entry["sentences"]:
            io.require_fields(lists[0], sentence, {"raw": str}, REMEDY)
    entries = [entry for entry in content["images"] if entry["split"] == split]
    # Flickr30k's entries name no folder.
    paths = [
        io.below(folder, f"{entry.get('filepath', 'flickr30k-images')}/{entry['filename']}", links=True)
        for entry in entries
    ]
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise FileNotFoundError(f"{missing} is missing")
    texts = [[sentence["raw"].strip() for sentence in entry["sentences"][:captions]] for entry in entries]
    return ImageFiles([ImageFile(path) for path in paths]), texts


def pairs(folder: Path, split: str, captions: int) -> RetrievalSource:
    """Shards of image-caption pairs as img2dataset writes them; samples without image or caption are left out.

    Raises ConfigError for a damaged shard: skipping it would make the gallery smaller.
    """
    shards = sorted(folder.glob("*.tar"))
    if not shards:
        raise FileNotFoundError(f"{folder} has no *.tar")
    samples = [
        sample
        for shard in shards
        for sample in tar_samples(shard, REMEDY, unterminated=True)
        if "txt" in sample.members and not sample.members.keys().isdisjoint(MEMBER_EXTENSIONS)
    ]
    texts = [[" ".join(sample.text("txt").split())] for sample in samples]
    return ImageFiles([sample.image for sample in samples]), texts


def _cut(
    whole: Mapping[str, LabelledSplit], ranges: Callable[[int], Mapping[str, range]]
) -> Mapping[str, LabelledSplit]:
    """Splits by position: each class's files in the order of their names, cut by `ranges(number of files)`."""
    source = whole["all"]
    samples = sorted(zip(source.labels, _paths(source), strict=True), key=lambda sample: (sample[0], sample[1].name))
    parts: dict[str, list[tuple[int, Path]]] = {}
    for _, group in groupby(samples, key=itemgetter(0)):
        of_class = list(group)
        for split, rows in ranges(len(of_class)).items():
            parts.setdefault(split, []).extend(of_class[rows.start : rows.stop])
    return {split: _files([path for _, path in part], [label for label, _ in part]) for split, part in parts.items()}


def _files(paths: Iterable[Path | str], labels: Sequence[int]) -> LabelledSplit:
    return LabelledSplit(ImageFiles([ImageFile(Path(path)) for path in paths]), labels)


def _paths(split: LabelledSplit) -> list[Path]:
    assert isinstance(split.images, ImageFiles)
    return [split.images.path(index) for index in range(len(split))]


def _image_paths(folder: Path) -> Iterable[Path]:
    return (path for path in sorted(folder.glob("*/*")) if path.suffix.lower() in FOLDER_EXTENSIONS)


def _existing(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    return path
