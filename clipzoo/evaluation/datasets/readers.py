"""Datasets read from the files that their authors distribute, by torchvision's classes where possible.

Each reader takes the folder of a dataset and its entry in the catalogue, or the layout of a choice dataset, and raises
FileNotFoundError for missing files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image

from clipzoo import io
from clipzoo.data.write import karpathy_entries
from clipzoo.errors import ConfigError, one_message
from clipzoo.evaluation.datasets import prompts
from clipzoo.evaluation.datasets.dataset import (
    Benchmark,
    Example,
    ImageFile,
    ImageFiles,
    Images,
    LabelledSplit,
    PixelArrays,
    existing,
    png,
    version_of,
)
from clipzoo.evaluation.datasets.tables import TableImages, row_groups
from clipzoo.evaluation.datasets.tar import MEMBER_EXTENSIONS, tar_samples
from clipzoo.io import MB, below, read_lines

FOLDER_EXTENSIONS = {".jpg", ".jpeg", ".png", ".ppm"}
REMEDY = "download it again"
LARGEST_LIST = 2048 * MB
"""Largest size of a list of images and captions."""

ClassificationSource = tuple[Sequence[str], Mapping[str, LabelledSplit]]
"""Class names of the dataset, in the order of its labels, and the splits train, optionally val, and test."""
RetrievalSource = tuple[Images, Sequence[Sequence[str]]]
"""Images and the captions of each image."""
ChoiceSource = tuple[Images, Sequence[str], Sequence[Example]]
"""Images, captions and examples."""
Part = tuple[Images, int, tuple[float, ...]]
"""Image of a collection, and the left, top, width and height of a part in pixels; empty for the whole image."""
Row = Mapping[str, Any]


def torchvision(folder: Path, facts: Benchmark) -> ClassificationSource:
    """Read `splits` by torchvision's `class`, called with the arguments of the split; nothing is downloaded."""
    import torchvision.datasets

    class_names, parts = list[str](), dict[str, LabelledSplit]()
    for split, arguments in facts["splits"].items():
        try:
            dataset = getattr(torchvision.datasets, facts["class"])(str(folder), **arguments)
        except (RuntimeError, ValueError) as error:
            raise FileNotFoundError(f"{folder}: {error}") from error
        # torchvision has pixels in `data`, or paths and labels under one of four pairs of names.
        samples = getattr(dataset, "_samples", None) or getattr(dataset, "samples", None)
        if hasattr(dataset, "data"):
            pixels = np.asarray(dataset.data)
            # MNIST is grey; STL-10 and SVHN have channels first.
            pixels = pixels[..., None].repeat(3, -1) if pixels.ndim == 3 else pixels
            pixels = pixels.transpose(0, 2, 3, 1) if pixels.shape[1] == 3 else pixels
            labels = dataset.targets if hasattr(dataset, "targets") else dataset.labels
            parts[split] = LabelledSplit(PixelArrays(pixels), labels)
        elif samples is not None:
            parts[split] = _files(*zip(*samples, strict=True))
        else:
            paths = dataset._images if hasattr(dataset, "_images") else dataset._image_files
            parts[split] = _files(paths, dataset._labels)
        class_names = class_names or [str(name) for name in facts.get("labels") or dataset.classes]
    return class_names, parts


def class_folders(folder: Path, facts: Benchmark) -> ClassificationSource:
    """Read splits of one folder per class, in the order of their names; "train" may be absent: only probes need it."""
    paths = {
        split: [path for path in sorted(existing(folder, part).glob("*/*")) if path.suffix.lower() in FOLDER_EXTENSIONS]
        for split, part in facts["splits"].items()
        if split != "train" or below(folder, part, links=True).exists()
    }
    names = sorted({path.parent.name for part in paths.values() for path in part})
    labels = {name: label for label, name in enumerate(names)}
    parts = {split: _files(part, [labels[path.parent.name] for path in part]) for split, part in paths.items()}
    return names, parts


def rows(folder: Path, facts: Benchmark) -> tuple[*ClassificationSource, Sequence[str]] | RetrievalSource:
    """Read a list of images, as the entry says; a source of classes is followed by the names of the groups.

    facts["splits"]: for each split a `file` (.csv, .tsv, .json, .jsonl), a text `file` whose lines match `pattern`,
    `lines` (a text file for each column), or `paths`, a pattern of the images' paths; `where` selects rows by a
    column, `first` the first of them. `image`, `caption` or `label`, and `group` are columns, or formats of columns;
    `caption_file` names a text file whose first line is the caption. `labels`: class name of each label, in order;
    rows with other labels are left out. Otherwise labels are class names, and sorted.
    """
    parts = dict[str, list[Row]]()
    for split, source in facts["splits"].items():
        everything: Iterable[Row]
        if "paths" in source:
            paths = sorted(str(path.relative_to(folder)) for path in existing(folder).rglob("*"))
            everything = (match.groupdict() | {"path": match[0]} for match in _matches(source["paths"], paths))
        elif "lines" in source:
            files = source["lines"].values()
            columns = [read_lines(existing(folder, file), LARGEST_LIST, REMEDY) for file in files]
            if len({len(column) for column in columns}) > 1:
                raise ConfigError(f"{folder}: {', '.join(files)} have different numbers of lines; {REMEDY}")
            everything = [dict(zip(source["lines"], line, strict=True)) for line in zip(*columns, strict=True)]
        elif "pattern" in source:
            lines = read_lines(existing(folder, source["file"]), LARGEST_LIST, REMEDY)
            everything = (match.groupdict() for match in _matches(source["pattern"], lines))
        elif (path := existing(folder, source["file"])).suffix in (".csv", ".tsv"):
            everything = io.read_table(path, ())
        elif path.suffix == ".json":
            everything = io.read_json(path, LARGEST_LIST, REMEDY, root=list)
        else:
            everything = io.read_json_lines(path, LARGEST_LIST)
        where = source.get("where", {}).items()
        selected = (row for row in everything if all(str(row.get(key)) == str(value) for key, value in where))
        parts[split] = list(islice(selected, source.get("first")))
    if "label" not in facts:
        captions: dict[Path, list[str]] = {}
        for row in parts["test"]:
            caption = _value(row, facts.get("caption") or facts["caption_file"])
            if "caption_file" in facts:
                caption = read_lines(existing(folder, caption), MB, REMEDY)[0]
            path = below(folder, _value(row, facts["image"]), links=True)
            captions.setdefault(path, []).append(" ".join(caption.split()))
        return _files(map(existing, captions), ()).images, list(captions.values())

    def column(part: Iterable[Row], key: str) -> list[str]:
        return [_value(row, facts[key]) for row in part] if key in facts else []

    own = {name for part in parts.values() for name in column(part, "label")}
    # Numbers are sorted by their value.
    ordered = sorted(own, key=lambda name: (len(name) * name.isdigit(), name))
    names = facts.get("labels") or dict(zip(ordered, ordered, strict=True))
    order = {str(name): label for label, name in enumerate(names)}
    parts = {split: [row for row in part if _value(row, facts["label"]) in order] for split, part in parts.items()}
    groups = sorted({name for part in parts.values() for name in column(part, "group")})
    splits = dict[str, LabelledSplit]()
    for split, part in parts.items():
        labels, numbers = [order[name] for name in column(part, "label")], map(groups.index, column(part, "group"))
        splits[split] = _files([existing(folder, path) for path in column(part, "image")], labels, groups=[*numbers])
    return list(names.values()), splits, groups


def _value(row: Row, column: str) -> str:
    try:
        return column.format_map(row) if "{" in column else str(row[column])
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"a row of the list has no {column}: {io.shortened(row, 200)}; {REMEDY}") from error


def _matches(pattern: str, texts: Iterable[str]) -> Iterator[re.Match[str]]:
    return filter(None, (re.fullmatch(pattern, text) for text in texts))


def pets(folder: Path, facts: Benchmark) -> ClassificationSource:
    _, splits = torchvision(folder, facts)
    # torchvision capitalises all names; in the files only cats are capitalised.
    names = {label: path.stem.rsplit("_", 1)[0] for path, label in _samples(splits["test"])}
    return [names[label] for label in sorted(names)], splits


def ucf101(folder: Path, facts: Benchmark) -> ClassificationSource:
    """frames/<Class>/<video>.jpg of the test lists in ucfTrainTestlist/, all three folds together."""
    lists = existing(folder / "ucfTrainTestlist")

    def column(file: Path, place: int) -> list[str]:
        lines = read_lines(existing(file), 64 * MB, REMEDY)
        return [line.split()[place] for line in lines if line.strip()]

    names = column(lists / "classInd.txt", 1)
    videos = [video for fold in (1, 2, 3) for video in column(lists / f"testlist0{fold}.txt", 0)]
    paths = [below(existing(folder / "frames"), video, links=True).with_suffix(".jpg") for video in videos]
    test = _files(paths, [names.index(path.parent.name) for path in paths])
    return [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name) for name in names], {"test": test}


def imagenet_real(folder: Path, facts: Benchmark) -> ClassificationSource:
    """ImageNet's validation images with the several labels of "ReaL"; images without a label are left out."""
    names, splits = class_folders(folder, facts)
    # The list is in the order of the file names, ILSVRC2012_val_00000001.JPEG first.
    labels = json.loads(resources.files("timm").joinpath("data/_info/imagenet_real_labels.json").read_text())
    rows = [(path, labels[int(path.stem.rpartition("_")[2]) - 1]) for path, _ in _samples(splits["test"])]
    paths, every = zip(*((path, right) for path, right in rows if right), strict=True)
    return names, {"test": _files(paths, [right[0] for right in every], all_labels=every)}


def babel_imagenet(folder: Path, facts: Benchmark) -> ClassificationSource:
    """ImageNet's validation images of the classes that have a name in the language."""
    _, splits = class_folders(folder, facts)
    classes, names = prompts.package_list(facts["classes_of"])
    chosen = {label: position for position, label in enumerate(classes)}
    samples = [(path, chosen[label]) for path, label in _samples(splits["test"]) if label in chosen]
    return names, {"test": _files(*zip(*samples, strict=True))}


def voc2007(folder: Path, facts: Benchmark) -> ClassificationSource:
    """Images of VOC2007 with the classes of all their objects, difficult ones too, as in CLIP_benchmark."""
    base, splits = folder / "VOCdevkit" / "VOC2007", {}
    for split in facts["splits"]:
        classes: dict[str, list[int]] = {}
        for label, name in enumerate(facts["labels"]):
            for line in read_lines(existing(below(base, f"ImageSets/Main/{name}_{split}.txt")), MB, REMEDY):
                number, flag = line.split()
                classes.setdefault(number, []).extend([label] if flag != "-1" else [])
        every = list(classes.values())
        paths = [below(base / "JPEGImages", f"{number}.jpg") for number in classes]
        splits[split] = _files(paths, [own[0] if own else -1 for own in every], all_labels=every)
    return facts["labels"], splits


def karpathy(folder: Path, facts: Benchmark) -> RetrievalSource:
    """Karpathy's dataset_*.json next to the images, with the first `captions` captions of each image, as in papers."""
    lists = sorted(folder.glob("dataset_*.json"))
    if not lists:
        raise FileNotFoundError(f"{folder} has no dataset_*.json")
    entries = [entry for entry in karpathy_entries(lists[0], REMEDY) if entry["split"] == facts["split"]]
    # Flickr's entries name no folder.
    names = [f"{entry.get('filepath', facts.get('images_folder'))}/{entry['filename']}" for entry in entries]
    texts = [[sentence["raw"].strip() for sentence in entry["sentences"][: facts["captions"]]] for entry in entries]
    return _files([existing(folder, name) for name in names], ()).images, texts


def pairs(folder: Path, facts: Benchmark) -> RetrievalSource:
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


def cut(folder: Path, facts: Benchmark) -> ClassificationSource:
    """Cut each class's files, in the order of their names, from first to end; numbers with a point are shares."""
    names, whole = (torchvision if "class" in facts else class_folders)(folder, facts)
    parts: dict[str, list[tuple[Path, int]]] = {}
    samples = sorted(_samples(whole["all"]), key=lambda sample: (sample[1], sample[0].name))
    for _, group in groupby(samples, key=itemgetter(1)):
        files = list(group)
        for split, limits in facts["cut"].items():
            first, end = (int(limit * len(files)) if isinstance(limit, float) else limit for limit in limits)
            parts.setdefault(split, []).extend(files[first:end])
    splits = {split: _files([path for path, _ in part], [label for _, label in part]) for split, part in parts.items()}
    return [name.replace("/", " ") for name in names], splits


def _files(paths: Iterable[Path | str], labels: Sequence[int], **facts: Any) -> LabelledSplit:
    return LabelledSplit(ImageFiles([ImageFile(Path(path)) for path in paths]), labels, **facts)


def _samples(split: LabelledSplit) -> list[tuple[Path, int]]:
    assert isinstance(split.images, ImageFiles)
    return [(split.images.path(index), label) for index, label in enumerate(split.labels)]


# Choice datasets in tables; compositional.yaml explains their layouts.


class Parts(Images):
    """Images of other collections, or parts of them."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> Image:
        images, row, box = self._parts[index]
        image = images[row]
        return image.crop((box[0], box[1], box[0] + box[2], box[1] + box[3])) if box else image  # type: ignore[arg-type]

    def encoded(self, index: int) -> bytes:
        images, row, box = self._parts[index]
        return png(self[index]) if box else images.encoded(row)

    def fingerprint(self) -> str:
        collections = dict.fromkeys(images for images, _, _ in self._parts)
        parts = [(row, box) for _, row, box in self._parts]
        return version_of([], [images.fingerprint() for images in collections], parts)


def read_tables(folder: Path, layout: Mapping[str, Any]) -> ChoiceSource:
    """Read examples of .json, .csv or .parquet files, see compositional.yaml. Raises FileNotFoundError without any."""
    paths = [path for pattern in layout["files"] for path in sorted(folder.glob(pattern))]
    if not paths:
        raise FileNotFoundError(f"{folder} has no {' or '.join(layout['files'])}")
    files: dict[str, Images] = {}
    parts: dict[Part, int] = {}
    captions: list[str] = []
    examples: list[Example] = []
    count = layout.get("rows", 1)
    for path in paths:
        name = path.relative_to(folder).parts[0].split(".")[0]
        rows = [{"file": name, **row} for row in _table_rows(path, layout.get("columns", ()))]
        for start in range(0, len(rows) - count + 1, count):
            first, places = len(captions), []
            for row in rows[start : start + count]:
                box = tuple(float(_filled(f"{{{column}}}", row, path)) for column in layout.get("crop", ()))
                for template in layout["images"]:
                    image = row.get(template[1:-1])
                    if not isinstance(image, tuple):
                        # The file name is the last part of the URL.
                        file = re.sub("https?://.*/", "", _filled(template, row, path))
                        image = (files.setdefault(file, _files([existing(folder, file)], ()).images), 0)
                    places.append(parts.setdefault((*image, box), len(parts)))
                captions += [_filled(template, row, path) for template in layout["captions"]]
            answers = [(0, text) for text in range(layout.get("right", 1))]
            pairs = frozenset(answers if len(places) == 1 else ((place, place) for place in range(len(places))))
            category = _filled(layout.get("category", ""), rows[start], path)
            examples.append(Example(tuple(places), tuple(range(first, len(captions))), pairs, category))
    return Parts(list(parts)), captions, examples


def read_associations(folder: Path, layout: Mapping[str, Any]) -> ChoiceSource:
    """Read cues with candidate images, of which some belong to the cue (WinoGAViL). Raises FileNotFoundError."""
    files: dict[str, int] = {}
    captions: list[str] = []
    examples: list[Example] = []
    table = existing(folder, layout["file"])
    for row in io.read_table(table, ("candidates", "cue", "associations")):
        with one_message(f"{table}: the cue {row['cue']!r} has no JSON lists of candidates and associations"):
            names, right = json.loads(row["candidates"]), json.loads(row["associations"])
        places = tuple(files.setdefault(layout["image"].format(name=name), len(files)) for name in names)
        pairs = frozenset((place, 0) for place, name in enumerate(names) if name in right)
        # DataComp's metric is the Jaccard index of the examples with 10 or 12 candidates.
        category = "10 to 12 candidates" if len(names) >= 10 else "5 to 6 candidates"
        examples.append(Example(places, (len(captions),), pairs, category))
        # The prompt of DataComp.
        captions.append(f"{'An' if row['cue'].lower().startswith(tuple('aeiou')) else 'A'} {row['cue'].lower()}")
    return Parts([(_files([existing(folder, file)], ()).images, 0, ()) for file in files]), captions, examples


def _table_rows(path: Path, columns: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    """Rows of a table; (images, row) in place of an encoded image. columns: names of values for rows that are lists."""
    if path.suffix == ".csv":
        return io.read_table(path, ())
    if path.suffix == ".parquet":
        schema = next(row_groups(path, ()))[2]
        encoded = [field.name for field in schema if str(field.type).startswith("struct<bytes")]
        images = {name: TableImages([path], name) for name in encoded}
        names = [name for name in schema.names if name not in images]
        rows = [row for _, part, _ in row_groups(path, names) for row in part.to_pylist()]
        return [row | {name: (part, number) for name, part in images.items()} for number, row in enumerate(rows)]
    content = io.read_json(path, 256 * io.MB, REMEDY, object)
    rows = list(content.values()) if isinstance(content, dict) else content
    return [dict(zip(columns, row, strict=True)) if isinstance(row, list) else row for row in rows]


def _filled(template: str, row: Mapping[str, Any], path: Path) -> str:
    try:
        return template.format_map(row)
    except LookupError as error:
        raise io.DamagedFileError(path, f"has a row without {error}: {io.shortened(row, 200)}", REMEDY) from None
