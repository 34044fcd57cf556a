"""Tiny copies of further datasets of the catalogue, in the files that their authors or CLIP_benchmark distribute.

A writer takes the dataset's folder below eval.root, and the language if the dataset has several. It returns the
expected split test: (grey level, class name or captions, group) of each image.
"""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.io import savemat

from tests.support.distributed_datasets import add, draw, encoded, write

Found = list[tuple[int, object, str]]


def class_folders(
    root: Path, folder: str, names: Sequence[str] = ("n01443537", "n01484850"), file: str = "0.JPEG"
) -> Found:
    for place, name in enumerate(names):
        draw(root / folder / name / file, place)
    return [(place, name, "") for place, name in enumerate(names)]


def imagenet_v2_matched(root: Path) -> Found:
    class_folders(root, "imagenetv2-top-images-format-val", ("3", "10"), "a.jpeg")
    found = class_folders(root, "imagenetv2-matched-frequency-format-val", ("3", "10"), "a.jpeg")
    # In the order of the paths.
    return found[::-1]


def idx(values: np.ndarray) -> bytes:
    """A file of MNIST: a header of big-endian integers, then bytes."""
    return struct.pack(f">{values.ndim + 1}i", 0x800 + values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def mnist(root: Path) -> Found:
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for split in ("train", "t10k"):
        pixels = np.stack([np.full((28, 28), 40 * place + 10) for place in (1, 0)])
        (folder / f"{split}-images-idx3-ubyte").write_bytes(idx(pixels))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx(np.array([7, 0])))
    return [(1, "7 - seven", ""), (0, "0 - zero", "")]


def svhn(root: Path) -> Found:
    root.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        pixels = np.stack([np.full((32, 32, 3), 40 * place + 10, np.uint8) for place in (1, 0)], axis=-1)
        savemat(root / f"{split}_32x32.mat", {"X": pixels, "y": np.array([[3], [10]])})
    return [(1, "3", ""), (0, "0", "")]


def renderedsst2(root: Path) -> Found:
    for split in ("train", "valid", "test"):
        for place, name in enumerate(("negative", "positive")):
            draw(root / "rendered-sst2" / split / name / "0.png", place, "PNG")
    return [(0, "negative", ""), (1, "positive", "")]


def sun397_all(root: Path) -> Found:
    names = ["a/abbey", "b/bow_window/indoor"]
    write(root / "SUN397" / "ClassName.txt", "".join(f"/{name}\n" for name in names))
    for place, name in enumerate(names):
        draw(root / "SUN397" / name / "sun_0.jpg", place)
    return [(0, "abbey", ""), (1, "bow_window indoor", "")]


def voc2007_multilabel(root: Path) -> Found:
    from clipzoo.evaluation.datasets.dataset import catalogue

    base = root / "VOCdevkit" / "VOC2007"
    objects = {"000001": {"dog": "1", "person": "0"}, "000002": {}, "000004": {"car": "1"}}
    for split in ("train", "test"):
        for name in catalogue()["voc2007_multilabel"]["labels"]:
            lines = "".join(f"{number} {of.get(name, '-1'):>2}\n" for number, of in objects.items())
            write(base / "ImageSets" / "Main" / f"{name}_{split}.txt", lines)
    for place, number in enumerate(objects):
        draw(base / "JPEGImages" / f"{number}.jpg", place)
    return [(0, ["dog", "person"], ""), (1, [], ""), (2, ["car"], "")]


def objectnet(root: Path) -> Found:
    for place, name in enumerate(("alarm_clock", "air_freshener", "butchers_knife")):
        draw(root / "objectnet-1.0" / "images" / name / "a.png", place, "PNG")
    return [(0, "alarm clock", ""), (2, "butcher's knife", "")]


def imagenet_real(root: Path) -> Found:
    # The first image has no label, the second 970 and 795, the third 230 and 231.
    for number, name in ((1, "n01440764"), (2, "n01443537"), (3, "n01484850")):
        draw(root / "val" / name / f"ILSVRC2012_val_{number:08d}.JPEG", number - 1)
    return [(1, [970, 795], ""), (2, [230, 231], "")]


def camelyon17_wilds(root: Path) -> Found:
    rows = [(23, 2, 4, 1), (24, 0, 1, 0), (23, 2, 5, 0)]
    lines = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for place, (patient, center, slide, tumor) in enumerate(rows):
        folder = f"patient_0{patient}_node_1"
        draw(root / "patches" / folder / f"patch_{folder}_x_{place}_y_8.png", place, "PNG")
        lines.append(f"{place},0{patient},1,{place},8,{tumor},{slide},{center},0")
    write(root / "metadata.csv", "\n".join(lines) + "\n")
    return [(0, "tumor tissue", "4"), (2, "normal tissue", "5")]


def geode_all(root: Path) -> Found:
    rows = [("Africa", "bag", 0), ("Europe", "dog", 1), ("Africa", "dog", 2)]
    lines = ["file_path,object,region"]
    for region, name, place in rows:
        draw(root / "images" / region / f"{place}.jpg", place)
        lines.append(f"{region}/{place}.jpg,{name},{region}")
    write(root / "index.csv", "\n".join(lines) + "\n")
    return [(place, name, region) for region, name, place in rows]


def fairface(column: int, names: Sequence[str]) -> Callable[[Path], Found]:
    def writer(root: Path) -> Found:
        rows = [("val/1.jpg", "3-9", "Male", "East Asian"), ("val/2.jpg", "more than 70", "Female", "Black")]
        table = "".join(",".join((*row, "True")) + "\n" for row in rows)
        write(root / "fairface_label_val.csv", "file,age,gender,race,service_test\n" + table)
        for place, row in enumerate(rows):
            draw(root / row[0], place)
        return [(place, names[place], rows[place][3]) for place in range(2)]

    return writer


def utkface(names: Sequence[str]) -> Callable[[Path], Found]:
    def writer(root: Path) -> Found:
        for place, name in enumerate(
            ("26_0_1_2017.jpg.chip.jpg", "61_1_20170109.jpg.chip.jpg", "8_1_4_2017.jpg.chip.jpg")
        ):
            draw(root / "UTKFace" / name, place)
        return [(0, names[0], "1"), (2, names[1], "4")]

    return writer


def babel_imagenet(root: Path, language: str) -> Found:
    """Images of the first classes that have a name in the language, and of one that has none."""
    from timm.data import ImageNetInfo

    from clipzoo.evaluation.datasets import prompts
    from clipzoo.evaluation.datasets.dataset import catalogue

    wnids = ImageNetInfo().label_names()
    classes, names = prompts.package_list(catalogue()[f"babel_imagenet_{language}"]["classes_of"])
    for place in range(6):
        draw(root / f"{place}.jpg", place)
    for label, name in enumerate(wnids):
        (root / "val" / name).mkdir(parents=True)
        (root / "val" / name / f"ILSVRC2012_val_{label:08d}.JPEG").hardlink_to(root / f"{label % 6}.jpg")
    return [(label % 6, names[classes.index(label)], "") for label in sorted(classes)]


def crossmodal3600(root: Path, language: str) -> Found:
    lines = []
    for place in range(2):
        draw(root / "images" / f"0a{place}.jpg", place)
        lines.append(json.dumps({"image/key": f"0a{place}", language: {"caption": [f"{language} {place}", "second"]}}))
    write(root / "captions.jsonl", "\n".join(lines) + "\n")
    return [(place, [f"{language} {place}"], "") for place in range(2)]


def xtd10(root: Path, language: str) -> Found:
    folder = {"de": "MIC", "fr": "MIC", "jp": "STAIR"}.get(language, "XTD10")
    write(root / "XTD10" / "test_image_names.txt", "COCO_val2014_01.jpg\nCOCO_train2014_02.jpg\n")
    write(root / folder / f"test_1kcaptions_{language}.txt", f"{language} 0\n{language} 1\n")
    draw(root / "images" / "COCO_val2014_01.jpg", 0)
    draw(root / "images" / "COCO_train2014_02.jpg", 1)
    return [(place, [f"{language} {place}"], "") for place in range(2)]


def multi30k(root: Path, language: str) -> Found:
    write(root / "image_splits" / "test_2016_flickr.txt", "7.jpg\n8.jpg\n")
    write(root / "raw" / f"test_2016_flickr.{language}", f"{language} 0\n{language} 1\n")
    for place, name in enumerate(("7.jpg", "8.jpg")):
        draw(root / "flickr30k-images" / name, place)
    return [(place, [f"{language} {place}"], "") for place in range(2)]


def flickr_zh(name: str) -> Callable[[Path], Found]:
    def writer(root: Path) -> Found:
        write(root / f"{name}_test_zh.txt", "image,caption\n1.jpg,一,二\n2.jpg,三\n1.jpg,四\n")
        for place in range(2):
            draw(root / f"{place + 1}.jpg", place)
        return [(0, ["一,二", "四"], ""), (1, ["三"], "")]

    return writer


def flickr8k(root: Path) -> Found:
    entries = [
        {"split": split, "filename": f"{place}.jpg", "sentences": [{"raw": f" {place} {turn}"} for turn in range(5)]}
        for place, split in enumerate(("test", "train"))
    ]
    for place in range(2):
        draw(root / "Images" / f"{place}.jpg", place)
    write(root / "dataset_flickr8k.json", json.dumps({"images": entries}))
    return [(0, [f"0 {turn}" for turn in range(5)], "")]


def docci(root: Path) -> Found:
    lines = []
    for place, split in enumerate(("train", "test", "qual_test", "test")):
        name = f"{split}_0{place}.jpg"
        draw(root / "images" / name, place)
        lines.append(json.dumps({"split": split, "description": f"A long\ncaption of {place}.", "image_file": name}))
    write(root / "docci_descriptions.jsonlines", "\n".join(lines) + "\n")
    return [(place, [f"A long caption of {place}."], "") for place in (1, 3)]


def urban1k(root: Path) -> Found:
    for place in range(2):
        draw(root / "Urban1k" / "image" / f"{place}.jpg", place)
        write(root / "Urban1k" / "caption" / f"{place}.txt", f"A street {place}.\n")
    return [(place, [f"A street {place}."], "") for place in range(2)]


def sharegpt4v(root: Path) -> Found:
    entries = []
    for place in range(1001):
        turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": f"A\ncaption {place}"}]
        entries.append({"image": f"sam/images/{place}.jpg", "conversations": turns})
        draw(root / "sam" / "images" / f"{place}.jpg", place % 6) if place in (0, 999) else None
    first = root / "sam" / "images" / "0.jpg"
    for place in range(1, 999):
        first.with_name(f"{place}.jpg").hardlink_to(first)
    write(root / "share-captioner_coco_lcs_sam_1246k_1107.json", json.dumps(entries))
    return [(3 if place == 999 else 0, [f"A caption {place}"], "") for place in range(1000)]


LAYOUTS: dict[str, Callable[..., Found]] = {
    "imagenet_v2_matched": imagenet_v2_matched,
    "imagenet_a": lambda root: class_folders(root, "imagenet-a"),
    "imagenet_o": lambda root: class_folders(root, "imagenet-o"),
    "imagenet_sketch": lambda root: class_folders(root, "sketch"),
    **{f"imagenet_{language}": lambda root: class_folders(root, "val") for language in ("ar", "cn", "it", "jp")},
    "fer2013": lambda root: class_folders(root, "test", ("angry", "disgust")),
    "sun397_all": sun397_all,
    "fairface_gender": fairface(2, ("male", "female")),
    "fairface_race": fairface(3, ("East Asian", "Black")),
    "fairface_age": fairface(1, ("3 to 9 years old", "more than 70 years old")),
    "utkface_gender": utkface(("male", "female")),
    "utkface_race": utkface(("Black", "other")),
    "multilingual_mscoco_captions": xtd10,
    "flickr30k_zh": flickr_zh("flickr30k"),
    "flickr8k_zh": flickr_zh("flickr8k"),
    **{
        writer.__name__: writer
        for writer in (
            mnist, svhn, renderedsst2, voc2007_multilabel, objectnet, imagenet_real, camelyon17_wilds, geode_all,
            babel_imagenet, crossmodal3600, xtd10, multi30k, flickr8k, docci, urban1k, sharegpt4v,
        )
    },
}  # fmt: skip


def tars(folder: Path, kind: str, grouped: bool) -> None:
    """Two tars of the split test with three images, as CLIP_benchmark and DataComp export them.

    kind: "classification", "multilabel" or "retrieval". grouped: with WILDS's numbers of each image.
    """
    (folder / "test").mkdir(parents=True)
    samples = [(0, 1, [1, 2]), (1, 0, [0, 5]), (2, 1, [1, 7])]
    for shard, part in enumerate((samples[:2], samples[2:])):
        with tarfile.open(folder / "test" / f"{shard}.tar", "w") as archive:
            for place, label, numbers in part:
                add(archive, f"s{place:07d}.jpg", encoded(place))
                if kind == "retrieval":
                    add(archive, f"s{place:07d}.txt", f"one {place}\ntwo {place}".encode())
                elif kind == "multilabel":
                    add(archive, f"s{place:07d}.npy", npy([float(label == 1), 1.0]))
                else:
                    add(archive, f"s{place:07d}.cls", str(label).encode())
                if grouped:
                    add(archive, f"s{place:07d}.npy", npy(numbers))
    write(folder / "test" / "nshards.txt", "2\n")
    if kind != "classification":
        write(folder / "dataset_type.txt", f"{kind}\n")
    if kind != "retrieval":
        write(folder / "classnames.txt", "first\nsecond\n")
        write(folder / "zeroshot_classification_templates.txt", "a {c}\n")


def npy(numbers: Sequence[float]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array(numbers))
    return stream.getvalue()
