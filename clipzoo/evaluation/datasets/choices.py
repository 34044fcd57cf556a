"""Choice datasets in the tables that their authors distribute; compositional.yaml explains their layouts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image

from clipzoo import io
from clipzoo.errors import one_message
from clipzoo.evaluation.datasets.dataset import Example, ImageFile, ImageFiles, Images, existing, png, version_of
from clipzoo.evaluation.datasets.tables import TableImages, row_groups

REMEDY = "download it again"
ChoiceSource = tuple[Images, Sequence[str], Sequence[Example]]
Part = tuple[Images, int, tuple[float, ...]]
"""Image of a collection, and the left, top, width and height of a part in pixels; empty for the whole image."""


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
        rows = [{"file": name, **row} for row in _rows(path, layout.get("columns", ()))]
        for start in range(0, len(rows) - count + 1, count):
            first, places = len(captions), []
            for row in rows[start : start + count]:
                box = tuple(float(_filled(f"{{{column}}}", row, path)) for column in layout.get("crop", ()))
                for template in layout["images"]:
                    image = row.get(template[1:-1])
                    if not isinstance(image, tuple):
                        # The file name is the last part of the URL.
                        file = re.sub("https?://.*/", "", _filled(template, row, path))
                        image = (files.setdefault(file, _image(folder, file)), 0)
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
    return Parts([(_image(folder, file), 0, ()) for file in files]), captions, examples


def _rows(path: Path, columns: Sequence[str]) -> Iterable[Mapping[str, Any]]:
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


def _image(folder: Path, name: str) -> Images:
    return ImageFiles([ImageFile(existing(folder, name))])
