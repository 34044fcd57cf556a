"""Tiny copies of the benchmark datasets in the files that their authors distribute.

Each writer makes a folder of a few classes and returns the expected class of each image by split. The grey level of an
image encodes its class, so that tests detect wrong labels.
"""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

Expected = dict[str, list[str]]
"""For each split the class of every image, by the dataset's own name, in the order of the reader."""


def shade(place: int) -> tuple[int, int, int]:
    """Grey level of a class, far enough apart for JPEG."""
    return (40 * place + 10,) * 3


def place_of(picture: Image.Image) -> int:
    return round((np.asarray(picture.convert("L")).mean() - 10) / 40)


def draw(path: Path, place: int, kind: str = "JPEG") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 16), shade(place)).save(path, kind)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def folders(
    root: Path, splits: dict[str, str], names: list[str], counts: tuple[int, ...] = (2, 1), ending: str = ".jpg"
) -> Expected:
    """splits: name of a split -> its folder; counts: images of each class."""
    expected: Expected = {}
    for split, folder in splits.items():
        expected[split] = []
        for place, (name, count) in enumerate(zip(names, counts, strict=True)):
            for index in range(count):
                draw(root / folder / name / f"{index}{ending}", place)
            expected[split] += [name] * count
    return expected


def imagenet(root: Path) -> Expected:
    return folders(root, {"train": "train", "test": "val"}, ["n01440764", "n01443537"])


def imagenet_r(root: Path) -> Expected:
    return folders(root, {"test": "imagenet-r"}, ["n01443537", "n01484850"])


def imagenet_v2(root: Path) -> Expected:
    for variant in ("matched-frequency", "threshold0.7", "top-images"):
        folders(root, {"test": f"imagenetv2-{variant}-format-val"}, ["3", "10"], (1, 1), ".jpeg")
    return {"test": [name for _ in range(3) for name in ("10", "3")]}


def birdsnap(root: Path) -> Expected:
    return folders(root, {"train": "train", "test": "test"}, ["Blue_Jay", "Brown_headed_Cowbird"])


def cifar(
    root: Path, folder: str, batches: dict[str, str], meta: tuple[str, str], key: str, names: list[str]
) -> Expected:
    expected: Expected = {"train": [], "test": []}
    (root / folder).mkdir(parents=True)
    for batch, split in batches.items():
        labels = [1, 0] if split == "train" else [1]
        data = np.concatenate([np.full((1, 3072), shade(label)[0], np.uint8) for label in labels])
        (root / folder / batch).write_bytes(pickle.dumps({"data": data, key: labels}))
        expected[split] += [names[label] for label in labels]
    (root / folder / meta[0]).write_bytes(pickle.dumps({meta[1]: names}))
    return expected


def cifar10(root: Path) -> Expected:
    batches = {**{f"data_batch_{index}": "train" for index in range(1, 6)}, "test_batch": "test"}
    return cifar(root, "cifar-10-batches-py", batches, ("batches.meta", "label_names"), "labels", ["airplane", "bird"])


def cifar100(root: Path) -> Expected:
    batches = {"train": "train", "test": "test"}
    names = ["apple", "aquarium_fish"]
    return cifar(root, "cifar-100-python", batches, ("meta", "fine_label_names"), "fine_labels", names)


def stl10(root: Path) -> Expected:
    folder = root / "stl10_binary"
    write(folder / "class_names.txt", "airplane\nbird\n")
    write(folder / "fold_indices.txt", "0 1\n" * 10)
    expected: Expected = {}
    for split, labels in (("train", [1, 0]), ("test", [0, 1, 1])):
        pixels = np.stack([np.full((3, 96, 96), shade(label)[0], np.uint8) for label in labels])
        (folder / f"{split}_X.bin").write_bytes(pixels.tobytes())
        (folder / f"{split}_y.bin").write_bytes(np.array([label + 1 for label in labels], np.uint8).tobytes())
        expected[split] = [["airplane", "bird"][label] for label in labels]
    (folder / "unlabeled_X.bin").write_bytes(b"")
    return expected


def food101(root: Path) -> Expected:
    base = root / "food-101"
    for split, ids in (("train", {"apple_pie": [1], "pho": [2, 3]}), ("test", {"apple_pie": [4], "pho": [5]})):
        listed = {name: [f"{name}/{number}" for number in numbers] for name, numbers in ids.items()}
        write(base / "meta" / f"{split}.json", json.dumps(listed))
        for place, paths in enumerate(listed.values()):
            for path in paths:
                draw(base / "images" / f"{path}.jpg", place)
    return {"train": ["apple_pie", "pho", "pho"], "test": ["apple_pie", "pho"]}


def caltech101(root: Path) -> Expected:
    base, names = root / "caltech101" / "101_ObjectCategories", ["BACKGROUND_Google", "Faces", "accordion"]
    for place, (name, count) in enumerate(zip(names, (32, 31, 33), strict=True)):
        for index in range(1, count + 1):
            draw(base / name / f"image_{index:04d}.jpg", place)
    return {
        "train": [name for name in names for _ in range(30)],
        "test": [name for name, rest in zip(names, (2, 1, 3), strict=True) for _ in range(rest)],
    }


def cars(root: Path) -> Expected:
    base, names = root / "stanford_cars", ["Audi S4 Sedan 2007", "Ram C/V Cargo Van Minivan 2012"]
    (base / "devkit").mkdir(parents=True)
    savemat(base / "devkit" / "cars_meta.mat", {"class_names": np.array(names, dtype=object)})
    expected: Expected = {}
    places = {
        "train": (base / "devkit" / "cars_train_annos.mat", [1, 0]),
        "test": (base / "cars_test_annos_withlabels.mat", [0, 1]),
    }
    for split, (path, labels) in places.items():
        kinds = [("fname", object), ("class", np.uint8)]
        rows = np.array([(f"{index:05d}.jpg", label + 1) for index, label in enumerate(labels)], dtype=kinds)
        savemat(path, {"annotations": rows})
        for index, label in enumerate(labels):
            draw(base / f"cars_{split}" / f"{index:05d}.jpg", label)
        expected[split] = [names[label] for label in labels]
    return expected


def aircraft(root: Path) -> Expected:
    data = root / "fgvc-aircraft-2013b" / "data"
    write(data / "variants.txt", "707-320\nF-16A/B\n")
    expected: Expected = {}
    for first, split in enumerate(("train", "val", "test")):
        entries = [(f"{first}00{index}", index) for index in (1, 0)]
        write(
            data / f"images_variant_{split}.txt",
            "".join(f"{image} {['707-320', 'F-16A/B'][place]}\n" for image, place in entries),
        )
        for image, place in entries:
            draw(data / "images" / f"{image}.jpg", place)
        expected[split] = ["F-16A/B", "707-320"]
    return expected


def flowers(root: Path) -> Expected:
    base = root / "flowers-102"
    labels = [1, 2, 2, 1, 1, 2, 1, 2, 2]
    for index, label in enumerate(labels, 1):
        draw(base / "jpg" / f"image_{index:05d}.jpg", label - 1)
    savemat(base / "imagelabels.mat", {"labels": np.array([labels])})
    savemat(
        base / "setid.mat",
        {"trnid": np.array([[1, 2]]), "valid": np.array([[3, 4]]), "tstid": np.array([[5, 6, 7, 8, 9]])},
    )
    names = ["pink primrose", "hard-leaved pocket orchid"]
    return {
        split: [names[label - 1] for label in part]
        for split, part in (("train", labels[:2]), ("val", labels[2:4]), ("test", labels[4:]))
    }


def eurosat(root: Path) -> Expected:
    # As many files as the cut needs: 1000 to train, 500 to test, and some that neither takes.
    names = ["AnnualCrop", "SeaLake"]
    for place, name in enumerate(names):
        first = root / "eurosat" / "2750" / name / f"{name}_1.jpg"
        draw(first, place)
        for index in range(2, 1504):
            first.with_name(f"{name}_{index}.jpg").hardlink_to(first)
    return {
        "train": [name for name in names for _ in range(1000)],
        "test": [name for name in names for _ in range(500)],
    }


def dtd(root: Path) -> Expected:
    base, names = root / "dtd" / "dtd", ["banded", "woven"]
    for split in ("train", "val", "test"):
        paths = [f"{name}/{name}_{split}.jpg" for name in names]
        write(base / "labels" / f"{split}1.txt", "\n".join(paths) + "\n")
        for place, path in enumerate(paths):
            draw(base / "images" / path, place)
    return {split: names for split in ("train", "val", "test")}


def pets(root: Path) -> Expected:
    base = root / "oxford-iiit-pet"
    names = {1: "Abyssinian", 2: "american_bulldog"}
    for split, numbers in (("trainval", [10, 11]), ("test", [12])):
        ids = [(f"{name}_{number}", label) for label, name in names.items() for number in numbers]
        write(base / "annotations" / f"{split}.txt", "".join(f"{image} {label} 1 1\n" for image, label in ids))
        for image, label in ids:
            draw(base / "images" / f"{image}.jpg", label - 1)
    (base / "annotations" / "trimaps").mkdir()
    return {"train": ["Abyssinian"] * 2 + ["american_bulldog"] * 2, "test": ["Abyssinian", "american_bulldog"]}


def sun397(root: Path) -> Expected:
    base, names = root / "SUN397", ["a/abbey", "b/bow_window/indoor"]
    write(base / "ClassName.txt", "".join(f"/{name}\n" for name in names))
    for place, name in enumerate(names):
        for index in range(10):
            draw(base / name / f"sun_{index:04d}.jpg", place)
    shown = ["abbey", "bow_window indoor"]
    return {
        split: [name for name in shown for _ in range(count)]
        for split, count in (("train", 7), ("val", 1), ("test", 2))
    }


def country211(root: Path) -> Expected:
    splits = {"train": "country211/train", "val": "country211/valid", "test": "country211/test"}
    return folders(root, splits, ["AD", "ZW"])


def gtsrb(root: Path) -> Expected:
    base = root / "gtsrb"
    for label, count in ((0, 2), (1, 1)):
        for index in range(count):
            draw(base / "GTSRB" / "Training" / f"{label:05d}" / f"{index:05d}.ppm", label, "PPM")
    rows = ["Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"]
    for index, label in enumerate((1, 0)):
        draw(base / "GTSRB" / "Final_Test" / "Images" / f"{index:05d}.ppm", label, "PPM")
        rows.append(f"{index:05d}.ppm;20;16;0;0;1;1;{label}")
    write(base / "GT-final_test.csv", "\n".join(rows) + "\n")
    return {"train": ["0", "0", "1"], "test": ["1", "0"]}


def ucf101(root: Path) -> Expected:
    lists, names = root / "ucfTrainTestlist", ["ApplyEyeMakeup", "YoYo"]
    write(lists / "classInd.txt", "1 ApplyEyeMakeup\n2 YoYo\n")
    expected = []
    for fold in (1, 2, 3):
        videos = [f"{name}/v_{name}_g0{fold}_c01.avi" for name in names]
        write(lists / f"testlist0{fold}.txt", "\n".join(videos) + "\n")
        for place, video in enumerate(videos):
            draw((root / "frames" / video).with_suffix(".jpg"), place)
        expected += ["Apply Eye Makeup", "Yo Yo"]
    return {"test": expected}


def karpathy(root: Path, file: str, folder: str | None) -> None:
    """Two test images, one validation image and one train image with five captions; the first has a sixth."""
    images = []
    for index, split in enumerate(["test", "val", "train", "test"]):
        sentences = [{"raw": f" caption {turn} of {index} "} for turn in range(6 if index == 0 else 5)]
        entry = {"split": split, "filename": f"{index}.jpg", "sentences": sentences}
        images.append({**entry, "filepath": folder} if folder else entry)
        draw(root / (folder or "flickr30k-images") / f"{index}.jpg", index)
    write(root / file, json.dumps({"images": images}))


def pairs(root: Path) -> None:
    """Two shards as img2dataset writes them; one sample lacks its image."""
    root.mkdir(parents=True, exist_ok=True)
    for shard, indices in (("00000", (0, 1)), ("00001", (2, 3))):
        with tarfile.open(root / f"{shard}.tar", "w") as archive:
            for index in indices:
                if index != 1:
                    add(archive, f"{index:09d}.jpg", encoded(index))
                add(archive, f"{index:09d}.json", b"{}")
                add(archive, f"{index:09d}.txt", f"caption\nof {index}".encode())


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    facts = tarfile.TarInfo(name)
    facts.size = len(content)
    archive.addfile(facts, io.BytesIO(content))


def encoded(place: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (20, 16), shade(place)).save(stream, "JPEG")
    return stream.getvalue()


WRITERS: dict[str, Callable[[Path], Expected]] = {
    writer.__name__: writer
    for writer in (
        imagenet, imagenet_v2, imagenet_r, birdsnap, cifar10, cifar100, stl10, food101, caltech101, cars, aircraft,
        flowers, eurosat, dtd, pets, sun397, country211, gtsrb, ucf101,
    )
}  # fmt: skip
RETRIEVAL: dict[str, Callable[[Path], None]] = {
    "coco": lambda root: karpathy(root, "dataset_coco.json", "val2014"),
    "coco_validation": lambda root: karpathy(root, "dataset_coco.json", "val2014"),
    "flickr30k": lambda root: karpathy(root, "dataset_flickr30k.json", None),
    "flickr30k_validation": lambda root: karpathy(root, "dataset_flickr30k.json", None),
    "cc3m_validation": pairs,
}
